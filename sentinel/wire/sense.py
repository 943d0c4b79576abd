"""What nobody can have measured: told apart from what a broken trainer really saw.

    check_numbers(seen)                      norms, rates and sizes of an observation
    check_columns(columns)                   per-layer columns as float32 arrays
    check_column_bytes(columns)              the same as they travel; fast, for every step
    decode_json(data, kind, "command")       a person's JSON, strictly: no field that there is not

NaN and inf are truth: a run that goes wrong is what this is for. A loss may be of any sign. But a
norm, a rate or a size below 0 is a mistake of whoever reports, and statistics that had accepted it
would be wrong for as long as their windows are: it is refused, with the field, before anything is
recorded. In a column -inf stands for a row that was not measured.

Frames between versions stay open: an unknown field there is ignored, see wire.messages. People's
JSON is strict, since a field with a slip of the pen in its name would silently count as not
measured.

Purity:  no clock, no I/O.
Errors:  ProtocolError, which names the field, the bound, the value and the way out.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from sentinel.core.errors import ProtocolError
from sentinel.core.types import (
    LAYER_ACTIVATION_ABSMAX,
    LAYER_ACTIVATION_RMS,
    LAYER_GRAD_NORM,
    LAYER_UPDATE_RATIO,
    LAYER_WEIGHT_NORM,
    NOT_MEASURED,
    Column,
)

NORMS = frozenset(
    (
        LAYER_GRAD_NORM,
        LAYER_UPDATE_RATIO,
        LAYER_WEIGHT_NORM,
        LAYER_ACTIVATION_RMS,
        LAYER_ACTIVATION_ABSMAX,
    )
)
SIZES = ("memory_bytes", "tokens_per_second", "clipped_step_ratio")  # scalars, before any "/"
MOST_SCALARS = 1024
MOST_COLUMNS = 64
MOST_NAME = 128
MOST_DIMENSIONS = 16
MOST_BATCH_ID = 1024
MOST_SIZE = 2**63

T = TypeVar("T")


class Seen(Protocol):
    """What WireObservation and Observation have in common."""

    @property
    def grad_norm(self) -> float | None: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def loss_scale(self) -> float | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def batch_id(self) -> str: ...
    @property
    def scalars(self) -> Mapping[str, float]: ...


def check_numbers(seen: Seen) -> None:
    """Raise ProtocolError for a norm, a rate or a size that is none."""
    value = seen.grad_norm
    if value is not None and value < 0.0:
        raise _negative("grad_norm", value)
    value = seen.lr
    if value is not None and value < 0.0:
        raise _negative("lr", value)
    value = seen.loss_scale
    if value is not None and value < 0.0:
        raise _negative("loss_scale", value)
    if seen.shape:
        _check_shape(seen.shape)
    if len(seen.batch_id) > MOST_BATCH_ID:
        raise ProtocolError(
            f"observation.batch_id must have at most {MOST_BATCH_ID} characters, got "
            f"{len(seen.batch_id)}"
        )
    if seen.scalars:
        _check_scalars(seen.scalars)


def check_column_bytes(columns: Mapping[str, bytes]) -> None:
    """Raise ProtocolError for a norm below 0; all columns are looked at together."""
    if len(columns) > MOST_COLUMNS:
        raise ProtocolError(
            f"observation.columns may be {MOST_COLUMNS} columns, got {len(columns)}"
        )
    norms = b"".join([data for name, data in columns.items() if name in NORMS])
    signs = np.frombuffer(norms, "<i4")  # a float below 0 is an integer below 0, bit by bit
    if not norms or signs.item(signs.argmin()) >= 0:
        return  # the usual column; argmin takes a fifth of what any() and min() do
    values = signs.view("<f4")
    if bool(((values < 0.0) & (values != NOT_MEASURED)).any()):
        check_columns({name: np.frombuffer(data, "<f4") for name, data in columns.items()})


def check_columns(columns: Mapping[str, Column]) -> None:
    """Raise ProtocolError that names the row of a norm below 0."""
    if len(columns) > MOST_COLUMNS:
        raise ProtocolError(
            f"observation.columns may be {MOST_COLUMNS} columns, got {len(columns)}"
        )
    for name, column in columns.items():
        if name not in NORMS:
            continue
        wrong = np.flatnonzero((column < 0.0) & (column != NOT_MEASURED))
        if len(wrong):
            at = int(wrong[0])
            raise _negative(f"columns.{name}[{at}]", float(column[at]))


def _negative(field: str, value: float) -> ProtocolError:
    return ProtocolError(
        f"observation.{field} must be 0 or more, NaN or inf, got {value:g}; leave it out where it "
        "was not measured"
    )


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) > MOST_DIMENSIONS:
        raise ProtocolError(f"observation.shape may have {MOST_DIMENSIONS} sizes, got {len(shape)}")
    for at, size in enumerate(shape):
        if not 0 <= size < MOST_SIZE:
            raise ProtocolError(
                f"observation.shape[{at}] must be a size from 0 on, below 2**63, got {size}"
            )


def _check_scalars(scalars: Mapping[str, float]) -> None:
    if len(scalars) > MOST_SCALARS:
        raise ProtocolError(
            f"observation.scalars may be {MOST_SCALARS} numbers, got {len(scalars)}"
        )
    for name, value in scalars.items():
        if len(name) > MOST_NAME:
            raise ProtocolError(
                f"a name in observation.scalars must have at most {MOST_NAME} characters, got "
                f"{name[:32]!r}..."
            )
        if value < 0.0 and name.partition("/")[0] in SIZES:
            raise _negative(f"scalars[{name!r}]", value)


# ---- a person's JSON -----------------------------------------------------------------------

_UNKNOWN = re.compile(r"unknown field `(?P<field>.*?)`(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_NO_JSON = re.compile(rb"[:,\[]\s*[-+]?(?:NaN|Infinity|nan|inf)\b")


def decode_json(data: bytes, kind: type[T], what: str) -> T:
    """`data` as that type; structs that forbid unknown fields say which it was, and what there is.

    Raises:
        ProtocolError: it is not that; `what` says what was being read.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be read: {_told(error, data, kind)}") from error


def _told(error: Exception, data: bytes, kind: Any) -> str:
    said = str(error)
    if not data:
        return "there is no body"
    unknown = _UNKNOWN.search(said)
    if unknown is not None:
        field, path = unknown["field"], unknown["path"] or ""
        names = _fields(kind, path)
        near = difflib.get_close_matches(field, names, 1, 0.6)
        where = f" in {path.lstrip('.')}" if path else ""
        told = f"there is no field {field[:64]!r}{where}"
        if near:
            return f"{told}; did you mean {near[0]!r}?"
        return f"{told}; there are: {', '.join(names)}" if names else told
    if isinstance(error, msgspec.DecodeError) and _NO_JSON.search(data):
        return f'{said}; NaN and Infinity are no JSON: write "nan", "inf" or "-inf", in quotes'
    return said


def _fields(kind: Any, path: str) -> list[str]:
    """The fields of the struct at a path of msgspec's, such as `.events[...]`."""
    found = _struct(kind)
    for name in re.findall(r"\.(\w+)", path):
        if found is None:
            return []
        found = _struct(
            next((f.type for f in msgspec.structs.fields(found) if f.encode_name == name), None)
        )
    return [] if found is None else [f.encode_name for f in msgspec.structs.fields(found)]


def _struct(kind: Any) -> Any:
    """The first struct within a type, None without one."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    for part in typing.get_args(kind):
        found = _struct(part)
        if found is not None:
            return found
    return None
