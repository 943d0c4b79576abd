"""One run: who writes it, whether it lives, and the parts that hold the rest of what is known.

    run.mirror · run.figures · run.orders · run.kept · run.session     see the package's docstring
    run.heard(now, report=True), run.live(now, lost_after_s)

A run that registers anew is a new Run, which takes over what outlives a process.

Units:   times in Unix seconds; steps are attempted optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sentinel.core.exposition import WindowMax
from sentinel.core.policy import Policy
from sentinel.core.state import Incident, State
from sentinel.core.types import Decision, Observation
from sentinel.sidecar.runs.figures import Figures
from sentinel.sidecar.runs.mirror import Mirror
from sentinel.sidecar.runs.orders import Orders
from sentinel.sidecar.runs.session import Session
from sentinel.sidecar.store.record import Record, Seen
from sentinel.wire.codec import WireDecision
from sentinel.wire.messages import Layer, Reply

CADENCES = 10.0  # a run is lost after so many of its own usual intervals, if that is longer
ENDED = ("finished", "halted")


@dataclass(slots=True)
class Kept:
    """What is on disk of a writer, and what was answered last.

    Attributes:
        record: where its reports go; None: nobody writes it now.
        seen: the numbers of the reports that are on disk.
        theirs: what the trainer itself decided, of the newest frame.
        reply: the newest decision's, to be given again when it was lost on the way.
    """

    record: Record | None = None
    seen: Seen = field(default_factory=Seen)
    theirs: WireDecision | None = None
    reply: Reply | None = None


@dataclass(slots=True)
class Run:
    """See the module docstring.

    Attributes:
        max_layers: layers with series of their own.
        reason: why it is only recorded; "" when decided.
        session: of a trainer that speaks JSON; None: it has an engine.
        run_state: running, finished, halted or lost.
        last_report: when the newest frame came.
        last_heard: the newest sign of life: a long step or evaluation sends no frame.
        interval_s: usual time between two reports.
        said, said_why: by its trainer, of the protection since the newest decision; "": as decided.
        ended: when it was closed or lost.
        refused: incarnations of second writers that were refused.
        silenced: until when, by number and opening step of an incident.
        watched: an embedded run, seen in its folder: read-only.
        unread: from an earlier start: what is on disk of it was not looked at yet.
        recalled: its end was computed again from its record, as far as that goes.
        earlier: its newest step of an earlier start.
        saved_at: last_heard as the database has it.
        saved_incidents: those of its ledger as the database has them.
        settled: what its ledger does not know of is not open in the database.
        lines: the exporter's, laid out once.
        top: layers that the exporter shows.
    """

    name: str
    incarnation: str
    fence: int
    policy: Policy
    policy_bytes: bytes
    policy_hash: bytes
    engine_version: int
    layers: tuple[Layer, ...]
    info: dict[str, str]
    registered: float
    max_layers: int = 512
    reason: str = ""
    session: Session | None = None

    mirror: Mirror = field(default_factory=Mirror)
    figures: Figures = field(default_factory=Figures)
    orders: Orders = field(default_factory=Orders)
    kept: Kept = field(default_factory=Kept)

    run_state: str = "running"
    last_report: float = 0.0
    last_heard: float = 0.0
    interval_s: float | None = None
    said: str = ""
    said_why: str = ""
    ended: float | None = None
    refused: list[str] = field(default_factory=list)
    silenced: dict[tuple[int, int], float] = field(default_factory=dict)
    watched: bool = False
    unread: bool = False
    recalled: bool = False
    earlier: Observation | None = None
    saved_at: float = 0.0
    saved_incidents: tuple[Incident, ...] = ()
    settled: bool = False
    lines: dict[Any, str] = field(default_factory=dict)
    top: dict[str, npt.NDArray[np.intp]] = field(default_factory=dict)

    # What core.exposition.View asks for lies in the parts.

    @property
    def state(self) -> State | None:
        """The engine's, if it is known."""
        return self.mirror.state

    @property
    def observation(self) -> Observation | None:
        """The newest one."""
        return self.mirror.observation

    @property
    def decision(self) -> Decision | None:
        """The newest one."""
        return self.mirror.decision

    @property
    def gauges(self) -> Mapping[str, float]:
        """What the trainer measures besides, by metric name."""
        return self.figures.gauges

    @property
    def norm_max(self) -> WindowMax:
        """Of the gradient norm."""
        return self.figures.norm_max

    @property
    def score_max(self) -> WindowMax:
        """Of the spike score."""
        return self.figures.score_max

    @property
    def logit_max(self) -> WindowMax:
        """Of the attention logits."""
        return self.figures.logit_max

    @property
    def decides(self) -> bool:
        """Whether the sidecar may decide for this run."""
        return not self.reason

    def live(self, now: float, lost_after_s: float) -> bool:
        """Whether its process is to be taken for alive."""
        return self.run_state == "running" and now - self.last_heard <= self.patience(lost_after_s)

    def patience(self, lost_after_s: float) -> float:
        """How long it may be silent: a trainer without signs of life may have long steps."""
        return max(lost_after_s, CADENCES * (self.interval_s or 0.0))

    def not_after(self, now: float) -> bool:
        """It was heard now at the latest; True when a clock that was set back says otherwise."""
        later = max(self.last_heard, self.last_report) > now
        self.last_heard = min(self.last_heard, now)
        self.last_report = min(self.last_report, now)
        return later

    def heard(self, now: float, *, report: bool) -> None:
        """It said something just now."""
        if report:
            gap = max(now - self.last_report, 0.0)  # the clock may have been set back
            if self.interval_s is None:
                self.interval_s = gap
            else:  # a pause (evaluation, a checkpoint) moves it little
                self.interval_s += 0.1 * (min(gap, 10.0 * self.interval_s + 0.1) - self.interval_s)
            self.last_report = now
        self.last_heard = now
