// One run: how it is, what happened to it, what a person can do about it.

import { Refused, access, ask, runPath } from "./api.js";
import { HeatMap, LineChart } from "./charts.js";
import { calmly, h, replace, say } from "./dom.js";
import { Incidents } from "./incidents.js";
import { badge, confirmDialog, nameField, sender, since, unknown } from "./parts.js";
import { Range } from "./range.js";
import { loadMap, loadSeries } from "./series.js";
import { guide } from "./todo.js";
import {
  COPIES, DASH, ORDERS, ORDER_STATES, PROTECTIONS, PROTECTION_MEANS, STATES, UNVERIFIED, ago, because,
  bytes, missing, number, sentence, shown, step,
} from "./words.js";

const MAPS = [
  { signal: "layer_grad_norm", title: "Gradient norm by layer", log: true },
  { signal: "layer_attention_max_logit", title: "Largest attention logit by layer", limit: 50 },
  { signal: "layer_update_ratio", title: "Update-to-weight ratio by layer", log: true },
  { signal: "layer_activation_rms", title: "Activation RMS by layer", log: true },
];
const MEMORY = ["weights", "gradients", "optimizer", "activations", "other"]; // what adds up
const SERIES_EVERY_MS = 2000, MAPS_EVERY_MS = 10000, MAP_COLUMNS = 300, MEMORY_KEPT = 600, RECENT_ROWS = 50, AROUND = 20, ORDERS_SHOWN = 5;
const COMES_BACK = { "registered again": "Its trainer has registered again", back: "Its trainer is back" };

export class RunView {
  constructor(name, refresh) {
    this.title = name;
    this.name = name;
    this.refresh = refresh;
    this.events = runPath(name, "/events");
    this.about = null;
    this.spots = {};
    this.seriesAt = this.mapsAt = this.turn = 0;
    this.band = null; // steps of the incident that was looked at last
    this.wanted = null; // a layer to be shown when the maps are there
    this.told = new Map();
    this.targets = new Map();
    this.asked = 0;
    const place = (what, options = {}) => (this.spots[what] = h("div", options));

    this.range = new Range(() => this.#fetch());
    this.list = new Incidents(name, { steps: (i) => this.#showSteps(i), layer: (i, layer) => this.#showLayer(i, layer) }, refresh);
    const charted = { range: this.range, open: (mark) => this.#openMark(mark) };
    this.loss = new LineChart({ title: "Loss", format: (v) => shown(v), empty: "no step has reported a loss yet", ...charted });
    this.norm = new LineChart({ title: "Gradient norm before clipping", log: true, empty: "no step has reported a gradient norm yet", ...charted });
    this.maps = MAPS.map((options) => ({ ...options, map: new HeatMap(options), box: h("section", { tabindex: "-1", "aria-label": options.title, hidden: true }, h("h2", {}, options.title)) }));
    this.memory = new LineChart({ title: "Memory", format: bytes, least: 0, height: 180 });
    this.memoryPast = { x: [], y: {} };
    this.recent = h("details", { class: "table", ontoggle: () => this.#recentTable() },
      h("summary", {}, "The newest steps as a table"),
      this.recentRows = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The newest steps" }));
    this.element = h("div", {},
      h("p", { class: "back" }, h("a", { href: "#/" }, "← All runs")),
      place("head", { class: "head" }), place("notes"), place("facts"),
      h("section", { class: "plain", "aria-label": "Orders" }, place("actions", { class: "row actions" }), place("orders")),
      this.list.element,
      this.curves = h("section", { "aria-label": "Curves" }, h("div", { class: "head" }, h("h2", {}, "Loss"), this.range.element), this.range.text,
        this.loss.element, h("h2", {}, "Gradient norm"), this.norm.element,
        place("hint"), this.recent),
      h("div", { class: "cols" }, this.maps.map(({ box }) => box)), place("unmeasured"),
      h("section", {}, h("h2", {}, "Snapshots"), place("snapshots")),
      h("section", {}, h("h2", {}, "Memory"), place("memory")),
    );
    replace(this.spots.head, h("h1", {}, name));
    replace(this.spots.hint, h("p", { class: "mute" }, "Drag to zoom; click a mark to open its incident."));
    replace(this.spots.unmeasured, h("p", { class: "empty" }, "loading"));
    for (const { box, map } of this.maps) box.append(map.element);
  }

  leave() { this.left = true; }

  event(kind, data) {
    if (kind === "run" && COMES_BACK[data?.what]) say(COMES_BACK[data.what]);
    if (kind === "restored" && data) this.targets.clear();
    // What changes the past of the curve is shown at once; plain steps can wait their turn.
    if (kind !== "steps") this.seriesAt = 0;
  }

  async load() {
    const [about, told] = await Promise.all([
      ask(runPath(this.name)),
      // A broken database must not hide the run.
      ask(runPath(this.name, "/incidents")).catch((error) => { if (error instanceof Refused && error.status === 503) return null; throw error; }),
    ]);
    this.about = about;
    this.incidents = merged(about.ledger?.incidents ?? [], told?.incidents ?? []);
    this.copies = copiesOf(about);
    await this.#whereTo();
    this.loaded = Date.now();
    if (this.left) return;
    this.#facts();
    this.#actions();
    this.#orders();
    this.list.update(about, this.incidents, this.targets, lacking(about, this.incidents, told === null));
    this.#head();
    this.#snapshots();
    this.#memory();
    this.range.heard(about.step);
    if (this.loaded - this.seriesAt >= SERIES_EVERY_MS) await this.#curves();
    if (this.loaded - this.mapsAt >= MAPS_EVERY_MS) await this.#layers();
  }

  // Where rollbacks went to: asked for when there is one of which it is not known.
  async #whereTo() {
    const at = this.incidents.flatMap((i) => (i.actions ?? []).filter(([, action]) => action === "rollback").map(([step]) => step));
    if (Number.isInteger(this.about.ledger?.pending_restore)) return; // what will be restored is not known yet
    if (at.every((step) => this.targets.has(step))) return;
    const told = await ask(runPath(this.name, "/decisions")).catch(() => null);
    for (const one of told?.decisions ?? []) {
      if (one.action === "rollback" && !this.targets.get(one.step)) this.targets.set(one.step, one.target);
    }
    // The database is a moment behind: asked a few times, then no more.
    this.asked += 1;
    if (this.asked % 5 === 0) for (const step of at) if (!this.targets.has(step)) this.targets.set(step, null);
  }

  // ---- how it is ------------------------------------------------------------------------

  #facts() {
    const run = this.about, ledger = run.ledger ?? {}, readings = run.decision?.readings ?? {};
    const live = run.state === "running" && run.step !== null;
    this.badges = [badge(STATES[run.state] ?? unknown(run.state)), live ? badge(PROTECTIONS[run.protection] ?? unknown(run.protection ?? "protection not known yet")) : null];
    const notes = [];
    if (live && run.protection === "off") notes.push(["bad", `Protection is off: ${offBecause(run)}`]);
    else if (live && run.protection && run.protection !== "armed") notes.push([run.protection === "blind" ? "bad" : "", `Protection: ${run.protection_why || (PROTECTION_MEANS[run.protection] ?? run.protection)}.`]);
    if (run.step === null) notes.push(["", run.state === "running" ? "The trainer has registered and not reported a step yet." : "The run ended before a step was reported, or its record has not been read since the sidecar was started."]);
    if (!run.decides) notes.push(["warn", `This sidecar only records the run: ${run.reason}`]);
    if (live && ledger.stopped) notes.push(["bad", "The rollback budget is spent: training goes on, only non-finite steps and extreme norms are still skipped. A person is needed; “Resume” refills the budget."]);
    if (run.state === "lost") notes.push(["bad", "The trainer has been silent for too long. Look at the process: it may hang, be killed, or have lost its network."]);
    if (run.state === "halted") notes.push(["bad", `The run was halted. Clear it with: sentinel resume ${this.name}`]);
    if (run.second_writers_refused?.length) notes.push(["warn", `A second process tried to write this run (${run.second_writers_refused.length} times) and was refused.`]);
    if (run.record?.holes) notes.push(["warn", `${run.record.holes} steps are missing in the record.`]);
    for (const one of this.copies) if (one.warning) notes.push(["bad", `${sentence(one.warning)}.`]);
    replace(this.spots.notes, notes.map(([tone, text]) => h("p", { class: `note ${tone}` }, text)));

    const [newest] = this.copies.filter((s) => s.healthy);
    const factor = number(run.decision?.lr_factor) ?? 1;
    const counters = ledger.counters ?? {};
    const total = (pairs) => (pairs ?? []).reduce((n, [, count]) => n + count, 0);
    // A rollback that was due and not done (RULE/none, RULE/failed) is none.
    const undone = (counters.rollbacks ?? []).filter(([what]) => !what.endsWith("/restored")), vain = total(undone);
    const skipped = run.skipped ?? (run.ledger ? total(counters.skipped) : null);
    const back = run.rolled_back ?? (run.ledger ? total(counters.rollbacks) - vain : null);
    const fact = (name, value, more) => h("div", {}, h("dt", {}, name), h("dd", {}, value, value === DASH ? h("small", {}, missing(run)) : more ? h("small", {}, more) : null));
    replace(this.spots.facts, h("dl", { class: "facts" },
      fact("Step", step(run.step), run.ledger?.attempt ? `attempt ${run.ledger.attempt}` : null),
      fact("Loss", shown(run.loss), readings.loss_baseline !== undefined && readings.loss_baseline !== null ? `expected ${shown(readings.loss_baseline)}` : null),
      fact("Gradient norm", shown(run.grad_norm), readings.norm_baseline ? `mean ${shown(readings.norm_baseline)}` : null),
      fact("Learning rate", !run.decision ? DASH : factor === 1 ? "as scheduled" : `× ${shown(factor, 3)}`, !run.decision || factor === 1 ? null : "of the schedule"),
      fact("Skipped", skipped === null ? DASH : step(skipped) === "0" ? "none" : step(skipped)),
      fact("Rolled back", back === null ? DASH : back || "never", [
        back && Number.isInteger(ledger.last_target) ? `last to step ${step(ledger.last_target)}` : "",
        vain && run.mode !== "observe" ? `${vain} could not be done` : ""].filter(Boolean).join("; ")),
      fact("Healthy snapshot", newest ? step(newest.step) : run.ledger ? "none" : DASH, newest ? `newest; ${copyBadge(newest)[2]}` : null),
      run.gauges?.tokens_per_second === undefined ? null : fact("Tokens per second", shown(run.gauges.tokens_per_second)),
      run.gauges?.clipped_step_ratio === undefined ? null : fact("Clipped steps", `${shown(100 * number(run.gauges.clipped_step_ratio), 3)} %`),
      fact("Last report", run.step === null && run.state === "running" ? "none yet" : since(Date.now() - run.last_report_s_ago * 1000)),
      run.watched ? null : fact("Registered", since(run.registered_at * 1000)),
      fact("Policy", run.policy, run.mode === "observe" ? "only observing" : null),
    ));
  }

  // ---- what a person can do ---------------------------------------------------------------

  #actions() {
    // A lost one may live behind a broken network: what it is told it may still hear.
    const run = this.about, heard = ["running", "lost"].includes(run.state) && !run.watched, live = heard && access.orders;
    const paused = run.ledger?.automation === false;
    const button = (key, text, act, options = {}) => h("button", { type: "button", "data-key": key, disabled: !live, onclick: act, ...options }, text);
    if (["finished", "halted"].includes(run.state)) {
      replace(this.spots.actions, h("span", { class: "mute" }, "This run is over: it hears no order."));
      return;
    }
    replace(this.spots.actions,
      paused || run.ledger?.stopped ? button("resume", "Resume automation…", () => this.#order("resume")) : null,
      paused ? null : button("pause", "Pause automation…", () => this.#order("pause")),
      button("skip", "Skip next step…", () => this.#order("skip_next")),
      button("rollback", "Roll back…", () => this.#rollback()),
      button("scale", "Scale learning rate…", () => this.#scale()),
      button("halt", "Halt…", () => this.#order("halt"), { class: "danger" }),
      live ? (run.state === "lost" ? h("span", { class: "mute" }, "This run is lost: an order acts only if its trainer comes back before it expires.") : null) : h("span", { class: "mute" }, heard ? `No orders from here: ${access.why}.` : run.watched && run.state === "running"
        ? "This run does not report here, so it hears no order from here. To pause it, put a file PAUSE into its run directory."
        : "This run is lost: nobody would hear an order."));
  }

  #ask(kind, options, fields = [], values = () => ({})) {
    const send = sender(this.name, kind);
    confirmDialog({
      ...options,
      fields: [...fields, nameField()],
      act: async (given) => {
        const order = await send(values(given), given.by);
        say(`Order sent: ${ORDERS[kind]}. ${this.about.state === "lost" && order?.detail ? sentence(order.detail) : "It is carried out at the next step"}.`);
        this.refresh();
      },
    });
  }

  #order(kind) {
    this.#ask(kind, {
      pause: { title: "Pause automation?", button: "Pause automation", text: "Decisions go on being made and recorded, but nothing is done: no skip, no rollback. The run is unprotected until you resume." },
      resume: { title: "Resume automation?", button: "Resume automation", text: "Rules act again from the next step, with a full rollback budget." },
      skip_next: { title: "Skip the next step?", button: "Skip the next step", text: "The next step's gradients are dropped: no parameter and no optimizer state moves. The data goes on." },
      halt: { title: `Halt ${this.name}?`, button: "Halt the run", danger: true, text: ["The training process saves what is needed for a post-mortem and ends with exit code 86. It does not start again by itself.", "To only stop acting, pause automation instead."] },
    }[kind]);
  }

  #rollback(chosen) {
    const healthy = this.copies.filter((s) => s.healthy);
    if (!healthy.length) {
      confirmDialog({ title: "Nothing to roll back to", text: "This run has no healthy snapshot yet. One is confirmed by quiet steps after it was taken.", button: "Close", act: async () => {} });
      return;
    }
    const named = (one) => `step ${step(one.step)}: ${copyBadge(one)[2]}`;
    const note = h("p", { role: "status" });
    const tell = () => {
      const one = healthy.find((s) => String(s.step) === input.value) ?? healthy[0], [sign, tone, word] = copyBadge(one);
      note.className = `note ${tone === "mute" ? "" : tone}`;
      note.textContent = `${sign} ${one.warning ? `${sentence(one.warning)}. You can still order it.` : `${sentence(word)}${one.disk === "sound" ? ` ${readAt(one)}` : one.detail ? `: ${one.detail}` : ""}.`}`;
    };
    const input = h("select", { onchange: tell }, h("option", { value: "" }, `the newest healthy one (${named(healthy[0])})`),
      healthy.map((one) => h("option", { value: one.step, selected: one.step === chosen }, named(one))));
    tell();
    this.#ask("rollback", {
      title: `Roll ${this.name} back?`, button: "Roll back", danger: true,
      text: `Weights and optimizer go back to a snapshot at the next safe point. The steps since then are lost (the run is at step ${step(this.about.step)}); the data goes on, and is not read again.`,
    }, [{ name: "target", label: "Snapshot", input, note }], ({ target }) => (target ? { target: Number(target) } : {}));
  }

  #scale() {
    const input = h("input", { type: "number", min: "0.001", max: "10", step: "any", value: "0.5", required: true, inputmode: "decimal" });
    this.#ask("scale_lr", {
      title: "Scale the learning rate?", button: "Scale it",
      text: "Every step's learning rate is multiplied by this, on top of the schedule, until another order changes it; 1 is the schedule alone.",
    }, [{ name: "value", label: "Factor", input, hint: "Above 0, at most 10." }], ({ value }) => ({ value: Number(value) }));
  }

  #orders() {
    const orders = this.about.orders ?? [];
    for (const order of orders) {
      const id = order.command.id, before = this.told.get(id);
      if (before !== undefined && before !== order.state) {
        const [, , word] = ORDER_STATES[order.state] ?? ["", "", order.state];
        say(`${ORDERS[order.command.kind] ?? order.command.kind}: ${word}${order.taken_step === null ? "" : ` at step ${step(order.taken_step)}`}`);
      }
      this.told.set(id, order.state);
    }
    const newest = [...orders].reverse().slice(0, ORDERS_SHOWN), left = orders.length - newest.length;
    if (!newest.length) { replace(this.spots.orders); return; }
    replace(this.spots.orders, h("ul", { class: "legend", "aria-label": "Orders given" }, newest.map((order) => h("li", {},
      badge(ORDER_STATES[order.state] ?? unknown(order.state)), " ", orderText(order),
      order.taken_step === null || order.taken_step === undefined ? null : ` at step ${step(order.taken_step)}`,
      order.detail ? `: ${order.detail}` : null,
      order.command.issued_by ? ` · by ${order.command.issued_by}` : null)),
    left ? h("li", { class: "mute" }, `${left} earlier: `, h("code", {}, `sentinel audit ${this.name}`)) : null));
  }

  // ---- from incidents to charts and maps, and back --------------------------------------------

  #head() {
    const { acted, advice } = this.list.open;
    const button = (which, tone, text) => h("button", { type: "button", class: `badge jump ${tone}`, "data-key": `jump-${which}`, onclick: () => this.list.to(which) }, text);
    // Among a dozen tabs: which one needs somebody.
    const needed = acted > 0 || ["lost", "halted"].includes(this.about.state);
    document.title = `${needed ? "! " : ""}${this.name} · Sentinel`;
    replace(this.spots.head, h("h1", {}, this.name), this.badges,
      acted ? button("acted", "bad", `! ${acted} open ${acted === 1 ? "incident" : "incidents"}`) : null,
      advice ? button("advice", "mute", `△ ${advice} ${advice === 1 ? "piece" : "pieces"} of advice`) : null);
  }

  #zoomTo(incident) {
    const by = Math.max(AROUND, Math.round((incident.last - incident.opened + 1) / 2));
    this.band = [incident.opened, incident.last];
    this.range.show(incident.opened - by, incident.last + by, `Incident ${incident.number}. `);
  }

  #showSteps(incident) {
    this.loss.goTo(incident.opened);
    this.#zoomTo(incident);
    this.loss.body.focus({ preventScroll: true });
    calmly(this.curves, "start");
  }

  #showLayer(incident, layer) {
    this.wanted = { layer, first: guide(incident).map };
    this.#zoomTo(incident);
  }

  #openMark(mark) {
    const incident = mark.incident ? this.incidents.find((i) => i.number === mark.incident.number && i.opened === mark.incident.opened) : this.list.at(mark.step);
    const text = incident ? "" : `No incident belongs to step ${step(mark.step)}.`;
    replace(this.spots.hint, h("p", { class: "mute" }, text || "Drag to zoom; click a mark to open its incident."));
    if (!incident) { say(text, true); return; }
    this.band = [incident.opened, incident.last];
    this.#charts();
    this.list.reveal(incident);
  }

  // The maps are there: to the layer that was asked for.
  #toLayer() {
    const { layer, first } = this.wanted;
    this.wanted = null;
    const there = [...this.maps].sort((a, b) => (b.signal === first) - (a.signal === first)).find(({ map, box }) => !box.hidden && map.has(layer));
    for (const { map } of this.maps) map.mark(layer);
    if (!there) {
      const text = `Nothing was measured of ${layer} in these steps.`;
      replace(this.spots.hint, h("p", { class: "mute" }, text));
      say(text, true);
      calmly(this.curves, "start");
      return;
    }
    there.box.focus({ preventScroll: true });
    calmly(there.box, "start");
    const at = there.map.whereMarked();
    if (at !== null && at > window.innerHeight - 40) window.scrollBy(0, at - window.innerHeight / 2);
    say(`${there.title}: ${there.map.summary}`, true);
  }

  #snapshots() {
    const { ledger, step: now, state } = this.about, { copies } = this;
    for (const one of copies) {
      const key = `copy-${one.step}`, before = this.told.get(key);
      if (before !== undefined && before !== one.disk && one.disk === "damaged") say(`The snapshot of step ${step(one.step)} is damaged on disk`);
      this.told.set(key, one.disk);
    }
    if (!copies.length) {
      replace(this.spots.snapshots, h("p", { class: "empty" }, !ledger ? (state === "running" ? "Nothing is known yet." : "Not recorded.") : state === "running" ? "No snapshot yet: nothing to roll back to." : "None was kept."));
      return;
    }
    // The same reason for all of them stands once, below.
    const why = copies.every((one) => one.disk === "unseen") ? copies[0].detail : "";
    const orders = state === "running" && !this.about.watched && access.orders;
    const states = (one) => (one.healthy === null ? unknown("healthy or not is not known") : one.healthy ? ["✓", "ok", "healthy"] : ["…", "warn", `candidate, ${one.quiet} quiet steps`]);
    replace(this.spots.snapshots, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Snapshots" },
      h("table", { class: "cards", role: "table", "aria-label": "Snapshots" },
        h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ["Step", "State", "Copy on disk", "Steps ago", "Action"].map((t) => h("th", { scope: "col", role: "columnheader" }, t)))),
        h("tbody", { role: "rowgroup" }, copies.map((one) => h("tr", { role: "row", "data-key": `snapshot-${one.step}` },
          h("th", { scope: "row", role: "rowheader", "data-label": "Step" }, step(one.step)),
          h("td", { role: "cell", "data-label": "State" }, h("span", {}, badge(states(one)), " ",
            ledger?.last_target === one.step ? badge(["◆", "mute", "used by the last rollback"]) : null)),
          h("td", { role: "cell", "data-label": "Copy on disk" }, h("span", { class: "copy" }, badge(copyBadge(one)), " ",
            one.disk === "sound" ? h("small", {}, readAt(one)) : one.disk === "damaged" ? h("small", {}, `${one.detail}; read ${readAt(one)}`) : why || !one.detail ? null : h("small", {}, one.detail))),
          h("td", { role: "cell", "data-label": "Steps ago" }, now === null ? DASH : step(now + 1 - one.step)),
          h("td", { role: "cell" }, one.healthy && orders ? h("button", { type: "button", class: "small", "data-key": `back-${one.step}`, "aria-label": `Roll back to step ${one.step}${one.disk === "damaged" ? ", whose copy on disk is damaged" : ""}…`, onclick: () => this.#rollback(one.step) }, "Roll back…") : null)))))),
      why ? h("p", { class: "mute" }, `Not verified: ${why}.`) : null);
  }

  // The newest values, and how they went since the page was opened: they are no series of their own.
  #memory() {
    const gauges = this.about.gauges ?? {}, at = this.about.step;
    const kinds = Object.keys(gauges).filter((key) => key.startsWith("memory_bytes/")).map((key) => key.slice("memory_bytes/".length));
    if (!kinds.length) {
      replace(this.spots.memory, h("p", { class: "empty" }, this.about.state === "running" ? "Not measured so far." : "Not recorded for a run that is over."));
      return;
    }
    const value = (kind) => number(gauges[`memory_bytes/${kind}`]);
    const past = this.memoryPast;
    if (at !== null && past.x[past.x.length - 1] !== at) {
      past.x.push(at);
      for (const kind of kinds) {
        past.y[kind] ??= Array(past.x.length - 1).fill(null);
        past.y[kind].push(value(kind));
      }
      for (const y of Object.values(past.y)) while (y.length < past.x.length) y.push(null);
    }
    if (past.x.length > MEMORY_KEPT) {
      past.x.shift();
      for (const y of Object.values(past.y)) y.shift();
    }
    const most = Math.max(...kinds.map((kind) => value(kind) ?? 0), 1);
    const rows = [...kinds].sort((a, b) => (value(b) ?? 0) - (value(a) ?? 0)).map((kind) => {
      const bar = h("div", { class: "bar", "aria-hidden": "true" });
      bar.style.inlineSize = `${Math.max(0, (100 * (value(kind) ?? 0)) / most)}%`;
      return h("tr", {}, h("th", { scope: "row" }, kind.replaceAll("_", " ")), h("td", {}, bytes(value(kind))), h("td", { class: "wide" }, bar));
    });
    replace(this.spots.memory,
      h("table", { "aria-label": "Memory by kind" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Kind"), h("th", { scope: "col" }, "Newest"), h("td", {}))), h("tbody", {}, rows)),
      past.x.length > 1 ? [h("p", { class: "mute" }, "Since this page was opened:"), this.memory.element] : null);
    this.memory.update({ x: past.x, lines: MEMORY.filter((kind) => past.y[kind]).map((kind) => ({ name: kind, y: past.y[kind] })) });
  }

  // ---- curves ---------------------------------------------------------------------------------

  // Other steps were asked for: at once, not with the next update.
  async #fetch() {
    if (!this.range.zoomed) {
      this.band = null;
      for (const { map } of this.maps) map.mark(null);
    }
    this.element.classList.add("busy");
    try {
      await this.#curves();
      await this.#layers();
    } catch {
      this.seriesAt = this.mapsAt = 0;
      this.refresh(); // which says what is wrong
    } finally {
      this.element.classList.remove("busy");
    }
  }

  // The newest question wins, whichever answer comes last.
  async #curves() {
    const turn = (this.turn += 1);
    this.seriesAt = Date.now();
    const series = await loadSeries(this.name, this.range.asked, this.incidents ?? [], this.#points());
    if (turn !== this.turn || this.left) return;
    this.series = series;
    this.range.came(series.from, series.to);
    this.#charts();
  }

  async #layers() {
    const { turn } = this;
    this.mapsAt = Date.now();
    const { from, to } = this.range.asked, asked = { from: from ?? 0, to: to ?? this.range.newest };
    const none = [];
    for (const { signal, map, box, title } of this.maps) {
      const data = await loadMap(this.name, signal, asked, MAP_COLUMNS);
      if (turn !== this.turn || this.left) { this.mapsAt = 0; return; }
      box.hidden = !data;
      if (data) map.update(data);
      else none.push(title[0].toLowerCase() + title.slice(1));
    }
    const why = this.range.zoomed ? "Not measured in these steps" : this.about?.state === "running" ? "Not measured so far" : "Not recorded";
    replace(this.spots.unmeasured, none.length ? h("p", { class: "empty" }, `${why}: ${none.join(", ")}.`) : null);
    this.element.dataset.ready = this.name;
    if (this.wanted) this.#toLayer();
  }

  #points() { return Math.max(200, Math.min(1500, Math.round(this.element.clientWidth * 1.5) || 600)); }

  #charts() {
    const { loss, norm, marks, from, to } = this.series;
    const ends = this.range.stretch ?? (from === null ? null : [from, to]);
    const empty = this.range.zoomed ? "no such step was recorded" : undefined;
    this.loss.update({ x: loss.x, lines: [{ name: "loss", y: loss.y }], marks, ends, band: this.band, empty });
    this.norm.update({ x: norm.x, lines: [{ name: "gradient norm", y: norm.y }], marks: marks.filter((m) => m.kind !== "spike"), ends, band: this.band, empty });
    this.#recentTable();
  }

  #recentTable() {
    if (!this.recent.open || !this.about) return;
    const words = ["", "skipped", "rolled back", "halted"];
    const rows = (this.about.recent ?? []).slice(-RECENT_ROWS).reverse().map((row) => {
      const action = words[row.action] ?? { skip_step: "skipped", rollback: "rolled back", halt: "halted", proceed: "" }[row.action] ?? "";
      return h("tr", {}, h("th", { scope: "row", class: "num" }, step(row.step)), h("td", {}, shown(row.loss)), h("td", {}, shown(row.grad_norm)),
        h("td", {}, action ? `${action}: ${because(row.rule)}` : ""));
    });
    this.recentRows.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ["Step", "Loss", "Gradient norm", "What happened"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, rows)));
  }
}

// The engine's list is the newest, the record's has what people did; what fell off the first is
// in the second. Newest first.
function merged(live, recorded) {
  const found = new Map(recorded.map((i) => [`${i.number}:${i.opened}`, i]));
  for (const i of live) found.set(`${i.number}:${i.opened}`, { ...found.get(`${i.number}:${i.opened}`), ...i });
  return [...found.values()].sort((a, b) => b.opened - a.opened || b.number - a.number);
}

// What it can go back to, the newest first; an older sidecar says nothing of the copies on disk.
function copiesOf(about) {
  const known = about.snapshots ?? (about.ledger?.snapshots ?? []).map((one) => ({ ...one, disk: "unseen", detail: "", warning: "" }));
  return [...known].sort((a, b) => b.step - a.step);
}

const copyBadge = (one) => COPIES[one.disk] ?? UNVERIFIED;
const readAt = (one) => ago(one.checked_s_ago);

// How many incidents of a run are not among those that are known, and why.
function lacking({ ledger, watched }, incidents, broken) {
  const total = (ledger?.next_incident ?? 1) - 1, numbers = new Set(incidents.map((i) => i.number).filter((n) => n <= total));
  return {
    lacking: total - numbers.size,
    why: watched ? "of a run that is only watched, its ledger keeps the open ones and the newest that are over, 32 in all" : broken ? "the sidecar's database does not answer" : "the sidecar's record does not hold them",
  };
}

function offBecause(run) {
  const ledger = run.ledger ?? {};
  if (run.protection_why) return `${run.protection_why}.`;
  if (run.mode === "observe") return "the policy only observes; it records what it would have done.";
  if (ledger.automation === false) return "a person paused automation.";
  if (ledger.stopped) return "the rollback budget is spent.";
  return run.step === null ? "no step has been decided yet." : "the engine does not act.";
}

function orderText({ command }) {
  const text = ORDERS[command.kind] ?? command.kind;
  if (command.kind === "scale_lr") return `${text} × ${shown(command.value)}`;
  if (command.kind === "rollback") return command.target === null || command.target === undefined ? text : `${text} to step ${step(command.target)}`;
  if (command.kind === "ack") return `acknowledge incident ${command.target}`;
  return text;
}
