// Values and engine words as a person says them. Absent is a dash, never 0.

export const DASH = "–";

// A number from JSON: non-finite ones come as the words "nan", "inf", "-inf".
export function number(value) {
  if (value === null || value === undefined) return null;
  if (typeof value === "number") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? null;
}

export function shown(value, digits = 4) {
  const x = number(value);
  if (x === null) return DASH;
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "+inf" : "−inf";
  if (Number.isInteger(x) && Math.abs(x) < 1e9) return x.toLocaleString("en");
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(digits - 2);
  return String(Number(x.toPrecision(digits)));
}

// Why there is no number for something of a run.
export function missing(run) {
  if (run.state === "running") return run.step === null ? "none yet" : "not measured";
  return "not recorded";
}

export const step = (value) => (value === null || value === undefined ? DASH : value.toLocaleString("en"));

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  const s = Math.max(0, seconds);
  if (s < 2) return "just now";
  if (s < 100) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 130000) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} days ago`;
}

export function bytes(value) {
  const x = number(value);
  if (x === null || !Number.isFinite(x)) return shown(x);
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0, size = x;
  while (size >= 1024 && at < units.length - 1) { size /= 1024; at += 1; }
  return `${size >= 100 || at === 0 ? Math.round(size) : size.toFixed(1)} ${units[at]}`;
}

// State words with a sign that differs in shape, so that colour is never alone.
export const STATES = {
  running: ["▶", "ok", "running"],
  finished: ["■", "mute", "finished"],
  halted: ["✖", "bad", "halted"],
  lost: ["?", "bad", "lost: no sign of life"],
};
export const PROTECTIONS = {
  armed: ["●", "ok", "armed"],
  warming: ["◐", "warn", "warming up"],
  blind: ["○", "bad", "blind"],
  off: ["✖", "bad", "off"],
};
export const PROTECTION_MEANS = {
  armed: "the rules are watching every step",
  warming: "baselines are being learned; non-finite values are acted on already",
  blind: "nothing useful is measured: see the blind spots in session.status()",
  off: "nothing is done, whatever happens",
};
export const SEVERITIES = {
  critical: ["▲▲", "bad", "critical"],
  warning: ["▲", "warn", "warning"],
  info: ["i", "mute", "info"],
};
export const INCIDENT_STATES = {
  pending: ["…", "warn", "pending"],
  firing: ["!", "bad", "firing"],
  resolved: ["✓", "ok", "resolved"],
};

// The copy of a snapshot on disk; whatever is neither was not verified, and says why.
export const COPIES = {
  sound: ["✓", "ok", "verified"],
  damaged: ["✖", "bad", "damaged on disk"],
};
export const UNVERIFIED = ["–", "mute", "not verified"];
export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");

const RULES = {
  nonfinite_params: "the parameters held NaN or inf",
  nonfinite_loss: "the loss was NaN or inf",
  nonfinite_grad: "the gradients were NaN or inf",
  loss_spike: "the loss spike lasted",
  loss_outlier: "the loss was far above its baseline",
  grad_norm: "the gradient norm was far above its mean",
  skip_bound: "too many steps had been skipped",
  command: "a person ordered it",
  trainer: "the trainer decided it",
};
export const because = (rule) => RULES[rule] ?? (rule ? `rule ${rule}` : "no rule is given");

const KEYS = {
  instability: "Instability",
  level_shift: "The loss moved to another level",
  attention_logit: "Attention logits too large",
  update_ratio: "Update-to-weight ratio out of line",
  norm_band: "Gradient norm outside its healthy band",
  layer_band: "A layer left its own band",
  layer_outlier: "A layer unlike its like",
  depth: "Signals grow or die with depth",
  residual_gain: "The residual path amplifies",
  residual_mixing: "Mixed residual streams amplify",
  collapse: "A block makes all tokens alike",
  norm_trend: "Gradient norm rises steadily",
  rising_together: "Loss and gradient norm rise together",
  stale_grads: "Gradients pile up",
  loss_swing: "The loss swings",
  loss_period: "The loss spikes at regular steps",
  loss_plateau: "The loss stands still",
  loss_scale: "The loss scale collapses",
  clip_pressure: "Clipping never ends",
  headroom: "Little memory is left",
  throughput: "Training has become slower",
};
export const title = (key) => KEYS[key] ?? key.replaceAll("_", " ").replace(/^./, (c) => c.toUpperCase());

const DONE = { skip_step: "skipped", rollback: "rolled back", rollback_failed: "tried to roll back and restored nothing", halt: "halted" };

// [[step, action, rule], ...] as sentences; equal neighbours are told together.
// `targets` says where rollbacks went to, by the step at which they were done.
export function deeds(actions, targets = new Map()) {
  const groups = [];
  for (const [at, action, rule] of actions ?? []) {
    if (action === "left_out") { groups.push({ action, rule, from: at, to: at, count: 1 }); continue; }
    const last = groups[groups.length - 1];
    if (last && last.action === action && last.rule === rule && action.endsWith("skip_step")) {
      last.to = at;
      last.count += 1;
    } else groups.push({ action, rule, from: at, to: at, count: 1 });
  }
  return groups.map(({ action, rule, from, to, count }) => {
    if (action === "left_out") return `… ${step(Number(rule))} more up to step ${step(from)}, not listed`;
    const would = action.startsWith("would_");
    const name = would ? action.slice(6) : action;
    const where = count === 1 ? `step ${step(from)}`
      : to - from + 1 === count ? `steps ${step(from)} to ${step(to)}`
      : `${count} steps between ${step(from)} and ${step(to)}`;
    if (would) {
      const verb = { skip_step: "skipped", rollback: "rolled back at", halt: "halted at" }[name] ?? name;
      return `only observing, would have ${verb} ${where}: ${because(rule)}`;
    }
    const verb = name === "skip_step" ? `${DONE[name]} ${where}` : `${DONE[name] ?? name} at ${where}${name === "rollback" && Number.isInteger(targets.get(from)) ? ` to step ${step(targets.get(from))}` : ""}`;
    return `${verb}: ${because(rule)}`;
  });
}

export const ORDERS = {
  pause: "pause automation",
  resume: "resume automation",
  skip_next: "skip the next step",
  rollback: "roll back",
  scale_lr: "scale the learning rate",
  halt: "halt the run",
  ack: "acknowledge an incident",
};
export const ORDER_STATES = {
  pending: ["…", "warn", "waiting for the trainer"],
  delivered: ["→", "warn", "on its way to the trainer"],
  restoring: ["→", "warn", "taken, the snapshot is not restored yet"],
  taken: ["✓", "ok", "obeyed"],
  superseded: ["↷", "warn", "not carried out"],
  failed: ["✖", "bad", "failed"],
  acknowledged: ["✓", "ok", "obeyed"],
  expired: ["⌛", "mute", "expired, never acted on"],
  refused: ["✖", "bad", "refused"],
};
