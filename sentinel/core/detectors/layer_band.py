"""Layer-band detector: which layer left its own band first?

    observe(state, column, step, config) -> (next state, BandReading(out, first))

Each layer has a band of its own: the running mean of ln(value), and the running mean of the
distance from it. A layer is out when it is `width` such distances and a factor `factor` above the
mean, or not finite. When trouble begins, many layers leave within a step or two, and the one that
blew up first is what a person wants to know. Of those out at the first step of an episode, that is
the first in the order of the table, where that is the order of the forward pass (activations), and
the farthest one elsewhere.

A layer that is out does not move its band, for `patience` columns: then the new level is taken for
its own. The episode ends when no layer is out. Every column is judged; after the warm-up the bands
learn every EVERY steps, so that a calm step costs one comparison a layer.

Shapes:  column float32 [L]; NOT_MEASURED rows are passed over.
Units:   warmup, patience [columns].
Purity:  state is an immutable value: ln(mean) and distances as int16, in 1/1024.
Errors:  BandConfig raises ConfigError. A column of another length starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sentinel.core import bounds
from sentinel.core.quick import quick
from sentinel.core.types import Column

RATE = np.float32(1 / 8)  # of the running means
EVERY = 16  # steps from one lesson to the next, once warm
TOLD = 8  # layers that an episode remembers
_SCALE = np.float32(1024.0)  # what would move a mean by less than 1/2048 is lost
_UNIT = np.float32(1 / 1024)
_LEAST, _MOST = np.float32(-(2**15) + 1), np.float32(2**15 - 1)
_UNKNOWN = -(2**15)
_LARGEST = float(np.finfo(np.float32).max)

Int16 = npt.NDArray[np.int16]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandConfig:
    """Settings; see the module docstring."""

    width: float = 8.0
    factor: float = 3.0
    warmup: int = 32
    patience: int = 128

    def __post_init__(self) -> None:
        bounds.check(
            "layer_band",
            width=(self.width, 1.0, 1e6),
            factor=(self.factor, 1.0, 1e6),
            warmup=(self.warmup, 4, 100_000),
            patience=(self.patience, 1, 1_000_000),
        )


class _Remembering:
    """A place beside the fields for (config, limits): a cache, never encoded or compared."""

    __slots__ = ("limits",)


@quick
@dataclass(frozen=True, slots=True)
class BandState(_Remembering):
    """What the bands are.

    Attributes:
        seen: columns that were learned from.
        mean, distance: of ln(value), int16 [L].
        learned: step of the last lesson.
        first: the layers that opened the episode.
        out_for: columns in a row with a layer out.
    """

    seen: int = 0
    mean: bytes = b""
    distance: bytes = b""
    learned: int = 0
    first: tuple[int, ...] = ()
    out_for: int = 0


@dataclass(frozen=True, slots=True)
class BandReading:
    """`out`: farthest first; `first`: who left first in this episode."""

    out: tuple[int, ...] = ()
    first: tuple[int, ...] = ()


_INSIDE = BandReading()


def observe(
    state: BandState, column: Column, step: int, config: BandConfig, *, forward: bool = True
) -> tuple[BandState, BandReading]:
    """Judge a column against the bands, then let it move them.

    Args:
        forward: the order of the table is the order in which values come about.
    """
    if len(state.mean) != 2 * len(column):
        y, usual = _logs(column)
        start = _packed(np.where(usual, y, np.float32(np.nan)))
        return BandState(1, start, bytes(len(start)), step), _INSIDE
    armed = state.seen >= config.warmup
    out: npt.NDArray[np.bool_] | None = None
    if armed:
        limit = _limits(state, config)
        inside = column <= limit  # what was not measured lies below; nan does not
        if np.count_nonzero(inside) < len(inside):  # a fifth of what all() takes
            out = ~inside
    if out is None and armed and step - state.learned < EVERY:
        if state.out_for:
            state = replace(state, first=(), out_for=0)
        return state, _INSIDE
    if out is None and (following := _usual_lesson(state, column, step)) is not None:
        return following, _INSIDE

    y, usual = _logs(column)
    mean, distance = _unpacked(state.mean), _unpacked(state.distance)
    known = np.isfinite(mean)
    away = np.where(usual & known, y - mean, np.float32(0.0))
    adopted = out is not None and state.out_for >= config.patience
    if adopted:
        assert out is not None
        mean = np.where(out & usual, y, mean)
        away = np.where(out, np.float32(0.0), away)
        out = None
    move = usual if out is None else usual & ~out
    new_mean = np.where(move, np.where(known, mean + RATE * away, y), mean)
    new_distance = np.where(move & known, distance + RATE * (np.abs(away) - distance), distance)
    first: tuple[int, ...] = ()
    worst: tuple[int, ...] = ()
    if out is not None:
        at = np.flatnonzero(out)
        band = np.maximum(config.width * distance, np.float32(np.log(config.factor)))
        excess = np.where(usual, away - band, np.inf)[at]
        worst = tuple(at[np.argsort(-excess, kind="stable")].tolist())
        first = state.first or (tuple(at[:TOLD].tolist()) if forward else worst[:TOLD])
    following = BandState(
        state.seen + 1,
        _packed(new_mean),
        _packed(new_distance),
        step,
        first,
        state.out_for + 1 if worst else 0,
    )
    return following, BandReading(worst, first) if worst else _INSIDE


def _usual_lesson(state: BandState, column: Column, step: int) -> BandState | None:
    """What nearly every lesson is: all layers measured, usual and known, and none out; else None.

    The same numbers to the last bit as in observe(), in a third of the calls.
    """
    if not column.size:
        return None
    least, most = column.item(column.argmin()), column.item(column.argmax())  # a nan is both
    if not (least > 0.0 and most < np.inf):
        return None
    whole: Int16 = np.frombuffer(state.mean + state.distance, "<i2")
    if whole.item(whole.argmin()) == _UNKNOWN:
        return None
    now = (whole.astype(np.float32) * _UNIT).reshape(2, -1)  # means, distances
    seen = np.empty_like(now)
    away = np.log(column, out=seen[0]) - now[0]
    np.abs(away, out=seen[1])
    following = now + RATE * (seen - now)
    data = _whole(following).tobytes()
    half = len(data) // 2
    return BandState(state.seen + 1, data[:half], data[half:], step)


def _logs(column: Column) -> tuple[Float32, npt.NDArray[np.bool_]]:
    """(ln, where it is a number)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        y: Float32 = np.log(column)
    return y, np.isfinite(y)


def _limits(state: BandState, config: BandConfig) -> Float32:
    """What a layer may reach; the largest finite number where no band is known.

    Found once a lesson, not at every step: the state is the same one until the next.
    """
    found: tuple[BandConfig, Float32] | None = getattr(state, "limits", None)
    if found is not None and found[0] is config:
        return found[1]
    distance = _unpacked(state.distance)
    band = np.maximum(config.width * distance, np.float32(np.log(config.factor)))
    exponent = np.minimum(_unpacked(state.mean) + band, np.float32(88.0))
    limit = np.where(np.isfinite(exponent), np.exp(exponent), _LARGEST).astype(np.float32)
    limit.flags.writeable = False
    object.__setattr__(state, "limits", (config, limit))
    return limit


def _whole(values: Float32) -> Int16:
    """In 1/1024; what is no number comes out as anything."""
    bounded = np.minimum(np.maximum(np.rint(values * _SCALE), _LEAST), _MOST)
    whole: Int16 = bounded.astype("<i2")
    return whole


def _packed(values: Float32) -> bytes:
    usual = np.isfinite(values)
    if usual.all():
        return _whole(values).tobytes()
    return np.where(usual, _whole(np.where(usual, values, _UNIT)), np.int16(_UNKNOWN)).tobytes()


def _unpacked(data: bytes) -> Float32:
    whole: Int16 = np.frombuffer(data, "<i2")
    values = whole.astype(np.float32) * _UNIT
    unknown = whole == _UNKNOWN
    return np.where(unknown, np.float32(np.nan), values) if unknown.any() else values
