// Line charts (SVG) and heat maps (canvas): drawn here, so that no style and no script has to be
// let through the Content-Security-Policy, and so that a keyboard can walk along a curve.
//
// Numbers: null is absent and leaves a gap; NaN and inf are marked on the upper edge, never drawn
// as if they were a value.

import { h, s } from "./dom.js";
import { shown, step as stepText } from "./words.js";

// ---- scales ---------------------------------------------------------------------------

const PAD = { left: 56, right: 12, bottom: 22 };
const PENS = 5; // styles of lines in style.css
const ABOVE = { advised: 54, marked: 38, plain: 12 };
const LANES = { spike: 30, nonfinite: 30, advice: 46 }; // the others stand above, so that all can be read
const MOST = 1e300; // larger numbers are drawn as this: their differences would be no numbers
const DRAG_PX = 6, NEAR_PX = 11; // less is a click; so near is meant

function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((m) => m * power >= raw * 0.8) * power;
  const ticks = [];
  for (let v = Math.ceil(low / unit) * unit; v <= high + unit * 1e-9; v += unit) {
    ticks.push(Math.abs(v) < unit * 1e-9 ? 0 : v);
  }
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) ticks.push(10 ** p);
  const inside = ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  if (inside.length >= 2) {
    const every = Math.ceil(inside.length / 5);
    return inside.filter((_, i) => i % every === 0);
  }
  return niceTicks(low, high, 3).filter((t) => t > 0);
}

const bounded = (v) => Math.max(-MOST, Math.min(MOST, v));

function yScale(lines, marks, wantsLog, top, bottom, least) {
  let low = Infinity, high = -Infinity, positive = true;
  for (const line of lines) for (const exact of line.y) {
    if (exact === null || !Number.isFinite(exact)) continue;
    const v = bounded(exact);
    if (v < low) low = v;
    if (v > high) high = v;
    if (v <= 0) positive = false;
  }
  if (low === Infinity) return null;
  if (least !== undefined && !wantsLog) low = Math.min(low, least);
  const log = wantsLog && positive;
  if (log) {
    if (high / low < 1.2) { low /= 1.3; high *= 1.3; } else { low /= 1.08; high *= 1.08; }
  } else if (high - low < Math.abs(high) * 1e-6 || high === low) {
    const by = Math.abs(high) * 0.1 || 1;
    low -= by; high += by;
  } else {
    const by = (high - low) * 0.06;
    low = least !== undefined && low === least ? low : low - by; high += by;
  }
  const f = log ? Math.log : (v) => v;
  const a = f(low), b = f(high);
  return {
    log, low, high,
    at: (v) => bottom - ((f(bounded(v)) - a) / (b - a)) * (bottom - top),
    ticks: log ? logTicks(low, high) : niceTicks(low, high, 4),
  };
}

// ---- line charts ----------------------------------------------------------------------

export const MARKS = {
  skip_step: ["▼", "skipped"],
  rollback: ["◆", "rolled back"],
  halt: ["■", "halted"],
  spike: ["●", "loss spike step"],
  nonfinite: ["✕", "NaN or inf"],
  would: ["◇", "would have acted (observing)"],
  advice: ["△", "advice"],
};

export class LineChart {
  // title: what it shows; format: value -> text; log: ask for a logarithmic scale
  // range: a Range that drags and keys zoom; open(mark): somebody wants to know about a mark
  constructor({ title, format = shown, log = false, least, height = 220, empty = "nothing was measured yet", range = null, open = null }) {
    this.title = title;
    this.format = format;
    this.log = log;
    this.least = least;
    this.height = height;
    this.empty = empty;
    this.range = range;
    this.open = open;
    this.data = { x: [], lines: [], marks: [] };
    this.at = null;
    this.drag = null;
    this.hits = [];
    this.plot = h("div", { class: "plot" });
    this.readout = h("p", { class: "readout", "aria-hidden": "true" });
    this.legend = h("ul", { class: "legend" });
    this.body = h("div", {
      class: "chart", role: "slider", tabindex: "0", "aria-label": `${title}, step by step: arrow keys move`,
      "aria-orientation": "horizontal", "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0,
      "aria-valuetext": empty,
      "aria-describedby": range ? `keys-${title.split(" ")[0].toLowerCase()}` : null,
      onkeydown: (e) => this.#key(e),
      onpointermove: (e) => this.#move(e),
      onpointerdown: (e) => this.#down(e),
      onpointerup: (e) => this.#up(e),
      onpointercancel: () => this.#drop(),
      onpointerleave: () => { if (document.activeElement !== this.body) this.#cursor(null); },
      onblur: () => this.#cursor(null),
      onfocus: () => { if (this.at === null) this.#cursor(this.data.x.length - 1); },
    }, this.plot);
    this.element = h("div", { class: "figure" }, this.body, this.readout, this.legend,
      range ? h("p", { class: "hidden", id: `keys-${title.split(" ")[0].toLowerCase()}` },
        "Plus and minus zoom at the step where you are, 0 resets the zoom. Enter opens the incident of a mark.") : null);
    this.watch = new ResizeObserver(() => this.#draw());
    this.watch.observe(this.plot);
  }

  // x: steps, ascending; lines: [{name, y}]; marks: [{step, kind, text}]
  // ends: [first, last] of the axis; band: steps to be shaded; empty: what to say without any
  update({ x, lines, marks = [], ends = null, band = null, empty }) {
    const step = this.next ?? (this.at === null ? null : this.data.x[this.at]); // the cursor stays at its step
    this.next = null;
    this.data = { x, lines, marks, ends, band };
    this.none = empty ?? this.empty;
    this.at = step === null || step === undefined || !x.length ? null : nearest(x, step);
    this.#draw();
  }

  // Put the cursor there as soon as the step is drawn.
  goTo(step) { this.next = step; }

  #draw() {
    const width = Math.max(this.plot.clientWidth, 200), height = this.height;
    const { x, lines, marks, ends, band } = this.data;
    const { left, right, bottom } = PAD;
    const top = this.top = marks.some((m) => m.kind === "advice") ? ABOVE.advised : marks.length ? ABOVE.marked : ABOVE.plain;
    const base = height - bottom;
    const scale = x.length ? yScale(lines, marks, this.log, top, base, this.least) : null;
    const first = ends?.[0] ?? x[0] ?? 0, last = ends?.[1] ?? x[x.length - 1] ?? 1;
    const span = last - first || 1;
    const px = (v) => (last === first ? (left + width - right) / 2 : left + ((v - first) / span) * (width - left - right));
    this.px = px;
    this.stepAt = (at) => first + (Math.max(0, Math.min(1, (at - left) / (width - left - right)))) * (last - first);
    this.hits = [];
    this.scale = scale;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", focusable: "false" });
    if (!x.length) {
      this.plot.replaceChildren(h("p", { class: "empty" }, this.none ?? this.empty));
      this.readout.textContent = "";
      this.legend.replaceChildren();
      this.pointer = null;
      this.body.setAttribute("aria-valuetext", this.none ?? this.empty);
      return;
    }
    if (band && band[1] >= first && band[0] <= last) {
      const from = Math.max(left, px(band[0]) - 2), to = Math.min(width - right, px(band[1]) + 2);
      svg.append(s("rect", { class: "band", x: from, width: Math.max(to - from, 4), y: top, height: base - top }));
    }
    svg.append(s("line", { class: "axis", x1: left, x2: width - right, y1: base, y2: base }));
    for (const tick of scale?.ticks ?? []) {
      const y = scale.at(tick);
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }),
        s("text", { class: "tick", x: left - 6, y: y + 4, "text-anchor": "end" }, this.format(tick)));
    }
    const whole = niceTicks(first, last, Math.max(2, Math.floor(width / 140))).filter((t) => Number.isInteger(t));
    for (const tick of last === first ? [first] : whole) {
      svg.append(s("text", { class: "tick", x: px(tick), y: height - 6, "text-anchor": "middle" }, stepText(tick)));
    }
    if (!scale) {
      svg.append(s("text", { class: "tick", x: (left + width - right) / 2, y: height / 2, "text-anchor": "middle" },
        lines.some((l) => l.y.some((v) => v !== null)) ? "no finite value in this range" : this.empty));
    }
    const shownKinds = new Map();
    this.#marks(svg, marks, px, base, shownKinds, width);
    lines.forEach((line, n) => {
      if (!scale) return;
      const pen = { d: "", dots: [], open: false, run: 0 };
      for (let i = 0; i < x.length; i += 1) {
        const v = line.y[i];
        if (v === null || v === undefined || !Number.isFinite(v)) {
          if (pen.run === 1) pen.dots.push(i - 1);
          pen.open = false; pen.run = 0;
          continue;
        }
        pen.d += `${pen.open ? "L" : "M"}${px(x[i]).toFixed(1)} ${scale.at(v).toFixed(1)}`;
        pen.open = true; pen.run += 1;
      }
      if (pen.run === 1) pen.dots.push(x.length - 1);
      svg.append(s("path", { class: `line s${n % PENS}`, d: pen.d || "M0 0" }));
      for (const i of pen.dots) {
        svg.append(s("circle", { class: `dot s${n % PENS}`, cx: px(x[i]), cy: scale.at(line.y[i]), r: 3 }));
      }
    });
    this.pointer = s("g", { class: "cursor" });
    this.chosen = s("rect", { class: "chosen", y: top, height: base - top, width: 0 });
    svg.append(this.chosen, this.pointer);
    if (this.drag?.moved) this.#choose();
    this.plot.replaceChildren(svg);
    this.legend.replaceChildren(
      ...(lines.length > 1 ? lines.map((l, n) => h("li", {}, swatch(n), l.name)) : []),
      ...[...shownKinds].map(([kind, count]) =>
        h("li", { class: `k-${kind}` }, h("span", { class: "sign", "aria-hidden": "true" }, MARKS[kind][0]), `${MARKS[kind][1]}: ${count}`)),
    );
    this.body.setAttribute("aria-valuemin", first);
    this.body.setAttribute("aria-valuemax", last);
    this.#cursor(this.at, true);
  }

  #marks(svg, marks, px, base, shownKinds, width) {
    const taken = new Set();
    // A wall of lines would hide the curve: of many marks only the grave ones keep theirs.
    const many = marks.filter((m) => m.kind !== "spike" && m.kind !== "advice").length > width / 12;
    for (const mark of marks) {
      shownKinds.set(mark.kind, (shownKinds.get(mark.kind) ?? 0) + 1);
      const x = px(mark.step);
      if (x < PAD.left - 1 || x > width - PAD.right + 1) continue;
      const spot = `${mark.kind}:${Math.round(x / 3)}`;
      if (taken.has(spot)) continue;
      taken.add(spot);
      const y = LANES[mark.kind] ?? 14;
      if (many ? ["rollback", "halt"].includes(mark.kind) : mark.kind !== "spike" && mark.kind !== "advice") {
        svg.append(s("line", { class: `stem k-${mark.kind}`, x1: x, x2: x, y1: y + 3, y2: base }));
      }
      svg.append(s("text", { class: `sign k-${mark.kind}`, x, y, "text-anchor": "middle" }, MARKS[mark.kind][0]));
      this.hits.push({ x, y: y - 4, mark });
    }
  }

  #key(event) {
    const n = this.data.x.length;
    if (event.key === "Escape" && this.drag) { this.#drop(); return; }
    if (!n || event.ctrlKey || event.metaKey || event.altKey) return;
    const now = this.at ?? n - 1;
    const jump = Math.max(1, Math.round(n / 20));
    const to = {
      ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1,
      PageDown: now - jump, PageUp: now + jump, Home: 0, End: n - 1,
    }[event.key];
    if (to !== undefined) this.#cursor(Math.max(0, Math.min(n - 1, to)));
    else if (this.range && "+=".includes(event.key)) this.range.zoom(0.5, this.data.x[now]);
    else if (this.range && event.key === "-") this.range.zoom(2, this.data.x[now]);
    else if (this.range && event.key === "0") this.range.reset();
    else if (this.open && event.key === "Enter") this.open(this.#marksAt(now)[0] ?? { step: this.data.x[now] });
    else return;
    event.preventDefault();
  }

  // ---- pointer: a click on a mark opens it, a drag zooms ------------------------------------

  #at(event) {
    const box = this.plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #down(event) {
    if (event.button !== 0) return;
    this.#point(event);
    if (this.data.x.length && this.px) this.drag = { from: this.#at(event)[0], to: null, moved: false };
  }

  #move(event) {
    const { drag } = this;
    if (!drag || !this.range) {
      this.body.classList.toggle("pointed", Boolean(this.open && this.#hit(event)));
      this.#point(event);
      return;
    }
    [drag.to] = this.#at(event);
    if (!drag.moved && Math.abs(drag.to - drag.from) < DRAG_PX) return;
    if (!drag.moved) this.body.setPointerCapture(event.pointerId);
    drag.moved = true;
    this.#choose();
  }

  #up(event) {
    const { drag } = this;
    this.#drop();
    if (!drag) return;
    if (!drag.moved) {
      const hit = this.open && this.#hit(event);
      if (hit) this.open(hit.mark);
      return;
    }
    const [a, b] = [this.stepAt(drag.from), this.stepAt(drag.to)].sort((x, y) => x - y);
    this.range.show(Math.ceil(a), Math.floor(b));
  }

  #drop() {
    this.drag = null;
    this.chosen?.setAttribute("width", 0);
  }

  #choose() {
    const edge = (at) => Math.max(PAD.left, Math.min(this.plot.clientWidth - PAD.right, at));
    const [a, b] = [edge(this.drag.from), edge(this.drag.to)].sort((x, y) => x - y);
    this.chosen.setAttribute("x", a);
    this.chosen.setAttribute("width", b - a);
    this.readout.textContent = `steps ${stepText(Math.ceil(this.stepAt(a)))} to ${stepText(Math.floor(this.stepAt(b)))}: let go to zoom, Escape to leave it`;
  }

  #hit(event) {
    const [x, y] = this.#at(event);
    const far = (hit) => Math.hypot(hit.x - x, hit.y - y);
    const hit = this.hits.reduce((best, one) => (!best || far(one) < far(best) ? one : best), null);
    return hit && far(hit) <= NEAR_PX ? hit : null;
  }

  #point(event) {
    const { x } = this.data;
    if (!x.length || !this.px) return;
    this.#cursor(nearest(x, this.stepAt(this.#at(event)[0])));
  }

  // Of thinned curves a mark belongs to the point that stands for it.
  #marksAt(i) {
    const { x, marks } = this.data;
    return marks.filter((m) => m.step === x[i] || nearest(x, m.step) === i);
  }

  #text(i) {
    const { x, lines } = this.data;
    const values = lines.map((l) => `${lines.length > 1 ? `${l.name} ` : ""}${l.y[i] === null || l.y[i] === undefined ? "not measured" : this.format(l.y[i])}`);
    const what = this.#marksAt(i).map((m) => `${m.text ?? MARKS[m.kind][1]}${m.step === x[i] ? "" : ` (step ${stepText(m.step)})`}`);
    if (what.length > 4) what.splice(3, what.length, `and ${what.length - 3} more marks`);
    return `step ${stepText(x[i])}: ${[...values, ...what].join(", ")}`;
  }

  #cursor(at, quiet = false) {
    const { x, lines } = this.data;
    this.at = at;
    const newest = x.length - 1;
    if (newest < 0) return;
    const i = at ?? newest;
    const text = this.#text(i);
    this.readout.textContent = at === null ? `${this.range?.zoomed ? "last shown" : "newest"}, ${text}` : text;
    if (!quiet || at === null || this.body.getAttribute("aria-valuenow") !== String(x[i])) {
      this.body.setAttribute("aria-valuenow", x[i]);
      this.body.setAttribute("aria-valuetext", text);
    }
    if (!this.pointer) return;
    this.pointer.replaceChildren();
    if (at === null) return;
    const px = this.px(x[i]);
    this.pointer.append(s("line", { x1: px, x2: px, y1: this.top - 6, y2: this.height - PAD.bottom }));
    lines.forEach((line, n) => {
      const v = line.y[i];
      if (this.scale && v !== null && v !== undefined && Number.isFinite(v)) {
        this.pointer.append(s("circle", { class: `dot s${n % PENS}`, cx: px, cy: this.scale.at(v), r: 4 }));
      }
    });
  }
}

// The index of the step that is nearest, in ascending steps.
function nearest(x, step) {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(x[low - 1] - step) < Math.abs(x[low] - step) ? low - 1 : low;
}

function swatch(n) {
  return s("svg", { width: 26, height: 8, class: "swatch", "aria-hidden": "true" },
    s("line", { class: `line s${n % PENS}`, x1: 0, x2: 26, y1: 4, y2: 4 }));
}

// ---- heat maps ------------------------------------------------------------------------

// Dark to light in equal steps of lightness, so that it reads without colour too.
const STOPS = [[32, 16, 84], [60, 70, 150], [33, 130, 140], [95, 185, 95], [250, 230, 60]];

function colour(t) {
  const at = Math.max(0, Math.min(1, t)) * (STOPS.length - 1);
  const i = Math.min(Math.floor(at), STOPS.length - 2), f = at - i;
  return STOPS[i].map((c, k) => Math.round(c + (STOPS[i + 1][k] - c) * f));
}

export class HeatMap {
  // limit: values above it get a mark of their own
  constructor({ title, log = false, limit = null, format = shown }) {
    this.title = title;
    this.log = log;
    this.limit = limit;
    this.format = format;
    this.data = null;
    this.marked = null; // a layer that somebody asked for
    this.canvas = h("canvas", {
      role: "img", "aria-label": title,
      onpointermove: (e) => this.#point(e), onpointerdown: (e) => this.#point(e),
      onpointerleave: () => { this.readout.textContent = this.summary ?? ""; },
    });
    this.readout = h("p", { class: "readout" });
    this.scaleText = h("p", { class: "scale" });
    this.table = h("details", {
      class: "table",
      ontoggle: () => this.#table(),
    }, h("summary", {}, `${title} as a table`), this.rows = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, table` }));
    this.place = h("div", { class: "map" }, this.canvas);
    this.element = h("div", { class: "figure" }, this.place, this.scaleText, this.readout, this.table);
    this.watch = new ResizeObserver(() => this.#draw());
    this.watch.observe(this.place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  // layers: names; steps: one per column; rows[layer][column]: number, NaN or null
  update(data) {
    this.data = data;
    this.#draw();
    this.#table();
  }

  has(layer) { return Boolean(this.data?.layers.includes(layer)); }

  // Outline a layer's row, and say its numbers; null: none.
  mark(layer) {
    this.marked = layer;
    this.element.classList.toggle("marked", layer !== null);
    this.#draw();
  }

  // Where the outlined row stands in the window [px from its top], or null.
  whereMarked() {
    const row = this.seen?.layers.indexOf(this.marked) ?? -1;
    return row < 0 ? null : this.canvas.getBoundingClientRect().top + (row + 0.5) * this.geometry.cell;
  }

  #draw() {
    if (!this.data) return;
    const style = getComputedStyle(this.element);
    const width = Math.max(this.place.clientWidth, 200), ratio = window.devicePixelRatio || 1;
    const { layers, steps, last, rows } = this.seen = binned(this.data, Math.floor(width * 0.66 / 3));
    const cell = Math.max(4, Math.min(18, Math.floor(360 / Math.max(layers.length, 1))));
    const left = Math.min(150, Math.floor(width * 0.34)), bottom = 18;
    const height = cell * layers.length + bottom;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.setAttribute("width", width * ratio);
    this.canvas.setAttribute("height", height * ratio);
    this.canvas.style.aspectRatio = `${width} / ${height}`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    let low = Infinity, high = -Infinity, odd = 0, over = 0, worst = null;
    rows.forEach((row, l) => row.forEach((v, c) => {
      if (v === null) return;
      if (!Number.isFinite(v)) { odd += 1; return; }
      if (this.limit !== null && v > this.limit) over += 1;
      if (!worst || v > worst.v) worst = { v, l, c };
      if (this.log && v <= 0) return;
      low = Math.min(low, v); high = Math.max(high, v);
    }));
    const f = this.log ? Math.log : (v) => v;
    const span = f(high) - f(low) || 1;
    const w = (width - left) / Math.max(steps.length, 1);
    const ink = style.getPropertyValue("--ink"), bad = style.getPropertyValue("--bad"), soft = style.getPropertyValue("--line");
    rows.forEach((row, l) => row.forEach((v, c) => {
      const x = left + c * w, y = l * cell;
      if (v === null || v === undefined) {
        pen.fillStyle = soft;
        pen.fillRect(x + w / 2 - 0.5, y + cell / 2 - 0.5, 1, 1);
      } else if (!Number.isFinite(v)) {
        pen.fillStyle = bad;
        pen.fillRect(x, y, w + 0.5, cell);
        if (w >= 4 && cell >= 6) {
          pen.strokeStyle = style.getPropertyValue("--paper");
          pen.beginPath();
          pen.moveTo(x + 1, y + 1); pen.lineTo(x + w - 1, y + cell - 1);
          pen.moveTo(x + w - 1, y + 1); pen.lineTo(x + 1, y + cell - 1);
          pen.stroke();
        }
      } else {
        const [r, g, b] = colour(this.log && v <= 0 ? 0 : (f(v) - f(low)) / span);
        pen.fillStyle = `rgb(${r},${g},${b})`;
        pen.fillRect(x, y, w + 0.5, cell);
        if (this.limit !== null && v > this.limit) {
          pen.strokeStyle = "#000";
          pen.lineWidth = 1.5;
          pen.strokeRect(x + 0.75, y + 0.75, Math.max(w - 1.5, 1), cell - 1.5);
        }
      }
    }));
    pen.fillStyle = ink;
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const every = Math.ceil(12 / cell);
    const marked = layers.indexOf(this.marked);
    layers.forEach((name, l) => {
      if (l % every === 0 && l !== marked && (marked < 0 || Math.abs(l - marked) * cell >= 12)) pen.fillText(shorten(pen, name, left - 8), left - 6, l * cell + cell / 2 + (every > 1 ? 2 : 0));
    });
    if (marked >= 0) {
      const y = marked * cell;
      pen.font = `bold 11px ${style.fontFamily}`;
      pen.fillText(shorten(pen, layers[marked], left - 8), left - 6, Math.min(Math.max(y + cell / 2, 7), height - bottom - 7));
      pen.font = `11px ${style.fontFamily}`;
      pen.lineWidth = 2;
      for (const [ring, by] of [["#fff", 1], ["#000", 3]]) {
        pen.strokeStyle = ring;
        pen.strokeRect(left, y - by, width - left - 1, cell + 2 * by);
      }
    }
    pen.textBaseline = "alphabetic";
    const low0 = steps[0], high0 = last[last.length - 1];
    const ticks = high0 > low0 ? niceTicks(low0, high0, Math.max(1, Math.floor((width - left) / 90))).filter(Number.isInteger) : [low0];
    pen.textAlign = "center";
    for (const tick of ticks) {
      const x = left + (high0 > low0 ? (tick - low0 + 0.5) / (high0 + 1 - low0) : 0.5) * (width - left);
      const half = pen.measureText(stepText(tick)).width / 2;
      pen.fillText(stepText(tick), Math.min(Math.max(x, left + half), width - half), height - 4);
    }
    this.geometry = { left, cell, w };
    const parts = [];
    if (marked >= 0) {
      const finite = rows[marked].filter((v) => Number.isFinite(v));
      parts.push(`outlined: ${layers[marked]}, ${finite.length ? `${this.format(Math.min(...finite))} to ${this.format(Math.max(...finite))}` : "no finite value"}`);
    }
    if (worst) parts.push(`largest: ${this.format(worst.v)} in ${layers[worst.l]}, ${spanText(steps[worst.c], last[worst.c])}`);
    if (this.limit !== null) parts.push(over ? `${count(over, "cell")} above ${this.limit} (outlined)` : `none above ${this.limit}`);
    if (odd) parts.push(`${count(odd, "cell")} NaN or inf (crossed)`);
    this.summary = parts.join("; ");
    this.readout.textContent = this.summary;
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.summary}. The table below holds the numbers.`);
    this.scaleText.replaceChildren(
      ...(low === Infinity ? [] : [h("span", {}, this.format(low)), h("span", { class: "ramp", "aria-hidden": "true" }), h("span", {}, this.format(high)),
        h("span", { class: "mute" }, this.log ? "logarithmic; dots: not measured" : "dots: not measured")]));
  }

  #point(event) {
    if (!this.data || !this.geometry) return;
    const box = this.canvas.getBoundingClientRect();
    const { left, cell, w } = this.geometry;
    const c = Math.floor((event.clientX - box.left - left) / w), l = Math.floor((event.clientY - box.top) / cell);
    const v = this.seen.rows[l]?.[c];
    if (v === undefined) return;
    this.readout.textContent = `${this.seen.layers[l]}, ${spanText(this.seen.steps[c], this.seen.last[c])}: ${v === null ? "not measured" : this.format(v)}`;
  }

  #table() {
    if (!this.table.open || !this.data) return;
    const { layers, steps, rows } = this.data;
    const lines = layers.map((name, l) => {
      let most = null, at = null, newest = null, odd = 0;
      rows[l].forEach((v, c) => {
        if (v === null || v === undefined) return;
        newest = v;
        if (!Number.isFinite(v)) { odd += 1; return; }
        if (most === null || v > most) { most = v; at = steps[c]; }
      });
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, this.format(newest)), h("td", {}, this.format(most)), h("td", {}, stepText(at)), h("td", {}, odd));
    });
    this.rows.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ["Layer", "Newest", "Largest", "At step", "NaN or inf"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, lines)));
  }
}

const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const spanText = (from, to) => (from === to ? `step ${stepText(from)}` : `steps ${stepText(from)} to ${stepText(to)}`);

// No more columns than can be seen: the largest value of each, and one that is no number wins.
function binned({ layers, steps, last, rows }, most) {
  const every = Math.ceil(steps.length / Math.max(most, 20));
  if (every < 2) return { layers, steps, last, rows };
  const starts = steps.filter((_, i) => i % every === 0);
  const ends = starts.map((_, k) => last[Math.min((k + 1) * every, last.length) - 1]);
  const merged = rows.map((row) => starts.map((_, k) => {
    let most = null;
    for (let i = k * every; i < Math.min((k + 1) * every, row.length); i += 1) {
      const v = row[i];
      if (v === null) continue;
      if (!Number.isFinite(v)) return v;
      if (most === null || v > most) most = v;
    }
    return most;
  }));
  return { layers, steps: starts, last: ends, rows: merged };
}

function shorten(pen, name, room) {
  if (pen.measureText(name).width <= room) return name;
  let text = name;
  while (text.length > 1 && pen.measureText(`…${text}`).width > room) text = text.slice(1);
  return `…${text}`;
}
