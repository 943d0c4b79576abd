// What happened to a run, and what is only advice: two lists, so that advice is never taken for an
// alarm. Each incident leads to its steps in the charts and to its layers in the maps.

import { access, ask } from "./api.js";
import { calmly, h, replace, say } from "./dom.js";
import { badge, confirmDialog, nameField, unknown } from "./parts.js";
import { guide } from "./todo.js";
import { INCIDENT_STATES, SEVERITIES, deeds, step, title } from "./words.js";

const AT_FIRST = 6, DEEDS = 8;
const GRAVITY = { critical: 0, warning: 1, info: 2 };

const over = (i) => i.state === "resolved";
const idOf = (i) => `${i.number}-${i.opened}`;
const nameOf = (i) => { const { name } = guide(i); return name ? `${title(i.key)}: ${name}` : title(i.key); };

// How it began, and the newest.
const briefly = (done) => (done.length <= DEEDS ? done : [done[0], `… ${done.length - DEEDS} lines left out`, ...done.slice(1 - DEEDS)]);

export class Incidents {
  // show: {steps(incident), layer(incident, name)}
  constructor(run, show, refresh) {
    this.run = run;
    this.show = show;
    this.refresh = refresh;
    this.unfolded = new Map(); // what somebody opened or closed
    this.most = { acted: AT_FIRST, advice: AT_FIRST };
    this.told = new Map();
    this.heard = false;
    this.all = [];
    this.acted = [];
    this.advice = [];
    const list = (name) => (this[`${name}List`] = h("div", {}));
    this.element = h("div", { class: "cols" },
      h("section", { tabindex: "-1", "aria-labelledby": "incidents-title" }, h("h2", { id: "incidents-title" }, "Incidents"), list("acted")),
      h("section", { tabindex: "-1", "aria-labelledby": "advice-title" }, h("h2", { id: "advice-title" }, "Advice"),
        list("advice")));
  }

  // Newest first. lacking: so many of its incidents are not among them; why: for what reason.
  update(about, incidents, targets, { lacking = 0, why = "" } = {}) {
    this.lacking = lacking ? `${lacking} earlier ${lacking === 1 ? "one is" : "ones are"} not shown, incidents and advice together: ${why}.` : "";
    this.about = about;
    this.targets = targets;
    this.all = incidents;
    this.acted = incidents.filter((i) => !guide(i).advice);
    this.advice = incidents.filter((i) => guide(i).advice)
      .sort((a, b) => over(a) - over(b) || (GRAVITY[a.severity] ?? 9) - (GRAVITY[b.severity] ?? 9) || b.opened - a.opened);
    this.#announce();
    this.#paint();
  }

  get open() { return { acted: this.acted.filter((i) => !over(i)).length, advice: this.advice.filter((i) => !over(i)).length }; }

  // The incident that a step belongs to, or null.
  at(at) {
    return this.acted.find((i) => (i.actions ?? []).some(([s]) => s === at))
      ?? this.acted.find((i) => i.opened <= at && at <= i.last) ?? null;
  }

  // Unfold one and bring it into view, with the focus.
  reveal(incident) {
    const which = guide(incident).advice ? "advice" : "acted";
    const id = idOf(incident), place = this[which].findIndex((i) => idOf(i) === id);
    if (place < 0) return;
    this.most[which] = Math.max(this.most[which], place + 1);
    this.unfolded.set(id, true);
    this.chosen = id;
    this.#paint();
    const item = this[`${which}List`].querySelector(`[data-key="incident-${id}"]`);
    item.querySelector("summary").focus({ preventScroll: true });
    calmly(item, "start");
  }

  to(which) {
    const [first] = this[which];
    if (first) this.reveal(first);
  }

  #announce() {
    for (const i of this.all) {
      const before = this.told.get(idOf(i));
      if (before !== i.state && this.heard) {
        say(guide(i).advice ? `Advice ${over(i) ? "over" : "given"}: ${title(i.key)}` : `Incident ${i.number} ${i.state}: ${nameOf(i)}`);
      }
      this.told.set(idOf(i), i.state);
    }
    this.heard = true;
  }

  #paint() {
    const { ledger, state } = this.about, unknown = state === "running" ? "Nothing is known yet." : "Nothing was recorded.";
    this.#list("acted", ledger ? "No incident so far." : unknown);
    this.#list("advice", ledger ? "No advice so far." : unknown);
  }

  #list(which, empty) {
    const all = this[which], list = this[`${which}List`];
    if (!all.length) { replace(list, h("p", { class: "empty" }, which === "acted" && this.lacking ? this.lacking : empty)); return; }
    const some = all.slice(0, this.most[which]), left = all.length - some.length;
    replace(list, which === "advice" ? h("p", { class: "mute", "data-key": "intro" }, "Signs worth a look in working hours. Nothing was done about them, and nothing will be.") : null,
      h("ul", { class: "list", "data-key": which }, some.map((i) => this.#item(i, which))),
      left ? h("button", { type: "button", class: "small more", "data-key": `more-${which}`, onclick: () => { this.most[which] += 20; this.#paint(); } },
        left > 20 ? `Show 20 of ${left} more` : `Show ${left} more`) : null,
      which === "acted" && this.lacking ? h("p", { class: "mute", "data-key": "lacking" }, this.lacking) : null);
  }

  // The newest is what somebody who was woken wants to read, though it is over by then.
  #isOpen(i) { return this.unfolded.get(idOf(i)) ?? (!guide(i).advice && (!over(i) || i === this.acted[0])); }

  #current(id) { return this.all.find((i) => idOf(i) === id); }

  // Handlers ask for the incident as it is then: the elements stay while the facts change.
  #item(incident, which) {
    const i = incident, id = idOf(i), help = guide(i), done = deeds(i.actions, this.targets);
    const names = this.about.layers ?? [], layers = (i.layers ?? []).map((l) => names[l] ?? `layer ${l}`);
    const unfolded = this.#isOpen(i);
    const fold = (open) => { this.unfolded.set(id, open); this.#paint(); };
    const clicked = (e) => { e.preventDefault(); const now = this.#current(id); if (now) fold(!this.#isOpen(now)); };
    const toggled = (e) => { const now = this.#current(id); if (now && e.target.open !== this.#isOpen(now)) fold(e.target.open); }; // found by a search in the page
    return h("li", { class: `${which}${over(i) ? "" : " open"}${this.chosen === id ? " chosen" : ""}`, "data-key": `incident-${id}` },
      h("details", { open: unfolded, ontoggle: toggled },
        h("summary", { "data-key": `summary-${id}`, onclick: clicked },
          h("h3", {}, `${i.number}. ${nameOf(i)}`), " ", this.#badges(i, which), h("span", { class: "brief" }, this.#brief(i, which, done, layers))),
        // A folded one is not built: a hundred incidents a second would be.
        unfolded ? this.#body(i, which, help, done, layers) : null));
  }

  #badges(i, which) {
    const silenced = i.silenced_until && i.silenced_until * 1000 > Date.now();
    return [
      which === "acted" ? [badge(SEVERITIES[i.severity] ?? unknown(i.severity)), " ", badge(INCIDENT_STATES[i.state] ?? unknown(i.state))]
        : over(i) ? badge(["✓", "mute", "over"]) : null,
      i.acknowledged_by ? [" ", badge(["✓", "mute", `acknowledged by ${i.acknowledged_by}`])] : null,
      silenced ? [" ", badge(["z", "mute", `silenced until ${new Date(i.silenced_until * 1000).toLocaleTimeString()}`])] : null,
    ];
  }

  // One line for a folded one.
  #brief(i, which, done, layers) {
    if (which === "acted") {
      const most = done.find((text) => /rolled back/.test(text)) ?? done.find((text) => /halted/.test(text)) ?? done[done.length - 1];
      return most ? `${most}${done.length > 1 ? `; ${done.length - 1} more` : ""}` : i.summary;
    }
    const where = layers.length ? ` in ${layers[0]}${layers.length > 1 ? ` and ${layers.length - 1} more` : ""}` : "";
    return `${over(i) ? `step ${step(i.opened)}` : `since step ${step(i.opened)}`}${where}`;
  }

  #body(i, which, help, done, layers) {
    const id = idOf(i), name = `${this.run}:${i.number}`;
    const link = (text) => text.split("`").map((part, n) => (n % 2 ? h("code", {}, part.replaceAll("RUN", this.run)) : part));
    return h("div", { class: "body" },
      // Advice ends with what to do, which stands below in full.
      h("p", {}, which === "advice" ? i.summary.split(":")[0] : i.summary),
      h("p", { class: "mute" }, `${i.steps} troubled ${i.steps === 1 ? "step" : "steps"}, ${i.opened === i.last ? `at step ${step(i.opened)}` : `from step ${step(i.opened)} to ${step(i.last)}`}${i.resolved === null || i.resolved === undefined ? "" : `; over at step ${step(i.resolved)}`}`),
      h("p", {}, h("button", { type: "button", class: "small", "data-key": `steps-${id}`, onclick: () => { const now = this.#current(id); if (now) { this.unfolded.set(id, true); this.show.steps(now); } } }, "Show these steps in the charts")),
      layers.length ? h("p", {}, i.key === "instability" ? "First out of its own band: " : layers.length === 1 ? "Layer: " : "Layers: ",
        layers.slice(0, 8).map((layer, n) => [n ? ", " : "", h("button", { type: "button", class: "link", "data-key": `layer-${id}-${layer}`, onclick: () => { const now = this.#current(id); if (now) { this.unfolded.set(id, true); this.show.layer(now, layer); } } }, layer)]),
        layers.length > 8 ? ` and ${layers.length - 8} more` : "") : null,
      done.length ? h("div", {}, "What was done:", h("ul", {}, briefly(done).map((text) => h("li", {}, text)))) : which === "acted" ? h("p", {}, "Nothing was done.") : null,
      h("div", { class: `note todo${which === "acted" && !over(i) ? " warn" : ""}` },
        h("p", {}, help.means),
        help.steps.length ? [h("h4", {}, "What to do"), h(help.steps.length > 1 ? "ol" : "ul", {}, help.steps.map((text) => h("li", {}, link(text))))] : null,
        h("p", { class: "mute" }, `More: ${help.more[0]}, “${help.more[1]}”.`)),
      !over(i) && access.orders && !this.about.watched ? h("div", { class: "row" },
        h("button", { type: "button", class: "small", "data-key": `ack-${name}`, onclick: () => this.#ack(name, this.#current(id) ?? i) }, "Acknowledge…"),
        h("button", { type: "button", class: "small", "data-key": `silence-${name}`, onclick: () => this.#silence(name, this.#current(id) ?? i) }, "Silence…")) : null);
  }

  #ack(name, incident) {
    confirmDialog({
      title: `Acknowledge incident ${incident.number}?`, button: "Acknowledge",
      text: this.about.state !== "running" ? `Everybody sees that you have taken it. It stays open: the run is ${this.about.state}.` : incident.latched ? "Everybody sees that you have taken it. It is latched: your acknowledgement also ends it." : "Everybody sees that you have taken it. It ends by itself when the run is quiet.",
      fields: [nameField()],
      act: async ({ by }) => {
        await ask(`/v1/incidents/${encodeURIComponent(name)}/ack`, { method: "POST", body: { by } });
        say(`Incident ${incident.number} acknowledged`, true);
        this.refresh();
      },
    });
  }

  #silence(name, incident) {
    const input = h("select", {}, [[1800, "30 minutes"], [7200, "2 hours"], [28800, "8 hours"], [86400, "a day"]].map(([s, text]) => h("option", { value: s }, text)));
    confirmDialog({
      title: `Silence incident ${incident.number}?`, button: "Silence",
      text: ["It is shown as silenced to everybody for that long. Sentinel goes on acting.", "Alerts are of a run and go on: silence them in Alertmanager or Grafana, by the label run."],
      fields: [{ name: "for_s", label: "For", input }, nameField()],
      act: async ({ for_s, by }) => {
        await ask(`/v1/incidents/${encodeURIComponent(name)}/silence`, { method: "POST", body: { for_s: Number(for_s), by } });
        say(`Incident ${incident.number} silenced`, true);
        this.refresh();
      },
    });
  }
}
