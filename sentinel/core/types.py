"""The shared vocabulary: frozen values that every other module speaks in.

One training step in values: an `Observation` goes in, `engine.decide` answers a `Decision`,
the trainer carries it out and reports an `Outcome`; what happens between steps at the safe
point (a snapshot taken, a snapshot restored) is an `Event`. State moves on outcomes and
events, never on decisions: it knows what was done, not what was asked.

Units:   step [attempted optimizer steps, 0-based]; loss [nats/token]; norms are L2 over all
         parameters and ranks, before clipping; durations [s].
Shapes:  per-layer columns are float32 numpy arrays of shape [L], in the order of the layer table.
         A column, or any scalar, that was not measured is absent or None, never 0; a row of a
         column that was not measured (a layer without attention) is NOT_MEASURED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from sentinel.core.quick import quick

Column = npt.NDArray[np.float32]
NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})
NO_SCALARS: Mapping[str, float] = MappingProxyType({})

# Names of the per-layer columns (the keys of Observation.columns).
LAYER_GRAD_NORM = "layer_grad_norm"
LAYER_UPDATE_RATIO = "layer_update_ratio"
LAYER_WEIGHT_NORM = "layer_weight_norm"
LAYER_ATTENTION_MAX_LOGIT = "layer_attention_max_logit"
LAYER_ACTIVATION_RMS = "layer_activation_rms"
LAYER_ACTIVATION_ABSMAX = "layer_activation_absmax"
LAYER_ACTIVATION_SPREAD = "layer_activation_spread"
# The layer table as the engine needs it, told once: the block a layer lies in, and a number that
# layers of the same role in other blocks share; -1 for none.
LAYER_BLOCK = "layer_block"
LAYER_ROLE = "layer_role"

# A row without a measurement: the maximum of nothing. nan means measured, and no number.
NOT_MEASURED = -np.inf


class Action(IntEnum):
    """What the trainer shall do with this step; a larger value takes precedence."""

    PROCEED = 0
    SKIP_STEP = 1
    ROLLBACK = 2
    HALT = 3


class Mode(StrEnum):
    """Whether decisions are carried out, only noted, or not even made."""

    ACT = "act"
    OBSERVE = "observe"
    OFF = "off"


class Severity(StrEnum):
    """How loudly a finding speaks."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Status(StrEnum):
    """What a detector says of one step."""

    ABSENT = "absent"  # the signal was not measured
    WARMING_UP = "warming_up"
    NORMAL = "normal"
    SPIKE = "spike"  # far above its baseline, or outside its band
    NONFINITE = "nonfinite"


class Protection(StrEnum):
    """Whether the run is guarded: one word."""

    ARMED = "armed"
    WARMING = "warming"
    BLIND = "blind"  # nothing useful is measured
    OFF = "off"  # detached, broken, paused, or out of budget


class IncidentState(StrEnum):
    """Prometheus's words for an incident's life."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Verdict(StrEnum):
    """What the canary says of an incident."""

    NONE = "none"  # not asked yet
    DATA = "data"
    WEIGHTS = "weights"
    ACCEPTED = "accepted"  # data, and let through after the bound
    UNAVAILABLE = "unavailable"  # asked, but there was no canary to be had


class CommandKind(StrEnum):
    """What a person may ask for."""

    SKIP_NEXT = "skip_next"
    ROLLBACK = "rollback"
    PAUSE = "pause"
    RESUME = "resume"
    SCALE_LR = "scale_lr"
    HALT = "halt"
    ACK = "ack"


@dataclass(frozen=True, slots=True)
class Command:
    """One order of a person; idempotent by `id`.

    Attributes:
        value: SCALE_LR: the factor, in (0, 10]; other kinds ignore it.
        target: ROLLBACK: the snapshot step asked for, None for the newest healthy one;
            ACK: the number of the incident.
    """

    id: str
    kind: CommandKind
    value: float = 1.0
    target: int | None = None
    issued_by: str = ""


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """A quiet batch's loss, recorded at `step` and computed again now [nats]."""

    step: int
    recorded: float
    now: float


@quick
@dataclass(frozen=True, slots=True)
class Observation:
    """Everything measured at one step; immutable.

    Attributes:
        loss: mean training loss of the step over its micro-batches and all ranks.
        grad_norm: global L2 gradient norm before clipping.
        lr: the first parameter group's learning rate, as the user's schedule set it.
        params_finite: False when a check saw a non-finite parameter; None when not checked.
        shape: what defines the batch regime, for example (micro-batches, rows); a lasting
            change reopens the norm rule's warm-up.
        canary: the canary's answer, when `engine.wants_canary` asked for one and it was had.
        commands: people's orders that take effect at this step, in order of arrival.
        blind: measuring failed on some rank: nothing here may be trusted.
        batch_id: the user's name for this batch, for the incident report.
        columns: per-layer data, see the module docstring.
        scalars: further numbers by name, as in the metric catalogue; "name/label" where a metric
            has a label (memory_bytes/weights). Advice may depend on them, an action never does.
    """

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
    columns: Mapping[str, Column] = field(default_factory=lambda: NO_COLUMNS, compare=False)
    scalars: Mapping[str, float] = field(default_factory=lambda: NO_SCALARS, compare=False)


@quick
@dataclass(frozen=True, slots=True)
class Reading:
    """One detector's view of one step.

    Attributes:
        value: the signal as observed, in its own unit; may be nan or inf.
        baseline: what was expected, in the same unit; None while warming up.
        score: distance above the baseline [standard deviations], or the ratio to it where the
            detector's docstring says so.
    """

    status: Status
    value: float | None = None
    baseline: float | None = None
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A reading that matters.

    Attributes:
        key: stable name of the rule or flag, for example `grad_norm` or `attention_logit`.
        layers: indices into the layer table, most conspicuous first; empty for global findings.
    """

    key: str
    severity: Severity
    summary: str
    value: float | None = None
    layers: tuple[int, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class Readings:
    """The numbers behind a decision, for metrics, traces and reports.

    Attributes:
        spike_score: z of the loss above its predicted value [robust std]; nan when not judged.
        spike_level: 0 calm, 1 spike step (hot), 2 spike (persistent), 3 non-finite.
        loss_baseline: predicted loss [nats]; None while warming up.
        norm_baseline: mean of the accepted norms; None while the norm rule is not armed.
        norm_ratio: norm / baseline; None while not armed.
        drift: median of the last 32 ln-losses minus the lowest recent such median [ln nats].
        quiet: nothing hot, nothing skipped, no incident: this step may confirm a snapshot.
    """

    spike_score: float
    spike_level: int
    loss_baseline: float | None
    norm_status: Status
    norm_baseline: float | None
    norm_ratio: float | None
    drift: float
    quiet: bool
    protection: Protection


@quick
@dataclass(frozen=True, slots=True)
class Decision:
    """The engine's answer for one step: exactly one action, any findings, the reasons.

    Attributes:
        action: what the trainer shall do.
        rule: name of the rule that decided; "" for PROCEED.
        reason: one plain sentence for on-call; "" for PROCEED.
        would: what an acting policy would have done; differs from `action` only when observing.
        target: ROLLBACK: the step of the snapshot to restore; None: no usable one.
        lr_factor: multiply the learning rate of this step by it.
        keep_batch: this step is quiet: its batch may serve as a canary later.
        drop_canaries: the data changed lawfully: batches kept so far are no canaries any more.
        take_snapshot: take a candidate at the next safe point, if this step is applied.
        readings: the numbers behind it.
        memo: what decide() computed and apply() needs again; a cache, never sent or compared.
    """

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
    memo: Any = field(default=None, compare=False, repr=False)


class Source(StrEnum):
    """Who decided."""

    TRAINER = "trainer"
    SIDECAR = "sidecar"


@quick
@dataclass(frozen=True, slots=True)
class Outcome:
    """What the trainer did with the decision.

    Attributes:
        executed: the action carried out. ROLLBACK here means: this step was skipped and a
            restore is due at the next safe point, where `Restored` or `RestoreFailed` follows.
            PROCEED also when the scaler, not sentinel, dropped the step: see `applied`.
        applied: the optimizer really moved the parameters.
        source: whose decision was carried out.
    """

    step: int
    executed: Action
    applied: bool
    source: Source = Source.TRAINER
