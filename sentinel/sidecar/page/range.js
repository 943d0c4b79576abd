// Which steps are shown: the newest so many, or a stretch that somebody chose (zoomed).

import { h, say } from "./dom.js";
import { step } from "./words.js";

const NEWEST = [[200, "200 steps"], [1000, "1,000"], [10000, "10,000"], [null, "all"]];
const LEAST = 10; // steps

export class Range {
  // change() is called when other steps are to be shown.
  constructor(change) {
    this.change = change;
    this.newestOnes = 1000;
    this.stretch = null; // [from, to] while zoomed, both included
    this.ends = [0, 0]; // of what is shown
    this.first = 0;
    this.newest = null;
    const button = (key, text, name, act) => h("button", { type: "button", class: "small", "data-key": key, "aria-label": name, title: name, onclick: (e) => { if (e.currentTarget.getAttribute("aria-disabled") !== "true") act(); } }, text);
    this.follow = NEWEST.map(([steps, text]) => h("button", { type: "button", class: "small", onclick: () => this.showNewest(steps) }, text));
    this.buttons = {
      earlier: button("earlier", "←", "Earlier steps", () => this.pan(-1)),
      out: button("zoom-out", "−", "Zoom out", () => this.zoom(2)),
      in: button("zoom-in", "+", "Zoom in", () => this.zoom(0.5)),
      later: button("later", "→", "Later steps", () => this.pan(1)),
      reset: button("zoom-reset", "Reset", "Reset zoom", () => this.reset()),
    };
    this.text = h("p", { class: "mute range" });
    this.element = h("div", { class: "row" },
      h("div", { class: "row", role: "group", "aria-label": "Newest steps shown" }, this.follow),
      h("div", { class: "row", role: "group", "aria-label": "Zoom" }, Object.values(this.buttons)));
    this.#paint();
  }

  get zoomed() { return this.stretch !== null; }

  // What to ask the server for.
  get asked() {
    if (this.stretch) return { from: this.stretch[0], to: this.stretch[1] };
    if (this.newestOnes === null || this.newest === null) return { from: null, to: null };
    return { from: Math.max(0, this.newest + 1 - this.newestOnes), to: null };
  }

  // Steps only go up; the record may be ahead of what is said of the run, or behind.
  heard(step) { if (step !== null && step > (this.newest ?? -1)) this.newest = step; }

  // What came: the steps that are shown.
  came(from, to) {
    this.heard(to);
    this.ends = this.stretch ?? [from ?? 0, to ?? 0];
    this.#paint();
  }

  showNewest(steps) {
    this.newestOnes = steps;
    this.reset();
  }

  reset() {
    this.stretch = null;
    this.#paint();
    this.change();
    say(this.#words(), true);
  }

  // At least LEAST steps, at most all.
  show(from, to, why = "") {
    const newest = this.newest ?? this.ends[1];
    let a = Math.round(from), b = Math.round(to);
    const lacks = LEAST - (b - a + 1);
    if (lacks > 0) { a -= Math.ceil(lacks / 2); b += Math.floor(lacks / 2); }
    if (b > newest) { a -= b - newest; b = newest; }
    if (a < 0) { b = Math.min(newest, b - a); a = 0; }
    this.stretch = [a, b];
    this.ends = this.stretch;
    this.#paint();
    this.change();
    say(`${why}${this.#words()}`, true);
  }

  // factor: of the number of steps; around: the step that stays where it is.
  zoom(factor, around) {
    const [a, b] = this.ends, centre = around ?? (a + b) / 2, share = b > a ? (centre - a) / (b - a) : 0.5;
    const most = (this.newest ?? b) + 1, steps = Math.max(LEAST, Math.min(most, Math.round((b - a + 1) * factor)));
    if (steps === b - a + 1) return;
    const from = centre - share * (steps - 1);
    this.show(from, from + steps - 1);
  }

  pan(way) {
    const [a, b] = this.ends, by = Math.max(1, Math.round((b - a + 1) / 2)), newest = this.newest ?? b;
    const move = way < 0 ? -Math.min(by, a) : Math.min(by, newest - b);
    if (move) this.show(a + move, b + move);
  }

  #words() {
    if (this.stretch) return `Steps ${step(this.stretch[0])} to ${step(this.stretch[1])}${this.newest === null ? "" : `, of ${step(this.newest)}`}`;
    return this.newestOnes === null ? "All steps" : `The newest ${step(this.newestOnes)} steps`;
  }

  #paint() {
    this.follow.forEach((button, n) => button.setAttribute("aria-pressed", String(!this.stretch && NEWEST[n][0] === this.newestOnes)));
    const [a, b] = this.ends, newest = this.newest ?? b;
    const able = { earlier: a > 0, out: a > 0 || b < newest, in: b - a + 1 > LEAST, later: b < newest, reset: this.zoomed };
    // Not `disabled`: the focus would be lost under the finger that pressed it.
    for (const [name, button] of Object.entries(this.buttons)) button.setAttribute("aria-disabled", String(!able[name]));
    this.text.textContent = this.stretch ? `${this.#words()}: zoomed, not following the run.` : "";
    this.text.hidden = !this.stretch;
  }
}
