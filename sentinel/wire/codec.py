"""The codec: values to bytes and back, without losing a NaN.

    encode_state(state) -> bytes          decode_state(bytes) -> State, its inverse
    state_hash(state)   -> 16 bytes       the same on every machine that holds the same state
    encode_decision, encode_observation, encode_outcome, encode_event, encode_stats, encode_policy
    to_json(value) -> bytes               for people: non-finite numbers as "nan", "inf", "-inf"
    observation_from_json(bytes)          from people, and from trainers without msgpack

The bytes are msgpack and canonical: fields in the order of the dataclass, mappings sorted, so
equal values have equal bytes and a replay can be compared byte for byte. A decision's memo is a
cache and never leaves the process. JSON of other libraries turns NaN into null, which reads as
"not measured"; this module is the only place that writes non-finite numbers for people.

Shapes:  columns are float32 [L]; on the wire their raw little-endian bytes, NaN payloads kept.
Purity:  no clock, no I/O. Decoded columns are read-only views of the message.
Errors:  every decode raises ProtocolError that names what was being read.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import numpy as np

from sentinel.core.errors import ProtocolError
from sentinel.core.events import (
    AutomationSet,
    Event,
    Restored,
    RestoreFailed,
    SnapshotLost,
    SnapshotTaken,
)
from sentinel.core.policy import Policy
from sentinel.core.state import State, Stats
from sentinel.core.types import (
    NO_COLUMNS,
    NO_SCALARS,
    NOT_MEASURED,
    Action,
    CanaryAnswer,
    Column,
    Command,
    Decision,
    Finding,
    Observation,
    Outcome,
    Readings,
)
from sentinel.wire.sense import check_columns, check_numbers, decode_json

HASH_BYTES = 16
_LITTLE = sys.byteorder == "little"

T = TypeVar("T")


# ---- mirrors: the values that msgspec cannot carry as they are -----------------


class WireObservation(msgspec.Struct, omit_defaults=True, frozen=True):
    """An Observation with its columns as raw bytes; what was not measured is left out."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    params_finite: bool | None = None
    shape: tuple[int, ...] = ()
    canary: CanaryAnswer | None = None
    commands: tuple[Command, ...] = ()
    blind: bool = False
    batch_id: str = ""
    columns: dict[str, bytes] = {}
    scalars: dict[str, float] = {}


class WireDecision(msgspec.Struct, frozen=True):
    """A Decision without its memo."""

    step: int
    action: Action
    rule: str
    reason: str
    would: Action
    target: int | None
    lr_factor: float
    keep_batch: bool
    drop_canaries: bool
    take_snapshot: bool
    findings: tuple[Finding, ...]
    readings: Readings


class WireSnapshotTaken(msgspec.Struct, tag="snapshot_taken", frozen=True):
    """SnapshotTaken."""

    step: int
    tier: str = "ram"


class WireRestored(msgspec.Struct, tag="restored", frozen=True):
    """Restored, with the statistics that came back."""

    step: int
    target: int
    stats: Stats


class WireRestoreFailed(msgspec.Struct, tag="restore_failed", frozen=True):
    """RestoreFailed."""

    step: int
    target: int | None
    reason: str


class WireSnapshotLost(msgspec.Struct, tag="snapshot_lost", frozen=True):
    """SnapshotLost."""

    step: int
    target: int
    reason: str


class WireAutomationSet(msgspec.Struct, tag="automation_set", frozen=True):
    """AutomationSet."""

    step: int
    paused: bool
    by: str


WireEvent = (
    WireSnapshotTaken | WireRestored | WireRestoreFailed | WireSnapshotLost | WireAutomationSet
)

_EVENTS: tuple[tuple[type[Any], type[Any]], ...] = (
    (SnapshotTaken, WireSnapshotTaken),
    (Restored, WireRestored),
    (RestoreFailed, WireRestoreFailed),
    (SnapshotLost, WireSnapshotLost),
    (AutomationSet, WireAutomationSet),
)
_TO_WIRE = dict(_EVENTS)
_FROM_WIRE = {wire: core for core, wire in _EVENTS}
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind, _ in _EVENTS}
_DECISION_FIELDS = WireDecision.__struct_fields__


def _unknown(value: Any) -> Any:
    """msgspec's hook for types it does not know: numpy scalars and strings of another class."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)  # torch.__version__ is one of these
    raise TypeError(f"cannot encode {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_unknown)
encode: Any = _encoder.encode  # any message or value of this package, to msgpack
_state = msgspec.msgpack.Decoder(State)
_stats = msgspec.msgpack.Decoder(Stats)
_decision = msgspec.msgpack.Decoder(WireDecision)
_observation = msgspec.msgpack.Decoder(WireObservation)
_outcome = msgspec.msgpack.Decoder(Outcome)
_event = msgspec.msgpack.Decoder(WireEvent)
_policy = msgspec.msgpack.Decoder(Policy)


def decode_with(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    """`data` as the decoder's type.

    Raises:
        ProtocolError: `data` is not that; the message says what and where.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be read: {error} ({len(data)} bytes)") from error


def digest(data: bytes) -> bytes:
    """blake2b-128, the one hash of the protocol."""
    return blake2b(data, digest_size=HASH_BYTES).digest()


# ---- state ---------------------------------------------------------------------


def encode_state(state: State) -> bytes:
    """Canonical bytes of the engine's state."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> State:
    """Inverse of encode_state; raises ProtocolError."""
    return decode_with(_state, data, "engine state")


def state_hash(state: State) -> bytes:
    """blake2b-128 of the canonical state bytes: 16 bytes."""
    return blake2b(_encoder.encode(state), digest_size=HASH_BYTES).digest()


def encode_stats(stats: Stats) -> bytes:
    """Canonical bytes of the statistics alone, as kept with a snapshot."""
    return _encoder.encode(stats)


def decode_stats(data: bytes) -> Stats:
    """Inverse of encode_stats; raises ProtocolError."""
    return decode_with(_stats, data, "engine statistics")


# ---- policy --------------------------------------------------------------------


def encode_policy(policy: Policy) -> bytes:
    """Canonical bytes: a whole number given for a float setting is written as that float."""
    data = _encoder.encode(policy)
    return _encoder.encode(decode_with(_policy, data, f"policy {policy.name!r}"))


def decode_policy(data: bytes) -> Policy:
    """Inverse of encode_policy; raises ProtocolError, also for settings out of bounds."""
    return decode_with(_policy, data, "policy")


def policy_hash(policy: Policy) -> bytes:
    """blake2b-128 of the canonical policy bytes: 16 bytes."""
    return digest(encode_policy(policy))


# ---- decision ------------------------------------------------------------------


def wire_decision(decision: Decision) -> WireDecision:
    """The part of a decision that leaves the process."""
    return WireDecision(*[getattr(decision, name) for name in _DECISION_FIELDS])


def core_decision(wire: WireDecision) -> Decision:
    """Inverse of wire_decision; the memo stays empty."""
    return Decision(*[getattr(wire, name) for name in _DECISION_FIELDS])


def encode_decision(decision: Decision) -> bytes:
    """Canonical bytes, without the memo."""
    return _encoder.encode(wire_decision(decision))


def decode_decision(data: bytes) -> Decision:
    """Inverse of encode_decision; raises ProtocolError."""
    return core_decision(decode_with(_decision, data, "decision"))


# ---- observation ---------------------------------------------------------------


def column_bytes(column: Column) -> bytes:
    """A float32 column as raw little-endian bytes."""
    return np.ascontiguousarray(column, dtype="<f4").tobytes()


def bytes_column(data: bytes, name: str) -> Column:
    """Inverse of column_bytes: a read-only view where the machine is little-endian.

    Raises:
        ProtocolError: not a whole number of float32 values.
    """
    if len(data) % 4:
        raise ProtocolError(
            f"column {name!r} must be float32 values of 4 bytes each, got {len(data)} bytes"
        )
    if _LITTLE:  # twice as fast: six columns come with every step
        return np.frombuffer(data, np.float32)
    return np.frombuffer(data, "<f4").astype(np.float32)


def wire_observation(observation: Observation) -> WireObservation:
    """The observation with its columns as bytes, in the order of their names."""
    columns = observation.columns
    return WireObservation(
        observation.step,
        observation.loss,
        observation.grad_norm,
        observation.lr,
        observation.loss_scale,
        observation.params_finite,
        observation.shape,
        observation.canary,
        observation.commands,
        observation.blind,
        observation.batch_id,
        {name: column_bytes(columns[name]) for name in sorted(columns)} if columns else {},
        dict(sorted(observation.scalars.items())) if observation.scalars else {},
    )


def core_observation(wire: WireObservation) -> Observation:
    """Inverse of wire_observation; raises ProtocolError for a torn column."""
    columns = wire.columns
    return Observation(
        wire.step,
        wire.loss,
        wire.grad_norm,
        wire.lr,
        wire.loss_scale,
        wire.params_finite,
        wire.shape,
        wire.canary,
        wire.commands,
        wire.blind,
        wire.batch_id,
        {name: bytes_column(data, name) for name, data in columns.items()}
        if columns
        else NO_COLUMNS,
        wire.scalars or NO_SCALARS,
    )


def encode_observation(observation: Observation) -> bytes:
    """Canonical bytes; scalars that were not measured are left out."""
    return _encoder.encode(wire_observation(observation))


def decode_observation(data: bytes) -> Observation:
    """Inverse of encode_observation; raises ProtocolError."""
    return core_observation(decode_with(_observation, data, "observation"))


# ---- outcome and events --------------------------------------------------------


def encode_outcome(outcome: Outcome) -> bytes:
    """Canonical bytes of what the trainer did."""
    return _encoder.encode(outcome)


def decode_outcome(data: bytes) -> Outcome:
    """Inverse of encode_outcome; raises ProtocolError."""
    return decode_with(_outcome, data, "outcome")


def wire_event(event: Event) -> WireEvent:
    """The event with its kind written into it."""
    kind = type(event)
    wire: WireEvent = _TO_WIRE[kind](*[getattr(event, name) for name in _FIELDS[kind]])
    return wire


def core_event(wire: WireEvent) -> Event:
    """Inverse of wire_event."""
    kind = _FROM_WIRE[type(wire)]
    event: Event = kind(*[getattr(wire, name) for name in _FIELDS[kind]])
    return event


def encode_event(event: Event) -> bytes:
    """Canonical bytes of what happened between two steps."""
    return _encoder.encode(wire_event(event))


def decode_event(data: bytes) -> Event:
    """Inverse of encode_event; raises ProtocolError."""
    return core_event(decode_with(_event, data, "event"))


# ---- JSON for people -----------------------------------------------------------


def plain(value: Any) -> Any:
    """Dicts, lists, strings, finite numbers: what every JSON writer carries without loss.

    Enumerations become words, bytes hexadecimal digits, non-finite numbers "nan", "inf", "-inf".
    A decision's memo is left out.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.IntEnum):
        return value.name.lower()
    if isinstance(value, int | str):
        return str(value) if isinstance(value, enum.StrEnum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else _word(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (f.name for f in dataclasses.fields(value))
        return {name: plain(getattr(value, name)) for name in names if name != "memo"}
    return str(value)


def _word(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """JSON text of any value of this package, see `plain`."""
    return json.dumps(plain(value), indent=indent, allow_nan=False).encode()


class _JsonObservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    loss: float | str | None = None
    grad_norm: float | str | None = None
    lr: float | str | None = None
    loss_scale: float | str | None = None
    params_finite: bool | None = None
    shape: tuple[int, ...] = ()
    blind: bool = False
    batch_id: str = ""
    columns: dict[str, list[float | str | None]] = {}


def observation_from_json(data: bytes) -> Observation:
    """An observation that a person, or a trainer in another language, wrote as JSON.

    Numbers may be the strings "nan", "inf", "-inf"; null and a missing field mean: not measured.
    Commands and canaries cannot be given here.

    Raises:
        ProtocolError: not such an object, a field that there is not, or a number that nobody can
            have measured (wire.sense); the message names the field.
    """
    seen = decode_json(data, _JsonObservation, "observation")
    columns: dict[str, Column] = {}
    for name, values in seen.columns.items():
        numbers = [
            NOT_MEASURED if v is None else _number(v, f"columns.{name}[{at}]")
            for at, v in enumerate(values)
        ]
        with np.errstate(over="ignore"):  # what no float32 can hold is inf
            columns[name] = np.asarray(numbers, dtype=np.float64).astype(np.float32)
    check_columns(columns)
    found = Observation(
        seen.step,
        loss=_number(seen.loss, "loss"),
        grad_norm=_number(seen.grad_norm, "grad_norm"),
        lr=_number(seen.lr, "lr"),
        loss_scale=_number(seen.loss_scale, "loss_scale"),
        params_finite=seen.params_finite,
        shape=seen.shape,
        blind=seen.blind,
        batch_id=seen.batch_id,
        columns=columns or NO_COLUMNS,
    )
    check_numbers(found)
    return found


def _number(value: float | str | None, field: str) -> float | None:
    if value is None or isinstance(value, float):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ProtocolError(
        f'observation.{field} must be a number, null, "nan", "inf" or "-inf", got {value!r}'
    )
