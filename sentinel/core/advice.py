"""Advice: what the flags' detectors say of a step. Never an action.

    observe(state, observation, policy) -> (next state, Advised(judged, raised, first))
    wants_layers(state)                    the layer table has not come yet: put it into the columns
    over(state, step)                      flags that need not wait for their cooldown to end

Which of what is raised becomes a finding is the rules' business (mode, `for`, cooldown).

The scalars of LOOK steps are gathered and judged together, so that they cost next to nothing on the
steps between; each such judgement counts for LOOK steps. What needs a column is judged when there
is one, and counts for one. Layers are looked at:

* bands, every step: who left its own band first, by weight norm (the layer itself), else by
  activation (the order of the forward pass); by gradient norm (the farthest out) where activations
  are not measured. `first` is told with an incident too, for LINGERS steps after the last one was
  out.
* depth, residual gain and outliers, at steps 32, 64, 128 and every 256: which block a layer lies
  in, and which layers are its like, comes once as two columns (LAYER_BLOCK, LAYER_ROLE) that the
  trainer adds while `wants_layers`; so a sidecar and a replay have them the same way, and a
  rollback to before they came asks for them again. Which layers have had a gradient of exactly 0
  ever since is kept from step to step and judged with the outliers, after SILENT steps.

`gradient_age` says how many steps the gradients have been adding up, where the trainer knows: then
`stale_grads` is judged only of those that are older than its window.

A rule that is off is not judged and keeps no state.

Units:   steps.
Purity:  no clock, no I/O, no randomness. State is an immutable value of bounded size, kept with
         each snapshot: a few KB of scalars, and 12 + 4 bytes a layer. Parts without signal are
         None.
Errors:  none, whatever was measured.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sentinel.core.detectors import (
    depth,
    layer_band,
    layer_outlier,
    loss_scale,
    loss_shape,
    norm_trend,
    resources,
    stale_grads,
    throughput,
)
from sentinel.core.detectors.layer_band import BandState
from sentinel.core.detectors.loss_scale import ScaleState
from sentinel.core.detectors.loss_shape import ShapeState
from sentinel.core.detectors.norm_trend import TrendState
from sentinel.core.detectors.stale_grads import StaleState
from sentinel.core.detectors.throughput import PaceState
from sentinel.core.policy import Policy
from sentinel.core.quick import quick
from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_ACTIVATION_SPREAD,
    LAYER_BLOCK,
    LAYER_GRAD_NORM,
    LAYER_ROLE,
    LAYER_WEIGHT_NORM,
    NOT_MEASURED,
    Column,
    Mode,
    Observation,
)

LOOK = 16
LAYERS_EVERY, LAYERS_SOON = 256, 32
SILENT = 240  # steps without a gradient, after which it is not by chance: a little less than a look
LINGERS = 16
TOLD = 8  # layers of one piece of advice

# (column, its rows are in the order of the forward pass), the most telling first.
BANDS = ((LAYER_WEIGHT_NORM, False), (LAYER_ACTIVATION_RMS, True), (LAYER_GRAD_NORM, False))
DEPTHS = ((LAYER_GRAD_NORM, "gradient norm"), (LAYER_ACTIVATION_RMS, "activation RMS"))

_ROW = struct.Struct("<4d")  # loss, norm, scale, pace; nan: not measured, inf: no number
_NAN, _INF = math.nan, math.inf
OFF = Mode.OFF
_NO_BANDS = (BandState(),) * len(BANDS)
_ACTIVATIONS = 1  # their place in BANDS
_NONE = -1  # of a block or role


@dataclass(frozen=True, slots=True)
class Slow:
    """What the detectors of gathered scalars remember."""

    shape: ShapeState = ShapeState()
    trend: TrendState = TrendState()
    stale: StaleState = StaleState()
    scale: ScaleState = ScaleState()
    pace: PaceState = PaceState()


@quick
@dataclass(frozen=True, slots=True)
class Layers:
    """What is known of the layers.

    Attributes:
        blocks, roles: int16 [L], -1 for none; empty until they came.
        looked: step of the last look at depth and outliers.
        bands: in the order of BANDS.
        first: who left first in the newest episode.
        out_at: step at which a layer was last out; -1 for never.
        silent: int32, rows without a gradient since the step `silent_since`; -1: not asked yet.
    """

    blocks: bytes = b""
    roles: bytes = b""
    looked: int = 0
    bands: tuple[BandState, ...] = _NO_BANDS
    first: tuple[int, ...] = ()
    out_at: int = -1
    silent: bytes = b""
    silent_since: int = -1


@quick
@dataclass(frozen=True, slots=True)
class AdviceState:
    """`rows` are the scalars since the last look."""

    rows: bytes = b""
    slow: Slow | None = None
    layers: Layers | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """A condition that holds; `key` is the rule's name, `steps` what it counts for."""

    key: str
    steps: int
    summary: str
    value: float | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Advised:
    """What was judged at this step, what of it holds, and who left its band first lately."""

    judged: tuple[str, ...] = ()
    raised: tuple[Raised, ...] = ()
    first: tuple[int, ...] = ()


NOTHING = Advised()
_CALM = Advised(("layer_band",))
SLOW = (
    "loss_swing",
    "loss_period",
    "loss_plateau",
    "norm_trend",
    "rising_together",
    "stale_grads",
    "loss_scale",
    "throughput",
    "headroom",
    "clip_pressure",
    "residual_mixing",
)
# What is asked of Observation.scalars.
MIXING = ("residual_mixing_forward", "residual_mixing_backward")
SCALARS = (
    "tokens_per_second",
    "memory_headroom",
    "clipped_step_ratio",
    "clip_factor_mean",
    "gradient_age",
    *MIXING,
)
LAYERED = ("layer_band", "depth", "residual_gain", "layer_outlier", "collapse")
FLAGS = (*SLOW, *LAYERED)


def wants_layers(state: AdviceState) -> bool:
    """The columns LAYER_BLOCK and LAYER_ROLE are to come with the next observation."""
    return state.layers is None or not state.layers.blocks


def over(state: AdviceState, step: int) -> tuple[str, ...]:
    """Flags of which it is known that what they say is over, however long their cooldown is.

    All layers have been back in their bands for LINGERS steps: one bad batch, or a level that is
    taken for their own by now. A layer that leaves again is flagged again.
    """
    layers = state.layers
    if layers is None or step - layers.out_at <= LINGERS or any(b.first for b in layers.bands):
        return ()
    return ("layer_band",)


def observe(
    state: AdviceState, observation: Observation, policy: Policy
) -> tuple[AdviceState, Advised]:
    """Take in one step; a blind one says nothing."""
    if observation.blind:
        return state, NOTHING
    rows, slow, layers = state.rows, state.slow, state.layers
    judged: tuple[str, ...] = ()
    raised: list[Raised] = []
    scalars, columns = observation.scalars, observation.columns
    pace = scalars.get("tokens_per_second", _NAN) if scalars else _NAN
    loss, norm, scale = observation.loss, observation.grad_norm, observation.loss_scale
    if loss is not None or norm is not None or scale is not None or pace == pace:
        rows += _ROW.pack(
            _NAN if loss is None else loss if loss == loss else _INF,
            _NAN if norm is None else norm if norm == norm else _INF,
            _NAN if scale is None else scale if scale == scale else _INF,
            pace,
        )
        if len(rows) >= LOOK * _ROW.size:
            slow, judged = _look(slow or Slow(), rows, scalars, policy, raised)
            rows = b""
    first: tuple[int, ...] = ()
    if columns:
        layers, also = _layers(layers, observation, policy, raised)
        judged += also
    if layers is not None and layers.first and observation.step - layers.out_at <= LINGERS:
        first = layers.first
    if not (raised or first):
        if not judged:
            return AdviceState(rows, slow, layers), NOTHING
        if judged == _CALM.judged:
            return AdviceState(rows, slow, layers), _CALM
    return AdviceState(rows, slow, layers), Advised(judged, tuple(raised), first)


# ---------------------------------------------------------------- gathered scalars


def _look(
    slow: Slow, rows: bytes, scalars: Mapping[str, float], policy: Policy, raised: list[Raised]
) -> tuple[Slow, tuple[str, ...]]:
    """Judge the last LOOK steps."""
    flat = struct.unpack(f"<{len(rows) // 8}d", rows)
    rules = policy.rules
    shape, trend, stale = slow.shape, slow.trend, slow.stale
    scale, pace = slow.scale, slow.pace
    losses = [v for v in flat[0::4] if -_INF < v < _INF]
    norms = flat[1::4]

    if losses and not (
        rules.loss_swing.mode is rules.loss_period.mode is rules.loss_plateau.mode is OFF
    ):
        swings = rules.loss_swing.mode is not OFF
        shape, seen = loss_shape.observe(shape, losses, policy.loss_shape, swings=swings)
        if seen.swinging:
            _say(raised, "loss_swing", f"the loss swings by {seen.swing:.0%}", seen.swing)
        if seen.period:
            text = f"one step in {seen.period} has a higher loss than the others"
            _say(raised, "loss_period", text, float(seen.period))
        if seen.plateau:
            steps = policy.loss_shape.segments * policy.loss_shape.length
            _say(raised, "loss_plateau", f"the loss has not moved for {steps} steps", losses[-1])
    if not (rules.norm_trend.mode is rules.rising_together.mode is OFF):
        pairs = [
            (norm, loss if -_INF < loss < _INF else None)
            for loss, norm in zip(flat[0::4], norms, strict=True)
            if -_INF < norm < _INF
        ]
        trend, rise = norm_trend.observe(trend, pairs, policy.norm_trend)
        if rise.rising:
            steps = policy.norm_trend.segments * policy.norm_trend.length
            text = f"the gradient norm has risen {rise.ratio:.1f}-fold over {steps} steps"
            _say(raised, "norm_trend", text, rise.ratio)
        if rise.together:
            steps = policy.norm_trend.short
            text = f"loss and gradient norm have been rising together for {steps} steps"
            _say(raised, "rising_together", text)
    age = scalars.get("gradient_age") if scalars else None
    if age is not None and age < policy.stale_grads.window:
        stale = StaleState()  # dropped since then: however they rise, they are not piling up
    elif rules.stale_grads.mode is not OFF:
        there = [v for v in norms if v == v]
        stale, pile = stale_grads.observe(stale, there, policy.stale_grads)
        if pile.flagged:
            text = f"the gradient norm grows at every step, {pile.ratio:.1f}-fold lately"
            _say(raised, "stale_grads", text, pile.ratio)
    if flat[-2] == flat[-2] and rules.loss_scale.mode is not OFF:
        scales = [v for v in flat[2::4] if -_INF < v < _INF]
        scale, fall = loss_scale.observe(scale, scales, policy.loss_scale)
        if fall.collapsing:
            text = f"the loss scale has fallen to {scales[-1]:g}" if scales else "no loss scale"
            _say(raised, "loss_scale", text, fall.halvings)
    if flat[-1] == flat[-1] and rules.throughput.mode is not OFF:
        rates = [v for v in flat[3::4] if 0.0 < v < _INF]
        pace, speed = throughput.observe(pace, rates, policy.throughput)
        if speed.slow:
            text = f"training runs at {speed.ratio:.0%} of its usual pace"
            _say(raised, "throughput", text, speed.ratio)
    if scalars:
        headroom = scalars.get("memory_headroom")
        if resources.low_headroom(headroom, policy.resources) and headroom is not None:
            text = f"{headroom:.0%} of the device's memory are free"
            _say(raised, "headroom", text, headroom)
        share, left = scalars.get("clipped_step_ratio"), scalars.get("clip_factor_mean")
        if resources.clip_pressure(share, left, policy.resources) and left is not None:
            text = f"clipping is on at {share:.0%} of the steps and leaves {left:.0%} of them"
            _say(raised, "clip_pressure", text, left)
        mixing = (scalars.get(MIXING[0]), scalars.get(MIXING[1]))
        if mixing[0] is not None and mixing[1] is not None:
            gains = (mixing[0], mixing[1])
            if depth.mixing_flagged(gains, policy.depth):
                text = (
                    f"all residual mappings together amplify {gains[0]:.3g}-fold forward, "
                    f"{gains[1]:.3g}-fold backward"
                    if gains[0] == gains[0] and gains[1] == gains[1]
                    else "the residual mappings hold NaN"
                )
                _say(raised, "residual_mixing", text, _largest(gains))
    return Slow(shape, trend, stale, scale, pace), SLOW


def _say(
    raised: list[Raised],
    key: str,
    what: str,
    value: float | None = None,
    layers: tuple[int, ...] = (),
    steps: int = LOOK,
) -> None:
    raised.append(Raised(key, steps, f"{what}: {ADVICE[key]}", value, layers))


# ---------------------------------------------------------------- layers


def _layers(
    layers: Layers | None, observation: Observation, policy: Policy, raised: list[Raised]
) -> tuple[Layers | None, tuple[str, ...]]:
    columns, step, rules = observation.columns, observation.step, policy.rules
    judged: tuple[str, ...] = ()
    if LAYER_BLOCK in columns and LAYER_ROLE in columns:
        blocks, roles = _whole(columns[LAYER_BLOCK]), _whole(columns[LAYER_ROLE])
        layers = replace(layers or Layers(), blocks=blocks, roles=roles)
    if rules.layer_band.mode is not OFF:
        layers = _bands(layers, observation, policy, raised)
        judged = ("layer_band",)
    spread = columns.get(LAYER_ACTIVATION_SPREAD)
    if spread is not None and rules.collapse.mode is not OFF:
        judged += ("collapse",)
        alike = resources.collapsed(spread, policy.resources)
        if alike:
            text = f"{len(alike)} block(s) make all tokens alike"
            _say(raised, "collapse", text, float(spread[alike[0]]), alike[:TOLD], steps=1)
    norms, rms = columns.get(LAYER_GRAD_NORM), columns.get(LAYER_ACTIVATION_RMS)
    if norms is not None and rules.layer_outlier.mode is not OFF:
        if layers is None or layers.silent_since < 0:
            layers = _listen(layers or Layers(), norms, step)
        elif layers.silent:
            left = layer_outlier.still(_rows(layers.silent), norms)
            if 4 * len(left) < len(layers.silent):
                layers = replace(layers, silent=left.astype("<i4").tobytes())
    if (
        layers is not None
        and layers.blocks
        and step - layers.looked >= min(LAYERS_EVERY, max(LAYERS_SOON, layers.looked))
    ):
        if norms is not None or rms is not None:
            layers = replace(layers, looked=step)
            judged += _over_depth(layers, columns, step, policy, raised)
            if norms is not None and 0 <= layers.silent_since <= step - SILENT:
                layers = _listen(layers, norms, step)
    return layers, judged


def _listen(layers: Layers, norms: Column, step: int) -> Layers:
    """From now on: which of those that have no gradient at this step go on without one?"""
    rows = np.flatnonzero(norms == 0).astype("<i4")
    return replace(layers, silent=rows.tobytes(), silent_since=step)


def _bands(
    layers: Layers | None, observation: Observation, policy: Policy, raised: list[Raised]
) -> Layers | None:
    columns, step = observation.columns, observation.step
    bands = _NO_BANDS if layers is None else layers.bands
    changed, away = list(bands), 0
    first: tuple[int, ...] = ()
    for i, (name, forward) in enumerate(BANDS):
        column = columns.get(name)
        if name is LAYER_GRAD_NORM and changed[_ACTIVATIONS].seen:
            # Gradients change their order of magnitude in perfect health, all through the first
            # hundred steps: they are asked only where nothing better is measured.
            changed[i] = _NO_BANDS[i]
        elif column is not None:
            changed[i], reading = layer_band.observe(
                bands[i], column, step, policy.layer_band, forward=forward
            )
            away = max(away, len(reading.out))
        first = first or changed[i].first
    following = tuple(changed)
    same = all(map(operator.is_, following, bands))
    if not first:
        return layers if same else replace(layers or Layers(), bands=following)
    layers = layers or Layers()
    text = f"{away or len(first)} layer(s) out of their own band, this one first"
    _say(raised, "layer_band", text, None, first, steps=1)
    return replace(layers, bands=following, first=first, out_at=step)


def _over_depth(
    layers: Layers,
    columns: Mapping[str, Column],
    step: int,
    policy: Policy,
    raised: list[Raised],
) -> tuple[str, ...]:
    """Growth from block to block, and layers unlike their like."""
    judged: tuple[str, ...] = ()
    rules = policy.rules
    if rules.depth.mode is not OFF:
        judged += ("depth",)
        for name, what in DEPTHS:
            column = columns.get(name)
            if column is None or 2 * len(column) != len(layers.blocks):
                continue
            seen = depth.judge(column, _table(layers.blocks), policy.depth)
            if seen.flagged:
                text = f"the {what} changes {seen.total:.3g}-fold from the first block to the last"
                _say(raised, "depth", text, seen.rho, steps=1)
                break
    rms = columns.get(LAYER_ACTIVATION_RMS)
    if rms is not None and rules.residual_gain.mode is not OFF:
        judged += ("residual_gain",)
        if 2 * len(rms) == len(layers.blocks):
            blocks = depth.compound(_table(layers.blocks))
            path = depth.gain(rms, blocks, policy.depth)
            if path.flagged:
                text = (
                    f"the residual path amplifies {path.product:.3g}-fold over the depth, "
                    f"{path.worst:.3g}-fold in block {path.block}"
                )
                row = int(np.flatnonzero((blocks == path.block) & (rms != NOT_MEASURED))[-1])
                _say(raised, "residual_gain", text, path.worst, (row,), steps=1)
    norms = columns.get(LAYER_GRAD_NORM)
    if norms is not None and rules.layer_outlier.mode is not OFF:
        judged += ("layer_outlier",)
        if 2 * len(norms) == len(layers.roles) == len(layers.blocks):
            roles, blocks = _table(layers.roles), _table(layers.blocks)
            config = policy.layer_outlier
            dead: tuple[int, ...] = ()
            if layers.silent and step - layers.silent_since >= SILENT:
                dead = layer_outlier.silent(_rows(layers.silent), norms, roles, blocks, config)
            odd = layer_outlier.judge(norms, roles, config)
            which = (*dead, *odd.high, *odd.low)
            texts = []
            if dead:
                since = step - layers.silent_since
                texts.append(f"{len(dead)} layer(s) have had no gradient for {since} steps")
            if odd.high or odd.low:
                texts.append(
                    f"the gradient norm of {len(odd.high)} layer(s) is far above, of "
                    f"{len(odd.low)} far below that of their like"
                )
            if texts:
                # A long silence was counted step by step and needs no further looks.
                steps = step - layers.silent_since if dead else 1
                _say(raised, "layer_outlier", "; ".join(texts), None, which[:TOLD], steps)
    return judged


def _largest(gains: tuple[float, float]) -> float:
    """nan, which is worse than any number, if either is."""
    return _NAN if any(gain != gain for gain in gains) else max(gains)


def _whole(column: Column) -> bytes:
    """A column of small whole numbers as int16; what is none of them is -1."""
    with np.errstate(invalid="ignore"):
        fits = (column >= 0) & (column < 2**15)
    return np.where(fits, column, _NONE).astype("<i2").tobytes()


def _rows(data: bytes) -> npt.NDArray[np.int_]:
    return np.frombuffer(data, "<i4").astype(np.int_)


def _table(data: bytes) -> npt.NDArray[np.int_]:
    return np.frombuffer(data, "<i2").astype(np.int_)


# What to do about it, said with each finding; practitioners' rules.
ADVICE: Mapping[str, str] = {
    "loss_swing": "lower the learning rate, or use larger micro-batches",
    "loss_period": (
        "divide the loss by the number of accumulated micro-batches, or look at how the data repeat"
    ),
    "loss_plateau": (
        "raise the learning rate; look for a missing zero_grad, saturated activations and the "
        "initialisation"
    ),
    "norm_trend": "look at the residual initialisation and for a missing normalisation or QK-Norm",
    "rising_together": (
        "the update direction oscillates: look at the residual scale and the length of the warm-up"
    ),
    "stale_grads": "call zero_grad once per optimizer step",
    "loss_scale": "activations or gradients overflow: look at residual scale and rate, or use bf16",
    "throughput": "look at recomputation, gradient synchronisation and the interconnect",
    "headroom": "keep 15 % free for peaks of communication: smaller micro-batches, or shard more",
    "clip_pressure": (
        "the steps are not those of your learning rate: lower it, or raise the limit, and see that "
        "zero_grad is called"
    ),
    "layer_band": "look at its scale, its input and its learning rate before the others'",
    "depth": (
        "scale residual branches by (2 x blocks)^-1/2, or start them near zero; look for a missing "
        "normalisation"
    ),
    "residual_gain": (
        "initialise that block's last projection near zero, scale residual branches by "
        "(2 x blocks)^-1/2"
    ),
    "residual_mixing": (
        "constrain the mappings: rows and columns that are not negative and sum to 1"
    ),
    "layer_outlier": (
        "above: its scale or learning rate; below: it chokes the backward path, add a skip "
        "connection or move the normalisation; none at all: a dead activation (ReLU), a detach, or "
        "no optimizer holds it"
    ),
    "collapse": "another activation, normalisation or residual connection",
}
