// All runs at a glance.

import { ask } from "/assets/api.js";
import { h, replace } from "/assets/dom.js";
import { badge, since, unknown } from "/assets/parts.js";
import { PROTECTIONS, STATES, shown, step } from "/assets/words.js";

const ORDER = { lost: 0, halted: 1, running: 2, finished: 3 };

export class RunsView {
  constructor() {
    this.title = "Runs";
    this.events = "/v1/events";
    this.notes = h("div", {});
    this.body = h("div", {});
    this.element = h("div", {}, h("div", { class: "head" }, h("h1", {}, "Runs")), this.notes, this.body);
  }

  touches() { return ["runs"]; }

  async load() {
    const { runs, trouble } = await ask("/v1/runs");
    replace(this.notes, trouble ? h("p", { class: "note bad" }, `The sidecar's record is in trouble, runs may be missing: ${trouble}`) : null);
    const now = Date.now();
    if (!runs.length) {
      replace(this.body, h("section", { class: "plain" },
        h("p", { class: "empty" }, "No run has reported here yet."),
        h("p", {}, "Point a trainer at this sidecar: ", h("code", {}, `sentinel.attach(trainer, sidecar="${location.origin}")`),
          ", or set ", h("code", {}, `SENTINEL_SIDECAR=${location.origin}`), ".")));
      return;
    }
    runs.sort((a, b) => (ORDER[a.state] ?? 9) - (ORDER[b.state] ?? 9) || a.run.localeCompare(b.run));
    const cell = (label, ...children) => h("td", { role: "cell", "data-label": label }, h("span", {}, children));
    const rows = runs.map((run) => h("tr", { role: "row", "data-key": `row-${run.run}` },
      h("th", { scope: "row", role: "rowheader" }, h("a", { href: `#/runs/${encodeURIComponent(run.run)}`, "data-key": `run-${run.run}` }, run.run)),
      cell("State", badge(STATES[run.state] ?? unknown(run.state))),
      cell("Protection", run.step === null || run.state !== "running" ? "–" : badge(PROTECTIONS[run.protection] ?? unknown(run.protection ?? "not known")), run.mode === "observe" ? " observing only" : ""),
      cell("Incidents", open(run)),
      cell("Step", step(run.step)),
      cell("Loss", shown(run.loss)),
      cell("Gradient norm", shown(run.grad_norm)),
      cell("Last report", run.step === null && run.state === "running" ? "none yet" : since(now - run.last_report_s_ago * 1000)),
    ));
    replace(this.body, h("table", { class: "cards", role: "table", "aria-label": "Runs" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ["Run", "State", "Protection", "Incidents", "Step", "Loss", "Gradient norm", "Last report"]
        .map((text) => h("th", { scope: "col", role: "columnheader" }, text)))),
      h("tbody", { role: "rowgroup" }, rows)));
  }
}

function open(run) {
  const count = run.open_incidents;
  if (count === undefined || count === null) return "–";
  return count ? badge(["!", "bad", `${count} open`]) : "none open";
}
