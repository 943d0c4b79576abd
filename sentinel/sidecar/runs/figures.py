"""What a run has counted and measured, for readers: the exporter, the page, the lists.

    figures.step(row, observation, decision, now)       a live report; figures.late(row) a late one
    figures.carried_out(moves, decides=..., decision=...)
    figures.refused(raw) -> bool                        a report that makes no sense, counted once

Units:   `now` in Unix seconds, durations in monotonic seconds; steps are attempted optimizer steps.
Purity:  no clock, no I/O. Mutable, of one run; kept when the same process registers again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sentinel.core.catalog import DECISIONS_S
from sentinel.core.exposition import WindowMax
from sentinel.core.state import State
from sentinel.core.types import (
    LAYER_ATTENTION_MAX_LOGIT,
    Action,
    Column,
    Decision,
    Observation,
    Source,
)
from sentinel.sidecar.exemplars import Exemplars
from sentinel.wire.messages import Counts, Move, WireOutcome

RECENT = 256  # rows of the newest steps, for people; the series are on disk
MOST_REJECTED = 4096


@dataclass(slots=True)
class Histogram:
    """Prometheus's histogram of seconds."""

    bounds: tuple[float, ...] = DECISIONS_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Note one duration."""
        if not self.counts:
            self.counts = [0] * len(self.bounds)
        for at, bound in enumerate(self.bounds):
            if seconds <= bound:
                self.counts[at] += 1
                break
        self.total += seconds
        self.count += 1


@dataclass(frozen=True, slots=True)
class Row:
    """One step, for people."""

    seq: int
    step: int
    attempt: int
    loss: float | None
    grad_norm: float | None
    action: Action | None
    rule: str
    late: bool


@dataclass(slots=True)
class Figures:
    """See the module docstring.

    Attributes:
        decided: outcomes by who had decided them.
        own: steps skipped, by rule, of a run that is only recorded.
        counts: what the trainer itself counts.
        errors: errors of the sidecar's own, by where.
        unwritten: reports that no disk took.
        rejected: reports that made no sense.
        scalars: of the newest step with any.
    """

    columns: dict[str, Column] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    decided: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    late_reports: int = 0
    handovers: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    unwritten: int = 0
    rejected: int = 0
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=RECENT))
    duration: Histogram = field(default_factory=Histogram)
    exemplars: Exemplars = field(default_factory=Exemplars)
    norm_max: WindowMax = field(default_factory=WindowMax)
    score_max: WindowMax = field(default_factory=WindowMax)
    logit_max: WindowMax = field(default_factory=WindowMax)
    _rejects: set[int] = field(default_factory=set)  # hashes of the newest that made no sense

    @property
    def gauges(self) -> Mapping[str, float]:
        """What the trainer measures besides, by metric name: with its step, or by itself."""
        return self.scalars or self.counts.gauges

    def step(
        self, row: Row, observation: Observation, decision: Decision | None, now: float
    ) -> None:
        """Note a live report."""
        self.columns.update(observation.columns)
        self.norm_max.add(observation.grad_norm, now)
        if observation.scalars:
            self.scalars = observation.scalars
        logits = observation.columns.get(LAYER_ATTENTION_MAX_LOGIT)
        if logits is not None and logits.size:
            self.logit_max.add(logits.item(logits.argmax()), now)
        if decision is not None:
            self.score_max.add(decision.readings.spike_score, now)
        self.recent.append(row)

    def late(self, row: Row) -> None:
        """Note a late one."""
        self.late_reports += 1
        self.recent.append(row)

    def carried_out(
        self, moves: Iterable[Move], *, decides: bool, decision: Decision | None
    ) -> None:
        """Count whose decisions were carried out, and what an only recorded run did.

        Args:
            decision: the newest one, which the outcome among the moves is of.
        """
        for move in moves:
            if not isinstance(move, WireOutcome):
                continue
            self.decided[move.source] = self.decided.get(move.source, 0) + 1
            if not decides and move.executed is Action.SKIP_STEP:
                rule = "trainer" if decision is None else decision.rule
                self.own[rule] = self.own.get(rule, 0) + 1

    def all_decided_here(self, state: State) -> None:
        """Count whose decisions were carried out, of a trainer that has no engine to decide."""
        if state.ledger.counters.steps:
            self.decided = {Source.SIDECAR.value: state.ledger.counters.steps}

    def failed(self, where: str) -> None:
        """Count an error of the sidecar's own."""
        self.errors[where] = self.errors.get(where, 0) + 1

    def refused(self, raw: bytes) -> bool:
        """Count a report that makes no sense; False when its trainer brings it again."""
        key = hash(raw)
        if key in self._rejects:
            return False
        if len(self._rejects) >= MOST_REJECTED:
            self._rejects.clear()
        self._rejects.add(key)
        self.rejected += 1
        return True
