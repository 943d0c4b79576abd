// All runs at a glance: what needs somebody first, what is over last.

import { ask, here } from "./api.js";
import { h, replace } from "./dom.js";
import { badge, since, unknown } from "./parts.js";
import { DASH, PROTECTIONS, STATES, shown, step } from "./words.js";

const FILTER_FROM = 10, OVER_AT_FIRST = 20;
const COLUMNS = ["Run", "State", "Protection", "Incidents", "Step", "Loss", "Gradient norm", "Last report"];

// Advice is not counted: it can wait for the day.
const acted = (run) => (run.open_incidents === null ? null : run.open_incidents - (run.open_advice ?? 0));
const damaged = (run) => run.damaged_snapshots ?? 0;
const bare = (run) => run.state === "running" && run.step !== null && run.mode !== "observe" && ["off", "blind"].includes(run.protection);
const rank = (run) => (run.state === "lost" ? 0 : run.state === "halted" ? 1 : run.state === "running" ? (bare(run) ? 2 : acted(run) || damaged(run) ? 3 : 4) : 5);
const plural = (n, what) => `${n} ${what}`;
// Of a run from before the sidecar's start the list may lack what opening the run reads.
const unread = (run) => (run.state === "running" ? (run.step === null ? "none yet" : "not known") : "not at hand");

export class RunsView {
  constructor() {
    this.title = "Runs";
    this.events = "/v1/events";
    this.notes = h("div", {});
    this.body = h("div", {});
    this.count = h("p", { class: "mute" });
    this.input = h("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false", placeholder: "part of a name", oninput: () => this.#paint() });
    this.filter = h("div", { class: "row", hidden: true }, h("label", { for: "filter" }, "Find"), this.input);
    this.runs = [];
    this.all = this.stored = false;
    this.left = 0; // runs that are over and on disk only
    this.element = h("div", {}, h("div", { class: "head" }, h("h1", {}, "Runs"), this.filter), this.notes, this.count, this.body);
  }

  async load() {
    const { runs, trouble, stored } = await ask(this.stored ? "/v1/runs?all=1" : "/v1/runs");
    this.loaded = Date.now();
    this.left = this.stored ? 0 : stored ?? 0;
    replace(this.notes, trouble ? h("p", { class: "note bad" }, `The sidecar's record is in trouble, runs may be missing: ${trouble}`) : null);
    this.runs = runs.sort((a, b) => rank(a) - rank(b) || (rank(a) === 5 ? (b.ended_at ?? 0) - (a.ended_at ?? 0) : 0) || a.run.localeCompare(b.run));
    this.#paint();
  }

  #paint() {
    const { runs } = this;
    if (!runs.length) {
      this.count.textContent = "";
      replace(this.body, h("section", { class: "plain" },
        h("p", { class: "empty" }, "No run has reported here yet."),
        h("p", {}, "Point a trainer at this sidecar: ", h("code", {}, `sentinel.attach(trainer, sidecar="${here("/").replace(/\/$/, "")}")`),
          ", or set ", h("code", {}, `SENTINEL_SIDECAR=${here("/").replace(/\/$/, "")}`), ".")));
      return;
    }
    this.filter.hidden = runs.length < FILTER_FROM;
    const wanted = this.input.value.trim().toLowerCase();
    const found = runs.filter((run) => run.run.toLowerCase().includes(wanted));
    const over = found.filter((run) => rank(run) === 5), live = found.filter((run) => rank(run) < 5);
    const some = this.all || wanted || over.length <= OVER_AT_FIRST + 5 ? over : over.slice(0, OVER_AT_FIRST);
    const need = live.filter((run) => rank(run) < 4).length;
    const text = wanted ? `${found.length} of ${runs.length} runs` : [need ? `${plural(need, need === 1 ? "needs" : "need")} a look` : "none needs a look", plural(runs.filter((r) => r.state === "running").length, "running"), plural(over.length, "finished")].join(" · ");
    if (this.count.textContent !== text) this.count.textContent = text;
    if (!found.length) { replace(this.body, h("p", { class: "empty" }, `No run is named like “${wanted}”.`)); return; }
    replace(this.body, h("table", { class: "cards runs", role: "table", "aria-label": "Runs" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, COLUMNS.map((name) => h("th", { scope: "col", role: "columnheader" }, name)))),
      h("tbody", { role: "rowgroup" }, [...live, ...some].map((run) => this.#row(run)))),
    some.length < over.length ? h("button", { type: "button", class: "small more", "data-key": "all", onclick: () => { this.all = true; this.#paint(); } }, `Show all ${over.length} finished runs`) : null,
    this.left ? h("button", { type: "button", class: "small more", "data-key": "stored", onclick: () => { this.stored = this.all = true; this.load(); } }, `Show ${this.left} more that are over and on disk only`) : null);
  }

  #row(run) {
    const cell = (label, ...children) => h("td", { role: "cell", "data-label": label, class: children[0]?.className === "mute" ? "bare" : null }, h("span", {}, children));
    const value = (text) => (text === DASH ? h("span", { class: "mute" }, unread(run)) : text);
    const protection = run.step === null || run.state !== "running" ? h("span", { class: "mute" }, { running: "none yet", lost: "not known" }[run.state] ?? "over")
      : badge(PROTECTIONS[run.protection] ?? unknown(run.protection ?? "not known"));
    return h("tr", { role: "row", "data-key": `row-${run.run}`, class: rank(run) < 4 ? "look" : null },
      h("th", { scope: "row", role: "rowheader" }, h("a", { href: `#/runs/${encodeURIComponent(run.run)}`, "data-key": `run-${run.run}` }, run.run)),
      cell("State", badge(STATES[run.state] ?? unknown(run.state))),
      cell("Protection", protection, run.mode === "observe" ? h("span", { class: "mute" }, " observing only") : ""),
      cell("Incidents", this.#incidents(run)),
      cell("Step", value(step(run.step))),
      cell("Loss", value(shown(run.loss))),
      cell("Gradient norm", value(shown(run.grad_norm))),
      cell("Last report", run.step === null && run.state === "running" ? "none yet" : since(Date.now() - run.last_report_s_ago * 1000)));
  }

  #incidents(run) {
    const open = acted(run), advice = run.open_advice ?? 0;
    const broken = damaged(run) ? badge(["✖", "bad", `${damaged(run)} damaged ${damaged(run) === 1 ? "snapshot" : "snapshots"}`]) : null;
    if (open === null) return [broken, broken ? " " : null, h("span", { class: "mute" }, unread(run))];
    if (!open && !advice) return broken ?? h("span", { class: "mute" }, "none");
    return [broken, broken ? " " : null, open ? badge(["!", run.state === "finished" ? "mute" : "bad", `${open} open`]) : null,
      open && advice ? " " : null, advice ? badge(["△", "mute", `${advice} advice`]) : null];
  }
}
