"""Attention probe: the largest attention logit of every layer, exact where a threshold is near.

    probe = AttentionProbe(models, table, threshold=50.0)
    probe.attach(); probe.before_step(step); values = read(probe.pending(), [])[0]
    columns = resolve(probe, values)

What a kernel's log-sum-exp says is an interval: `max(lse) - log n <= M <= max(lse)`, n the keys. It
is tight where logits are large, except in rows of nearly uniform attention. So:

* a layer whose upper bound is under 0.8 x threshold costs one reduction of its log-sum-exps;
* above that, and at the first measurement, the 16 rows of the largest log-sum-exp are computed:
  exact, with a proof, in nearly all cases;
* where that proves nothing and the upper bound is above the threshold, the next steps compute all
  rows, in chunks, until the layer has moved away.

The column holds the upper bound where that is under the threshold, and the lower one where that is
above it; where the threshold lies between the two it holds the threshold itself, which is not above
it. So a layer is flagged when it is known to be above: at once if it grew into it, at most two
steps after it came there by a jump.

A layer that is hot in some steps only, as with batches of two kinds, comes there by a jump each
time. So a step in which it was not known whether a layer is above is remembered for 32 steps, in
which the layer is computed as exactly as it would have taken; it is flagged in the third such step
at the latest. If it comes later than that, it is remembered for twice as long from then on.

Scores handed to F.softmax with the row's maximum subtracted (as HF's gpt-oss does) have lost what
is measured here. Told by all rows' maxima being exactly 0: the row of the layer is NOT_MEASURED in
such a step, and blind_spots() says why.

A kernel on the CPU takes a row whose scores are all nan for one that sees no key: it puts out 0 and
a log-sum-exp of exactly 0. No row that sees two keys or more comes to that by itself, so a maximum
of exactly 0 is nan here. Attention over a single key, which may, is computed; so is the step after
one in which masks seem to have left nothing, as they would then too.

Scores with a soft cap (Gemma 2, Grok) never pass it: the column says what they were before, see
capping.py.

Shapes:  column float32 [L]; NOT_MEASURED in rows without attention, or whose attention did not run.
         Query rows that see no key at all say nothing. nan passes through; on the CPU, rows of nan
         beside finite ones do not show.
Units:   scaled scores before the softmax and a soft cap, masks and biases included.
Purity:  does not wait for the device; keeps a few KB of small tensors until the gate.
Threads: any may run forwards; the gate's is the one that steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sentinel.core.types import LAYER_ATTENTION_MAX_LOGIT, NOT_MEASURED, Column
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import capture
from sentinel_hooks.probes.capture import CAPTURE, without_empty_rows
from sentinel_hooks.probes.places import (
    ALL,
    FEW,
    FULL_AGAIN,
    SOME,
    THREAD,
    WATCHED,
    WHERE,
    Enter,
    Leave,
    Place,
    find,
)
from sentinel_hooks.probes.probe import (
    EARLIER,
    NEVER,
    UNSEEN_AFTER,
    Combine,
    Float64,
    Parts,
    Quiet,
    Unseen,
    column,
)

HIGH, LOW = "attention_high", "attention_low"
SETTLED = 2  # measured steps after which hooks on modules that never attend are taken out
PRECISE = 0.01  # of the threshold: how wide an interval above it may be
HOOKED = 4  # times that they are put in again, because attention was called elsewhere
NOTHING = -1e30  # finite masks are the most negative number of their dtype


@dataclass(slots=True)
class _Group:
    """Places of one shape of attention: one pending vector."""

    places: list[Place]
    keys: list[int] | None  # that a row of each sees at most; None: both bounds are there
    heads: int
    rows: npt.NDArray[np.intp] = field(init=False)  # -1 is the one too many
    apart: bool = field(init=False)  # no row twice
    log_keys: Float64 = field(init=False)

    def __post_init__(self) -> None:
        rows = [place.row for place in self.places]
        self.rows, self.apart = np.array(rows), len(set(rows)) == len(rows)
        self.log_keys = np.log(self.keys or 1.0)


class AttentionProbe(Quiet):
    """Watches the attention of `models`."""

    combine: Mapping[str, Combine] = {HIGH: Combine.MAX, LOW: Combine.MAX}

    def __init__(
        self, models: Sequence[nn.Module], table: LayerTable, threshold: float = 50.0
    ) -> None:
        self._models = tuple(models)
        self._table = table
        self._threshold = threshold
        mark = np.float32(threshold)  # as a column has it, and never above
        if float(mark) > threshold:
            mark = np.nextafter(mark, np.float32(-np.inf))
        self._mark = float(mark)
        self._device = _device(models)
        self._places: list[tuple[nn.Module, Place]] = []
        self._live: list[Place] = []  # of those, the ones with hooks
        self._handles: dict[int, list[Any]] = {}
        self._groups: list[_Group] = []
        self._usual: _Group | None = None  # the last one that was the only one
        self._pending: list[Tensor] = []
        self._step = 0
        self._gates = 0
        self._steps = 0  # with a measurement
        self._attached = False
        self._trimmed = False
        self._hooked = 0  # times
        self._last: list[tuple[_Group, Float64 | None, Float64]] = []  # lower bounds, upper ones

    # -- hooks ---------------------------------------------------------------------------------

    @property
    def watched(self) -> list[tuple[nn.Module, Place]]:
        """The attention modules, once attached."""
        return [(module, place) for module, place in self._places if place.attention]

    def attach(self) -> None:
        """Hooks on the modules, replacements of the functions."""
        if self._attached:
            return
        self._attached = True
        device = self._device
        self._places = find(self._models, self._table, lambda n: capture.slots(device, n))
        for _, place in self._places:
            WHERE.by_address[place.slot.data_ptr()] = place
        self._hook()
        CAPTURE.subscribe(self, [m for model in self._models for m in model.modules()])

    def detach(self) -> None:
        """Everything out."""
        if not self._attached:
            return
        self._attached = False
        CAPTURE.unsubscribe(self)
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles = {}
        for _, place in self._places:
            WHERE.by_address.pop(place.slot.data_ptr(), None)
            place.clear()
        self._pending = []
        self._groups = []

    def _hook(self) -> None:
        self._hooked += 1
        self._live = [place for _, place in self._places]
        token = capture.token(self._device)
        for module, place in self._places:
            if id(module) not in self._handles:
                self._handles[id(module)] = [
                    module.register_forward_pre_hook(Enter(place, token)),
                    module.register_forward_hook(Leave(place, token)),
                ]

    def _trim(self) -> None:
        """Hooks cost a microsecond each: keep those that name a call of attention."""
        if WHERE.compiled:  # they are part of the compiled code
            return
        for module, place in self._places:
            if not place.measurements and not place.trouble:
                for handle in self._handles.pop(id(module), ()):
                    handle.remove()
        self._live = [place for module, place in self._places if id(module) in self._handles]
        self._trimmed = True

    # -- measuring -----------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """Reduce what was captured to small vectors on the device."""
        self._step = step
        self._gates += 1
        THREAD.here.forget()
        self._groups = []
        self._pending = []
        if not self._reduce_alike():
            with torch.no_grad():
                self._reduce()
        for place in self._live:
            if place.seen or place.raw or place.top or place.low:
                place.clear()
        lost, WHERE.lost = WHERE.lost, 0
        if self._pending:
            self._steps += 1
        if self._trimmed and lost and self._hooked < HOOKED:
            self._trimmed = False
            self._steps = 0
            self._hook()
        elif not self._trimmed and self._steps > SETTLED:
            self._trim()

    def _reduce_alike(self) -> bool:
        """The usual case, one shape in all layers: asking each for its own costs more than all."""
        places: list[Place] = []
        kept: list[Tensor] = []
        small = large = False
        for place in self._live:
            raw, top = place.raw, place.top
            if place.masked or place.low or len(raw) + len(top) > 1:
                return False
            if raw:
                small = True
            elif top:
                large = True
            else:
                continue
            places.append(place)
            kept += raw or top
        if small == large:  # none, or of both kinds
            return False
        try:
            stacked = torch.stack(kept)
        except RuntimeError:
            return False
        if small:
            stacked = stacked.amax((1, 3))
        keys, heads = [place.keys for place in places], stacked.size(1)
        group = self._usual
        if group is None or group.places != places or group.keys != keys or group.heads != heads:
            group = self._usual = _Group(places, keys, heads)
        self._pending.append(stacked.flatten())
        self._groups.append(group)
        return True

    def _reduce(self) -> None:
        """Any shapes, masks and devices, and layers near the threshold."""
        raw: dict[tuple[Any, ...], list[tuple[Place, Tensor]]] = {}
        tops: dict[tuple[Any, ...], list[tuple[Place, Tensor]]] = {}
        bounds: dict[tuple[Any, ...], list[tuple[Place, Tensor, Tensor]]] = {}
        for place in self._live:
            for lse in place.raw:
                key = (lse.shape, place.masked, lse.device, lse.dtype)
                raw.setdefault(key, []).append((place, lse))
            for top in place.top:
                tops.setdefault((top.shape, top.device), []).append((place, top))
            for low, high in zip(place.low, place.high, strict=True):
                bounds.setdefault((low.shape, low.device), []).append((place, low, high))
        for (shape, masked, _, _), lses in raw.items():
            stacked = torch.stack([lse for _, lse in lses])
            if masked:
                stacked = without_empty_rows(stacked)
            self._pending.append(stacked.amax((1, 3)).flatten())
            self._add_group([p for p, _ in lses], shape[1])
        for (shape, _), own in tops.items():
            self._pending.append(torch.stack([top for _, top in own]).flatten())
            self._add_group([p for p, _ in own], shape[0])
        for (shape, _), pairs in bounds.items():
            both = [low for _, low, _ in pairs] + [high for _, _, high in pairs]
            self._pending.append(torch.cat(both))
            self._groups.append(_Group([p for p, _, _ in pairs], None, shape[0]))

    def _add_group(self, places: list[Place], heads: int) -> None:
        self._groups.append(_Group(places, [place.keys for place in places], heads))

    def pending(self) -> list[Tensor]:
        """Vectors of bounds, a few for each attention shape."""
        return self._pending

    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """Upper and lower bound of each row."""
        self._pending = []
        self._last = []
        if not values:
            return {}
        bounds = np.full((2, len(self._table) + 1), NOT_MEASURED)
        group = self._groups[0]
        if len(values) == 1 and group.keys is not None and group.apart:
            # The usual case, in few lines: out of cold caches one of numpy takes 5 us.
            upper = values[0].reshape(-1, group.heads)
            if upper.min() > 0.0 and upper.max() <= WATCHED * self._threshold:  # nor is one nan
                bounds[1, group.rows] = most = upper.max(1)
                bounds[0, group.rows] = most - group.log_keys
                self._last.append((group, None, upper))
                return {HIGH: bounds[1, :-1], LOW: bounds[0, :-1]}
        return self._judge(values, *bounds)

    @np.errstate(invalid="ignore", over="ignore")  # nan and inf are what may come
    def _judge(
        self, values: Sequence[Float64], lows: Float64, highs: Float64
    ) -> dict[str, Float64]:
        """Any numbers: what they say, and how closely the layers are looked at from now on."""
        extremes: dict[int, tuple[Place, float, float]] = {}
        for group, value in zip(self._groups, values, strict=True):
            places, keys = group.places, group.keys
            if keys is not None:
                upper = value.reshape(-1, group.heads)
                lower = upper - group.log_keys[:, None]
            else:
                lower, upper = value.reshape(2, -1, group.heads)
            if np.count_nonzero(upper) < upper.size:  # a fifth of what all() takes
                if keys is None:
                    lower, upper = _less_shifted(places, lower, upper)
                void = (upper == 0.0) & (lower < 0.0)  # exact numbers, which may be 0, are equal
                lower, upper = np.where(void, np.nan, lower), np.where(void, np.nan, upper)
            elif keys is None:
                for place in places:
                    place.shifted = False
            least, most = lower.max(1), upper.max(1)
            if most.min() <= NOTHING:  # every score was masked
                least = np.where(least <= NOTHING, NOT_MEASURED, least)
                most = np.where(most <= NOTHING, NOT_MEASURED, most)
            np.maximum.at(lows, group.rows, least)
            np.maximum.at(highs, group.rows, most)
            self._last.append((group, lower, upper))
            near = ~(most <= WATCHED * self._threshold) | (most == NOT_MEASURED)
            if keys is not None and not near.any():
                continue  # nothing changes for them
            for place, low, high in zip(places, least.tolist(), most.tolist(), strict=True):
                known = extremes.get(id(place))
                if known is not None:
                    low, high = max(low, known[1]), max(high, known[2])
                extremes[id(place)] = (place, low, high)
        for place, low, high in extremes.values():
            self._next_level(place, low, high)
        return {HIGH: highs[:-1], LOW: lows[:-1]}

    @property
    def heads(self) -> dict[str, Column]:
        """The last step's numbers by layer and head, as the column has them by layer."""
        found: dict[str, tuple[Float64, Float64]] = {}
        for group, lower, upper in self._last:
            if lower is None:
                lower = upper - group.log_keys[:, None]
            for place, low_H, high_H in zip(group.places, lower, upper, strict=True):
                if place.row < 0:
                    continue
                name = self._table.layers[place.row].name
                if name in found and found[name][0].shape == low_H.shape:
                    low_H = np.maximum(low_H, found[name][0])
                    high_H = np.maximum(high_H, found[name][1])
                found[name] = (low_H, high_H)
        return {
            name: self._known_side(low_H, high_H).astype(np.float32)
            for name, (low_H, high_H) in found.items()
        }

    def finish(self, parts: Parts) -> dict[str, Column]:
        """The column."""
        if HIGH not in parts:
            return {}
        found = column(self._known_side(parts[LOW], parts[HIGH]))
        return {} if found is None else {LAYER_ATTENTION_MAX_LOGIT: found}

    def _known_side(self, low: Float64, high: Float64) -> Float64:
        # Below the threshold the most that it can be, above it the least; a nan is in both.
        above = high > self._threshold
        return np.where(above, np.fmax(low, self._mark), high) if above.any() else high

    def _next_level(self, place: Place, low: float, high: float) -> None:
        step = self._step
        unclear = high > self._threshold and high - low > PRECISE * self._threshold
        if high > self._threshold >= low:
            place.unknown += 1
            if 0 < place.until <= step:  # forgotten, and here again
                place.patience *= 2
            place.floor, place.until = min(place.level + 1, ALL), step + place.patience
        elif step < place.until and high > WATCHED * self._threshold:
            place.until = step + place.patience
        if high == NOT_MEASURED:
            place.level = SOME
        elif high <= WATCHED * self._threshold:
            place.level = FEW
        elif place.level == ALL:
            if step - place.since >= FULL_AGAIN:
                place.level = SOME
        elif place.level == SOME and unclear:
            place.level, place.since = ALL, step
        else:
            place.level = SOME
        if step < place.until and place.level < place.floor:
            if place.floor == ALL:
                place.since = step
            place.level = place.floor

    def _is_a_part(self, module: nn.Module, place: Place) -> bool:
        """A projection with things of its own inside (LoRA around c_attn), of an attention seen."""
        wrapped = isinstance(getattr(module, "base_layer", None), nn.Module)
        return any(
            p.attention
            and p.measurements
            and (wrapped or p.row == place.row >= 0)
            and _holds(m, module)
            for m, p in self._places
            if m is not module
        )

    # -- telling -------------------------------------------------------------------------------

    def blind_spots(self) -> list[Unseen]:
        """Attention modules whose logits nobody sees."""
        told = self._steps or self._gates > UNSEEN_AFTER
        if not told and not any(p.entered for _, p in self._places):
            return []
        inside = [
            (module, place)
            for module, place in self._places
            if place.attention
            and not place.measurements
            # One without children is a projection, or a part of the attention around it.
            and (isinstance(module, nn.MultiheadAttention) or next(module.children(), None))
        ]
        seen = {id(m) for m, p in self._places if p.measurements}
        blind: dict[tuple[str, str], list[str]] = {}
        for module, place in inside:
            if any(id(m) in seen for m in module.modules()):
                continue  # it is seen in a module of its own
            if self._is_a_part(module, place):
                continue
            if any(p is not place for m, p in inside if m is not module and _holds(module, m)):
                continue  # the inner one is named
            own = [p for m, p in self._places if p.trouble and _holds(module, m)]
            blind.setdefault(_reason(own[0] if own else place), []).append(place.name)
        for _, place in self._places:
            if place.cap is not None and place.cap != place.cap:
                blind.setdefault(_CAPPED, []).append(place.name)
            if (place.trouble and place.measurements) or place.shifted:
                blind.setdefault(_reason(place), []).append(place.name)
            elif place.passed and not place.measurements:
                blind.setdefault(_PASSED, []).append(place.name)
        spots = [
            Unseen(f"attention logits of {_names(names)} are not seen: {why}", way_out)
            for (why, way_out), names in blind.items()
        ]
        lost = [p.name for _, p in self._places if p.measurements and p.row < 0]
        if lost:
            spots.append(
                Unseen(
                    f"attention logits of {_names(lost)} belong to no one layer",
                    "call attention in the forward of a module for each layer",
                )
            )
        return spots

    def notes(self) -> list[str]:
        """Soft caps, and where the column could not say on which side of the threshold it was."""
        said = []
        capped = [p for _, p in self._places if p.cap and p.cap == p.cap and p.measurements]
        for cap in dict.fromkeys(p.cap for p in capped):
            names = _names([p.name for p in capped if p.cap == cap])
            said.append(f"attention logits of {names} are those before its soft cap of {cap:g}")
        why = "before they were computed exactly", "since its soft cap leaves too little of them"
        for closed in (False, True):
            places = [p for _, p in self._places if p.unknown and (p in capped) is closed]
            if places:
                said.append(
                    f"attention logits of {_names([p.name for p in places])} lay between bounds on "
                    f"either side of {self._threshold:g} in {sum(p.unknown for p in places)} "
                    f"steps, {why[closed]}; the column says {self._threshold:g} there"
                )
        return said


_CAPPED = (
    "a tanh bounds its scores, and by how much cannot be read: the column has them after it",
    "give the module, or its config, the bound as an attribute attn_logit_softcapping",
)
_PASSED = (
    "it takes softmaxes that look like attention, but no name says so, nor of what is around it",
    "call F.scaled_dot_product_attention, or name the module (or its class) attn or attention",
)


def _less_shifted(
    places: Sequence[Place], lower: Float64, upper: Float64
) -> tuple[Float64, Float64]:
    """Without the heads whose scores had their rows' maxima subtracted: nothing is known of them.

    They are told by a lower bound of inf; see capture.py.
    """
    shifted = (upper == 0.0) & (lower == np.inf)
    for place, all_heads in zip(places, shifted.all(1).tolist(), strict=True):
        place.shifted = all_heads
    return np.where(shifted, NOT_MEASURED, lower), np.where(shifted, NOT_MEASURED, upper)


def _reason(place: Place) -> tuple[str, str]:
    if place.trouble:
        return place.trouble, "the other signals of the layer are not touched by this"
    if place.shifted:
        return (
            "all rows of its scores have a maximum of 0: subtracted before, or no queries or keys",
            "hand the scores themselves to F.softmax, which subtracts the maximum by itself",
        )
    if CAPTURE.handed_back:
        return (
            "a __torch_function__ that torch.compile reads asks for torch's own functions",
            "the other signals of the layer are not touched by this",
        )
    if not place.entered:
        return NEVER, EARLIER
    return (
        "it calls no attention function that sentinel knows, or its weights are frozen",
        "use F.scaled_dot_product_attention, or F.softmax over the last dimension of the scores",
    )


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(m is inner for m in outer.modules())


def _names(names: Sequence[str]) -> str:
    few = ", ".join(names[:3])
    return few if len(names) <= 3 else f"{few} and {len(names) - 3} more"


def _device(models: Sequence[nn.Module]) -> torch.device:
    return capture.home(p for model in models for p in model.parameters())
