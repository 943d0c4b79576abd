"""What a trainer may say: bounds beyond which a message can be read and cannot be.

    check_layers(layers), check_frame(run, frame), check_counts(counts), check_columns(run, columns)
    layers = apart(layers)                     names that differ, for series of their own

Steps and report numbers are JSON's exact whole numbers; what is measured is checked by wire.sense.

Purity:  no clock, no I/O.
Errors:  ProtocolError, which names the field, the bound and the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from sentinel.core.errors import ProtocolError
from sentinel.core.events import Event
from sentinel.core.types import Column, Source
from sentinel.sidecar.runs.run import Run
from sentinel.wire import sense
from sentinel.wire.codec import WireEvent
from sentinel.wire.messages import Counts, Frame, Layer, WireOutcome

MOST_SIZE = 2**63
MOST_JUMP = 10_000_000  # reports that a trainer may have made while it reached nobody
MOST_LAYERS = 100_000
MOST_NAME = 512
MOST_NUMBER = 2**53  # steps and report numbers beyond it are nonsense
MOST_EVENTS = 64
MOST_TEXT = 4096
MOST_KINDS = 256  # different reasons, places or gauges that a trainer counts
MOST_INFO = 64

_SOURCES = tuple(str(source) for source in Source)
_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def check_step(what: str, value: int) -> None:
    """Raise ProtocolError for a number that is no step."""
    if not 0 <= value < MOST_NUMBER:
        raise ProtocolError(f"{what} must lie between 0 and 2**53, got {value}")


def check_layers(layers: tuple[Layer, ...]) -> None:
    """Raise ProtocolError for a layer table that nobody can mean."""
    if len(layers) > MOST_LAYERS:
        raise ProtocolError(f"layers may be {MOST_LAYERS}, got {len(layers)}")
    for layer in layers:
        if not 1 <= len(layer.name) <= MOST_NAME or "\0" in layer.name:
            raise ProtocolError(
                f"a layer's name must have 1 to {MOST_NAME} characters, none of them NUL, got "
                f"{layer.name[:64]!r}"
            )
        if any(not 0 <= size < MOST_SIZE for size in layer.shape) or not (
            layer.block is None or -1 <= layer.block < MOST_NUMBER
        ):
            raise ProtocolError(f"the shape and block of layer {layer.name[:64]!r} must be sizes")


def check_frame(run: Run, frame: Frame) -> None:
    """Raise ProtocolError for a frame that can be read and cannot be."""
    seen = frame.observation
    most = run.kept.seen.highest + MOST_JUMP
    if not 0 <= frame.seq <= most:
        raise ProtocolError(
            f"frame.seq must lie between 0 and {most} (the highest so far and {MOST_JUMP} more), "
            f"got {frame.seq}"
        )
    check_step("frame.step", seen.step)
    check_step("frame.attempt", frame.attempt)
    try:
        sense.check_numbers(seen)
        if seen.columns:
            for name, data in seen.columns.items():
                _check_column_name(name)
                if len(data) != 4 * len(run.layers):
                    raise ProtocolError(
                        f"column {name!r} must hold a float32 for each of the {len(run.layers)} "
                        f"layers that were registered, got {len(data)} bytes"
                    )
            sense.check_column_bytes(seen.columns)
    except ProtocolError as error:
        raise ProtocolError(f"step {seen.step}: {error}") from None
    for move in frame.moves:
        if not isinstance(move, WireOutcome):
            check_event("move", move)
            continue
        check_step("move.step", move.step)
        if move.source not in _SOURCES:
            raise ProtocolError(
                f"outcome.source must be one of {', '.join(_SOURCES)}, got {move.source!r}"
            )


def check_event(what: str, event: Event | WireEvent) -> None:
    """Raise ProtocolError for an event that cannot be; `what` is its name in the message."""
    check_step(f"{what}.step", event.step)
    target = getattr(event, "target", None)
    if target is not None:
        check_step(f"{what}.target", target)
    for name in ("reason", "by"):
        if len(getattr(event, name, "")) > MOST_TEXT:
            raise ProtocolError(f"{what}.{name} must have at most {MOST_TEXT} characters")


def check_counts(counts: Counts) -> None:
    """Raise ProtocolError for counters that are none: they become series of /metrics."""
    whole = [("mismatches", counts.mismatches), ("dropped", counts.dropped)]
    for name, table in (
        ("misses", counts.misses),
        ("internal_errors", counts.internal_errors),
        ("gauges", counts.gauges),
    ):
        if len(table) > MOST_KINDS:
            raise ProtocolError(f"counts.{name} may be {MOST_KINDS} numbers, got {len(table)}")
        for key, value in table.items():
            if len(key) > MOST_NAME:
                raise ProtocolError(
                    f"a name in counts.{name} must have at most {MOST_NAME} characters, got "
                    f"{key[:64]!r}..."
                )
            if isinstance(value, int):
                whole.append((f"{name}[{key!r}]", value))
    for name, value in whole:
        check_step(f"counts.{name}", value)
    if not counts.longest_wait_s >= 0.0:
        raise ProtocolError(
            f"counts.longest_wait_s must be 0 or more, got {counts.longest_wait_s:g}"
        )


@lru_cache(maxsize=4096)  # the same few names come with every step; what raises is not kept
def _check_column_name(name: str) -> None:
    if not _COLUMN_NAME.fullmatch(name):
        raise ProtocolError(
            "a column's name must have 1 to 64 lower case letters, digits and underscores, got "
            f"{name[:64]!r}"
        )


def check_columns(run: Run, columns: Mapping[str, Column]) -> None:
    """Raise ProtocolError for columns that do not fit the run's layers."""
    for name, column in columns.items():
        _check_column_name(name)
        if column.size != len(run.layers):
            raise ProtocolError(
                f"columns.{name} must hold one number for each of the {len(run.layers)} layers "
                f"that were registered, got {column.size}"
            )


def apart(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layer table with names that differ: two equal series would spoil the whole page."""
    seen: dict[str, int] = {}
    found: list[Layer] = []
    for layer in layers:
        times = seen[layer.name] = seen.get(layer.name, 0) + 1
        if times > 1:
            layer = msgspec.structs.replace(layer, name=f"{layer.name}#{times}")
        found.append(layer)
    return tuple(found)
