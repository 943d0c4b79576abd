// A run's curves and layer maps, as the charts want them.

import { Refused, ask, runPath } from "./api.js";
import { guide } from "./todo.js";
import { number, title } from "./words.js";

export const HOT_SCORE = 8; // where the detector calls a loss a spike, see docs/policy.md
const MOST_SCORED = 20000; // beyond it the sidecar does not give scores

const query = (values) => {
  const given = Object.entries(values).filter(([, v]) => v !== null && v !== undefined);
  return given.length ? `?${new URLSearchParams(given)}` : "";
};

// {loss: {x, y}, norm: {x, y}, marks: [{step, kind, text}], from, to} of the steps `from` to `to`,
// null: from or to the end. `from` and `to` of the answer are the steps that are there.
export async function loadSeries(run, { from, to }, incidents, points) {
  const data = await ask(runPath(run, `/series${query({ name: "loss,grad_norm", from, to, points })}`));
  // Scores are not in the index of the series: only for so many steps.
  const scores = data.rows > 0 && data.rows <= MOST_SCORED
    ? await ask(runPath(run, `/series${query({ name: "spike_score", from: data.from, to: data.to, points })}`)).catch(refused)
    : null;
  const curve = (name) => {
    const { step = [], value = [] } = data.series[name] ?? {};
    return { x: step, y: value.map(number) };
  };
  const loss = curve("loss"), norm = curve("grad_norm");
  const marks = [];
  const odd = new Map();
  for (const [what, { x, y }] of [["loss", loss], ["gradient norm", norm]]) {
    y.forEach((v, i) => {
      if (v !== null && !Number.isFinite(v)) odd.set(x[i], [...(odd.get(x[i]) ?? []), `${what} ${Number.isNaN(v) ? "NaN" : "infinite"}`]);
    });
  }
  for (const [step, what] of odd) marks.push({ step, kind: "nonfinite", text: what.join(", ") });
  const TEXTS = { skip_step: "skipped", rollback: "rolled back", halt: "halted" };
  for (const { step, action } of data.actions ?? []) {
    if (TEXTS[action]) marks.push({ step, kind: action, text: TEXTS[action] });
  }
  const inside = (step) => data.from !== null && step >= data.from && step <= data.to;
  for (const incident of incidents) {
    if (guide(incident).advice && inside(incident.opened)) marks.push({ step: incident.opened, kind: "advice", text: `advice: ${title(incident.key)}`, incident });
    for (const [step, action] of incident.actions ?? []) {
      if (action.startsWith("would_") && inside(step)) marks.push({ step, kind: "would", text: "would have acted", incident });
    }
  }
  const score = scores?.series?.spike_score;
  score?.value.forEach((v, i) => {
    const z = number(v);
    if (z !== null && z > HOT_SCORE) marks.push({ step: score.step[i], kind: "spike", text: `spike score ${z === Infinity ? "infinite" : z.toFixed(1)}` });
  });
  marks.sort((a, b) => a.step - b.step);
  return { loss, norm, marks, from: data.from, to: data.to };
}

// {layers, steps, last, rows}, or null when the column was not measured in this run.
export async function loadMap(run, name, { from, to }, points) {
  const data = await ask(runPath(run, `/layers${query({ name, from, to, points })}`)).catch(refused);
  if (!data?.steps?.length) return null;
  // -inf is a row without a measurement.
  const rows = data.values.map((row) => row.map((v) => (v === "-inf" ? null : number(v))));
  if (rows.every((row) => row.every((v) => v === null))) return null;
  // Layers that never have it (no attention in an embedding) only take room.
  const kept = rows.map((row, l) => (row.some((v) => v !== null) ? l : -1)).filter((l) => l >= 0);
  return { layers: kept.map((l) => data.layers[l]), steps: data.steps, last: data.last, rows: kept.map((l) => rows[l]) };
}

function refused(error) {
  if (error instanceof Refused && error.status >= 400 && error.status < 500 && error.status !== 401) return null;
  throw error;
}
