// What to do about an incident: plain words, the first steps of its runbook, and where that stands.
//
//   guide(incident) -> {name, advice, means, steps: [text], more: [file, heading], map}
//
// advice: it changes nothing by itself, and stands apart from what sentinel acted on. more: where
// the runbook is. map: the layer map to look at first.

// One entry for each flag (sentinel/core/policy.py, Rules).
const FLAGS = {
  attention_logit: {
    means: "A softmax this sharp passes hardly any gradient. It leads slow divergences by hundreds of steps; some healthy runs live above 50.",
    steps: [
      "Look at the map of attention logits: is it still rising? Is the loss above its old level?",
      "Rising: Add QK-Norm to the named layers from an earlier checkpoint, or lower their initial variance. In a run that cannot be changed, lower the learning rate.",
      "Flat, with a healthy loss: nothing. Raise attention_logit.threshold in the policy if it keeps speaking.",
    ],
    map: "layer_attention_max_logit",
  },
  update_ratio: {
    means: "The update of a layer is far too large for its weights, or hardly moves them. About 0.001 is usual.",
    steps: ["Look at the map of update ratios: is it one layer, or all of them?", "One layer: its initial scale, or a learning rate of its own.", "All of them: the learning rate and the warm-up."],
    map: "layer_update_ratio",
  },
  norm_band: {
    means: "1 to 10 is usual for the gradient norm of a healthy run; above 50 a scale in the architecture is set wrong.",
    steps: ["10 to 50 is usual in the first hundred steps: is it falling?", "Above 50: look at the residual scale and the initialisation, and at the layer with the largest norm in the map."],
  },
  layer_band: {
    means: "The named layer left the range in which it had been, before any other. Where it began is where to look first.",
    steps: ["Look at the named layer's row in the maps around that step.", "Then at its scale, its input and its learning rate, before those of any other layer."],
  },
  layer_outlier: {
    means: "A layer's gradient norm is far from that of the same layers in other blocks.",
    steps: ["Far above: its scale or its learning rate is wrong.", "Far below: it chokes the backward path. Add a skip connection there, or move the normalisation."],
  },
  depth: {
    means: "Gradients or activations are multiplied from block to block: 1.1 a block is over 10,000 in 100 blocks.",
    steps: ["Scale residual branches by (2 x blocks)^-1/2, or start them near zero.", "Look for a missing normalisation."],
  },
  residual_gain: {
    means: "The residual path amplifies: in one block, or over all of them.",
    steps: ["Start the named block's last projection near zero.", "Scale residual branches by (2 x blocks)^-1/2."],
    map: "layer_activation_rms",
  },
  residual_mixing: {
    means: "Learned mixing of residual streams amplifies over all blocks.",
    steps: ["Constrain the mappings: rows and columns that are not negative and sum to 1."],
  },
  collapse: {
    means: "The tokens of a block's output hardly differ: it passes one vector on. Young models do so for a while.",
    steps: ["In the first hundreds of steps: wait.", "Later: another activation, normalisation or residual connection in the named blocks."],
    map: "layer_activation_rms",
  },
  norm_trend: {
    means: "The gradient norm has been rising steadily. Slow divergences begin like this.",
    steps: ["Look at the attention logits and the layer maps: which layer rises first?", "Look at the residual initialisation, and for a missing normalisation or QK-Norm."],
  },
  rising_together: {
    means: "Loss and gradient norm rise together: the update direction oscillates.",
    steps: ["If it goes on: lower the learning rate.", "Look at the residual scale and the length of the warm-up."],
  },
  stale_grads: {
    means: "The gradient norm grows in proportion to the steps, as it does when old gradients are never dropped.",
    steps: ["Call zero_grad once per optimizer step.", "With accumulation: after the optimizer's step, not after each micro-batch."],
  },
  loss_swing: {
    means: "The loss swings by more than small batches explain.",
    steps: ["Lower the learning rate, or use larger micro-batches."],
  },
  loss_period: {
    means: "One step in so many has a higher loss than the others, again and again.",
    steps: ["Divide the loss by the number of accumulated micro-batches.", "Look at how the data repeat: a source that comes round at that distance?"],
  },
  loss_plateau: {
    means: "The loss has not moved for a long stretch.",
    steps: ["Raise the learning rate, if it has decayed or was small from the start.", "Look for a missing zero_grad, saturated activations and the initialisation."],
  },
  loss_scale: {
    means: "The gradient scaler keeps halving its scale: activations or gradients really overflow.",
    steps: ["Look for the layer whose values are largest, and at the residual scale and the learning rate.", "Or use bf16, which does not overflow at 65,504."],
  },
  clip_pressure: {
    means: "Clipping is on at nearly every step: the steps are not those of your learning rate.",
    steps: ["Lower the learning rate, or raise the limit.", "Clipping is a fuse, not a setting to train with."],
  },
  headroom: {
    means: "Little memory of the device is free; peaks of communication need some, and an out-of-memory error ends the run.",
    steps: ["Write a checkpoint now, if the last one is old.", "Which kind grows (Memory, below)? Activations or other that grow step by step are a leak: detach what you keep.", "Flat: smaller micro-batches, or shard more. Keep 15 % free."],
  },
  throughput: {
    means: "Training has become slower, lastingly. The model is in no danger.",
    steps: ["Did something change: recomputation, evaluation, a neighbour on the machine?", "Look at gradient synchronisation, the interconnect, the data loader, and the clocks of the devices."],
  },
};

const OPERATING = "docs/operating.md", SETTLED = ["docs/policy.md", "How a troubled step is settled"];
const LOOK = "Look at what they have in common: the batches, the learning rate, the layer that was first out of its band.";

// An Instability incident by the gravest thing about it, the gravest first.
const KINDS = [
  [(i) => i.actions?.length > 0 && i.actions.every(([, action]) => action.startsWith("would_")), {
    name: "only observed", more: SETTLED,
    means: "The policy only observes: nothing was done, and whatever happened is in the weights.",
    steps: ["Is the loss back on its curve? If not, go back to a checkpoint from before it.", "A policy that acts would have done what stands above; choose it with attach(policy=...)."],
  }],
  [(i, did) => /^rollback failed|no usable snapshot/.test(i.summary) || (did("rollback_failed") && !did("rollback")), {
    name: "a rollback failed", more: [OPERATING, "SentinelRollbackFailed"],
    means: "A rollback was needed and not done. The step was skipped and the learning rate cut; the damage is in the weights.",
    steps: [
      "Does the loss come back by itself within some 30 steps? Then repair what kept the snapshot from being restored, and go on.",
      "If not: stop the run, and start it with its own id from the newest healthy snapshot, or a checkpoint from before.",
      "Why it failed: free disk space, the trainer's log around the step, and `sentinel snapshots RUN --verify`.",
    ],
  }],
  [(i, did) => did("halt"), {
    name: "halted", more: [OPERATING, "Stopped, halted, paused"],
    means: "The run was ended on purpose: exit code 86, which is no crash.",
    steps: ["Read HALTED in the run's directory: at which step, why, and the last 64 steps.", "Find the cause before you start it again; `sentinel resume RUN` clears the marker."],
  }],
  [(i) => /are spent: acting stopped|acting is stopped/.test(i.summary), {
    name: "the rollback budget is spent", more: [OPERATING, "Stopped, halted, paused"],
    means: "Training goes on without protection against damage: only non-finite steps and extreme norms are still skipped.",
    steps: ["Look at the rollbacks before this one. " + LOOK, "With the cause gone: resume automation, which refills the budget.", "Without: halt it, and start it from a checkpoint from before the first of them."],
  }],
  [(i, did) => did("rollback") && !i.actions.some(([, , rule]) => rule !== "command"), {
    name: "rolled back by order", more: [OPERATING, "Orders and who may give them"],
    means: "A person ordered it.",
    steps: ["Nothing, if it was meant: `sentinel audit RUN` says who gave the order."],
  }],
  [(i, did) => did("rollback"), {
    name: "rolled back", more: [OPERATING, "SentinelRollback"],
    means: "The weights themselves were damaged, not only a batch bad. They are those of the snapshot again, and the learning rate is cut for a while.",
    steps: [
      "The first one, and the loss is back on its curve within a few hundred steps: nothing.",
      "Did the learning rate change just before, or peak? A too high rate is the commonest cause: lower its peak to 0.5 to 0.9.",
      "Which layer was first? One far above the others: its scale or learning rate. An attention logit above 50 before the spike: QK-Norm.",
      "Three within 2,000 steps spend the budget, and the run then trains on unprotected.",
    ],
  }],
  [(i) => /^the gradient scaler left this step out/.test(i.summary), {
    name: "the scaler's own", more: [OPERATING, "loss_scale"],
    means: "The gradients overflowed in fp16, and the gradient scaler left the step out, as it does without Sentinel. It finds its scale so: in the first steps, and now and then after.",
    steps: ["Nothing. If its scale keeps falling, that is a flag of its own (loss_scale)."],
  }],
  [(i) => (i.actions ?? []).some(([, , rule]) => /^nonfinite/.test(rule)) || /\b(nan|inf)\b/i.test(i.summary), {
    name: "NaN or inf", more: [OPERATING, "SentinelNonFinite"],
    means: "A loss or a gradient was not a number. No parameter and no optimizer state moved in the skipped steps.",
    steps: [
      "A single step in many thousands: nothing.",
      "More and more of them: with fp16 look at the loss scale first; then lower the learning rate, or go to bf16.",
      "Look at the map of gradient norms: the layer that is crossed first is the place.",
    ],
    map: "layer_grad_norm",
  }],
  [(i, did) => did("skip_step"), {
    name: "steps skipped", more: SETTLED,
    means: "The loss or the gradient was far above what was expected. The skipped batches did not reach the weights.",
    steps: ["The loss is back on its curve: nothing.", "Again and again: look at those batches first (odd data), then at the learning rate."],
  }],
  [() => true, {
    name: "a spike, let through", more: SETTLED,
    means: "The loss was far above what was expected, for too short a time to act on.",
    steps: ["Nothing, if it stays alone.", "Again and again: " + LOOK.replace("Look", "look")],
  }],
];

const LEVEL = {
  name: "", more: [OPERATING, "level_shift"],
  means: "The loss has settled well above its level, without a spike, and nothing was undone. Where the new level was accepted, this stays open until somebody takes it.",
  steps: [
    "Look at what changed at that step: the data or their mixture, the batch size, the learning rate, the code.",
    "Explained: acknowledge it.",
    "Not explained: the weights were damaged slowly. Compare with the last healthy snapshot (`sentinel command RUN rollback`), and lower the learning rate.",
  ],
};

const RUNBOOKS = { attention_logit: "SentinelQkNorm" };  // the others have their own names

const UNKNOWN = { more: [OPERATING, "Flags"], means: "This page does not know that kind: the sidecar's is newer, or the trainer's.", steps: [] };

export function guide(incident) {
  const { key } = incident;
  if (key === "level_shift") return { ...LEVEL, advice: false };
  if (key !== "instability") return { name: "", more: [OPERATING, RUNBOOKS[key] ?? key], ...(FLAGS[key] ?? UNKNOWN), advice: true };
  const did = (what) => (incident.actions ?? []).some(([, action]) => action === what);
  return { ...KINDS.find(([is]) => is(incident, did))[1], advice: false };
}
