"""What the records of a trace hold, and how they are laid out.

One `StepRecord` a step, `Event`s between them, one `Header` at the start of every segment. The
header of a scalars segment carries the whole engine state, so that replay can start there. A step
starts with a fixed index (step, loss, norm, ...) from which curves are drawn without decoding the
rest; the observation, decision and outcome follow as the wire's canonical bytes, so that "the same
decision" means the same bytes.

Units:   as in core.types; `gate_s`, `at` [s].
Errors:  decode_* raise TraceError: a record that passed its checksum and still makes no sense was
         written by another version.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.core.errors import ProtocolError, TraceError
from sentinel.core.types import NO_COLUMNS, Column, Decision, Observation, Outcome
from sentinel.wire import codec

FORMAT = 1

# step, attempt, present bits, executed action, loss, grad norm, lr, gate seconds, wall clock,
# bytes of the observation, bytes of the decision; the outcome is the rest.
_INDEX = struct.Struct("<qIBBdddddII")
# The part of it that curves are made of, for numpy, which reads a million of them at once.
INDEX_DTYPE = np.dtype(
    {
        "names": ["step", "attempt", "present", "executed", "loss", "grad_norm", "lr"],
        "formats": ["<i8", "<u4", "u1", "u1", "<f8", "<f8", "<f8"],
        "offsets": [0, 8, 12, 13, 14, 22, 30],
        "itemsize": 38,
    }
)
INDEX_BYTES = INDEX_DTYPE.itemsize
HAS_LOSS, HAS_NORM, _LR, _COLUMNS, _GATE, _AT = 1, 2, 4, 8, 16, 32
_PRESENT = {"loss": HAS_LOSS, "grad_norm": HAS_NORM, "lr": _LR}
EXECUTED_AT = 13  # offset of the executed action in a step record
UNKNOWN_ACTION = 255  # nobody said what was done at this step
_COLUMNS_KEY = struct.Struct("<qI")  # step, attempt


class Header(msgspec.Struct, kw_only=True, omit_defaults=True):
    """First record of a segment; unknown fields are ignored, an unknown format is refused.

    Attributes:
        number: of the segment within its stream.
        engine_version: of the engine whose decisions these are.
        policy: the policy's canonical bytes; scalars segments only.
        state: the engine's state before the first record; scalars segments only, and empty where
            the recorder (a sidecar that only records) does not know it.
        layers: the layer table, as the trainer registered it.
        after_gap: records before this segment were lost (the disk was full).
        at: wall clock when the segment was opened, if the recorder was given one.
        reports: spans [first, last] of the report numbers recorded before this segment; a
            sidecar's record only.
    """

    format: int
    stream: str
    number: int
    run: str
    incarnation: str
    engine_version: int
    policy: bytes = b""
    state: bytes = b""
    layers: list[Any] = []
    after_gap: bool = False
    at: float | None = None
    reports: list[tuple[int, int]] = []


class _Index(NamedTuple):
    """The fixed part of a step: enough for a curve."""

    step: int
    attempt: int
    present: int
    executed: int
    loss: float
    grad_norm: float
    lr: float
    gate_s: float
    at: float
    observation_bytes: int
    decision_bytes: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One recorded step.

    Attributes:
        observation: without its columns unless the reader was asked to join them.
        decision_bytes: as recorded; `decision` decodes them.
        has_columns: the step had per-layer columns.
        gate_s: how long the gate took, if it was measured.
        at: wall clock of the step, if it was given.
    """

    attempt: int
    observation: Observation
    decision_bytes: bytes
    outcome: Outcome
    has_columns: bool
    gate_s: float | None = None
    at: float | None = None

    @property
    def step(self) -> int:
        return self.observation.step

    @property
    def decision(self) -> Decision:
        """The recorded decision.

        Raises:
            TraceError: it was written by a version with other decisions.
        """
        try:
            return codec.decode_decision(self.decision_bytes)
        except ProtocolError as error:
            raise TraceError(f"decision of step {self.step} cannot be read: {error}") from error

    def with_columns(self, columns: Mapping[str, Column]) -> StepRecord:
        """The same record with its columns joined."""
        return replace(self, observation=replace(self.observation, columns=columns))


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_columns_encoder = msgspec.msgpack.Encoder()
_columns_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


def encode_header(header: Header) -> bytes:
    """Bytes of a header record."""
    return _header_encoder.encode(header)


def decode_header(payload: bytes | memoryview, where: str) -> Header:
    """A header record; `where` names the file in errors."""
    try:
        header = _header_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: the header cannot be read: {error}") from error
    if header.format != FORMAT:
        raise TraceError(
            f"{where} has trace format {header.format}, this sentinel reads format {FORMAT}; "
            "read it with the version that wrote it"
        )
    return header


def encode_step(
    observation: Observation,
    decision: Decision,
    outcome: Outcome,
    attempt: int,
    gate_s: float | None = None,
    at: float | None = None,
    *,
    has_columns: bool,
) -> bytes:
    """Bytes of a step record; columns are not in it."""
    return _step_bytes(
        observation,
        _encode_bare(observation),
        codec.encode_decision(decision),
        outcome,
        attempt,
        gate_s,
        at,
        has_columns,
    )


def encode_reported_step(
    bare: bytes,
    observation: codec.WireObservation,
    decision: bytes,
    outcome: Outcome,
    attempt: int,
    at: float | None,
) -> bytes:
    """The same from what came over the wire; `bare` is the observation without its columns."""
    return _step_bytes(
        observation, bare, decision, outcome, attempt, None, at, bool(observation.columns)
    )


def _step_bytes(
    observation: Observation | codec.WireObservation,
    bare: bytes,
    decided: bytes,
    outcome: Outcome,
    attempt: int,
    gate_s: float | None,
    at: float | None,
    has_columns: bool,
) -> bytes:
    loss, norm, lr = observation.loss, observation.grad_norm, observation.lr
    index = _INDEX.pack(
        observation.step,
        attempt,
        (loss is not None and HAS_LOSS)
        | (norm is not None and HAS_NORM)
        | (lr is not None and _LR)
        | (_COLUMNS if has_columns else 0)
        | (gate_s is not None and _GATE)
        | (at is not None and _AT),
        outcome.executed,
        0.0 if loss is None else loss,
        0.0 if norm is None else norm,
        0.0 if lr is None else lr,
        0.0 if gate_s is None else gate_s,
        0.0 if at is None else at,
        len(bare),
        len(decided),
    )
    return b"".join((index, bare, decided, codec.encode_outcome(outcome)))


def _encode_bare(observation: Observation) -> bytes:
    """Canonical bytes of the observation without its columns."""
    if not observation.columns:
        return codec.encode_observation(observation)
    o = observation
    bare: bytes = codec.encode(
        codec.WireObservation(
            o.step,
            o.loss,
            o.grad_norm,
            o.lr,
            o.loss_scale,
            o.params_finite,
            o.shape,
            o.canary,
            o.commands,
            o.blind,
            o.batch_id,
            scalars=dict(sorted(o.scalars.items())) if o.scalars else {},
        )
    )
    return bare


def index_bytes(payload: memoryview) -> memoryview:
    """What of a step record INDEX_DTYPE reads."""
    return payload[:INDEX_BYTES]


def measured(rows_N: npt.NDArray[np.void], name: str) -> npt.NDArray[np.float64]:
    """loss, grad_norm or lr of each step; nan where it was not measured."""
    values_N: npt.NDArray[np.float64] = np.where(
        (rows_N["present"] & _PRESENT[name]) != 0, rows_N[name], np.nan
    )
    return values_N


def decode_step(payload: memoryview, where: str) -> StepRecord:
    """A step record; `where` names the file in errors."""
    index = _Index._make(_INDEX.unpack_from(payload))
    start = _INDEX.size
    middle = start + index.observation_bytes
    end = middle + index.decision_bytes
    try:
        observation = codec.decode_observation(bytes(payload[start:middle]))
        outcome = codec.decode_outcome(bytes(payload[end:]))
    except ProtocolError as error:
        raise TraceError(f"{where}: step {index.step} cannot be read: {error}") from error
    return StepRecord(
        attempt=index.attempt,
        observation=observation,
        decision_bytes=bytes(payload[middle:end]),
        outcome=outcome,
        has_columns=bool(index.present & _COLUMNS),
        gate_s=index.gate_s if index.present & _GATE else None,
        at=index.at if index.present & _AT else None,
    )


def encode_columns(step: int, attempt: int, columns: Mapping[str, Column]) -> bytes:
    """Bytes of one step's columns, float32 little-endian."""
    return _COLUMNS_KEY.pack(step, attempt) + _columns_encoder.encode(
        {name: codec.column_bytes(column) for name, column in columns.items()}
    )


def encode_reported_columns(step: int, attempt: int, columns: Mapping[str, bytes]) -> bytes:
    """The same from columns that are bytes already."""
    return _COLUMNS_KEY.pack(step, attempt) + _columns_encoder.encode(columns)


def columns_key(payload: memoryview) -> tuple[int, int]:
    """(step, attempt) of a columns record."""
    step, attempt = _COLUMNS_KEY.unpack_from(payload)
    return step, attempt


def decode_columns(payload: memoryview, where: str) -> Mapping[str, Column]:
    """One step's columns; read-only arrays over the file's bytes."""
    try:
        raw = _columns_decoder.decode(payload[_COLUMNS_KEY.size :])
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: columns cannot be read: {error}") from error
    if not raw:
        return NO_COLUMNS
    return {name: codec.bytes_column(data, name) for name, data in raw.items()}
