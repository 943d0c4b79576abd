"""Replay: take the recorded decisions away, compute them again, compare.

    report = replay("sentinel-runs/r7")                   the recorded policy: the same bytes?
    report = replay("sentinel-runs/r7", policy=stricter)  another one: what would it have decided?

With the recorded policy every recomputed decision must equal the recorded one byte for byte, and
the state carried along must equal the state at the start of each segment; the first differences
are listed with both decisions. With another policy the replay is open loop: the state moves by
what was really done and seen (the recorded outcomes and events), so it answers "what would this
policy have decided at each step of that run", not "how would the run have gone on".

A step whose columns were lost (dropped for space, damaged) cannot be recomputed: it and the steps
after it count as `unverified` until the next segment, which starts with the engine's state.

Errors:  TraceError for files that cannot be read at all or that another version wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sentinel.core import engine
from sentinel.core.errors import ProtocolError, TraceError
from sentinel.core.events import Event, Restored, RestoreFailed, SnapshotTaken
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION, Incident, State, Stats
from sentinel.core.types import Action, Decision
from sentinel.traces.reader import Chapter, Reader
from sentinel.traces.records import INDEX_BYTES, INDEX_DTYPE, Header, StepRecord
from sentinel.traces.segments import (
    LAYERS,
    SCALARS,
    Damage,
    Kind,
    beyond,
    list_segments,
    read_segment,
)
from sentinel.wire import codec

KEEP_DIFFERENCES = 1000


@dataclass(frozen=True, slots=True)
class Difference:
    """A step that was decided differently."""

    step: int
    attempt: int
    recorded: Decision
    recomputed: Decision


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found.

    Attributes:
        policy: name of the policy that was replayed; "" when no header could be read.
        same_policy: it is the recorded one, so that decisions must be equal.
        steps: steps recomputed.
        events: events noted.
        unverified: steps that could not be recomputed, see the module docstring.
        different: steps decided differently: by their bytes under the recorded policy; by action,
            rule or target under another one.
        missing: steps that are not in the trace: the disk failed, they are damaged, or they were
            dropped for space.
        excused: of these, the ones before the first step of an incarnation: what was dropped for
            space, and what a machine that died did not write.
        broken: damage that is no torn tail: something intact follows it, or another segment.
        differences: the first of them.
        state_mismatches: segments whose recorded state differs from the one carried along.
        engine_versions: of the engines that recorded the run.
        damage: what could not be read; the torn tail of a killed machine is here.
        recorded_with: versions and commit of the last incarnation, from its config.json.
        layers: names of the layer table, which incidents have indices into.
        incidents: as this replay ends with them: the open ones, and the newest resolved ones.
        targets: (step, target) of the rollbacks: at which they were decided, where they went to.
    """

    directory: Path
    run: str
    policy: str
    same_policy: bool
    incarnations: int
    segments: int
    steps: int
    events: int
    unverified: int
    different: int
    differences: tuple[Difference, ...]
    state_mismatches: int
    engine_versions: tuple[int, ...]
    damage: tuple[Damage, ...] = ()
    missing: int = 0
    excused: int = 0
    broken: tuple[Damage, ...] = ()
    recorded_with: str = ""
    incidents: tuple[Incident, ...] = ()
    targets: tuple[tuple[int, int], ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Everything that could be recomputed came out the same."""
        return self.different == 0 and self.state_mismatches == 0

    @property
    def complete(self) -> bool:
        """Nothing is missing but what was dropped for space and what a dying machine tore off."""
        return self.missing == self.excused and not self.broken

    @property
    def lost_bytes(self) -> int:
        """Bytes of the trace that could not be trusted."""
        return sum(damage.lost_bytes for damage in self.damage)


@dataclass
class _Replay:
    """The running totals of one replay."""

    reader: Reader
    wanted: Policy | None
    keep: int
    run: str = ""
    name: str = ""
    same: bool = True
    segments: int = 0
    steps: int = 0
    events: int = 0
    unverified: int = 0
    different: int = 0
    differences: list[Difference] = field(default_factory=list)
    state_mismatches: int = 0
    missing: int = 0
    excused: int = 0
    broken: dict[Path, Damage] = field(default_factory=dict)
    next_step: int | None = None
    place: Path | None = None
    layers: tuple[str, ...] = ()
    targets: dict[int, int] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    own_stats: dict[int, Stats] = field(default_factory=dict)

    def chapter(self, chapter: Chapter, state: State | None) -> State | None:
        """Replay one segment from `state`, or from its header; returns the state after it.

        None means that the state is not known any more.
        """
        header = chapter.header
        self.segments += 1
        fresh, self.place = chapter.incarnation != self.place, chapter.incarnation
        if header is None:
            self._damaged(chapter)
            return None
        self.versions.add(header.engine_version)
        self.run = self.run or header.run
        self.layers = _names(header.layers) or self.layers
        policy, same = self._policy(header, chapter)
        recorded = self._state(header, chapter)
        if state is None or not chapter.contiguous:
            state = recorded
            self.own_stats.clear()
        elif same and recorded is not None and codec.encode_state(state) != header.state:
            self.state_mismatches += 1
            state = recorded  # so that one difference does not count as thousands
        for item in self.reader.items(chapter):
            if not isinstance(item, StepRecord):
                state = self._event(item, state, policy, same)
                continue
            if self.next_step is not None:
                gap = max(item.step - self.next_step, 0)
                self.missing += gap
                if fresh:
                    self.excused += gap
            fresh = False
            self.next_step = item.step + 1
            if state is not None:
                state = self._step(item, state, policy, same)
            else:
                self.unverified += 1
        self._damaged(chapter)
        return state

    def _damaged(self, chapter: Chapter) -> None:
        """How many steps did damage cost that nothing read after it would tell of?"""
        segment = chapter.segment
        if segment.damage is None:
            return
        frames = beyond(segment)
        last = list_segments(chapter.incarnation, SCALARS)[-1][1]
        if frames or segment.path != last:
            self.broken[segment.path] = segment.damage
        steps = [_step_of(frame.payload) for frame in frames if frame.kind is Kind.STEP]
        for frame in frames:
            if frame.kind is Kind.INDEX and len(frame.payload) % INDEX_BYTES == 0:
                steps += np.frombuffer(frame.payload, INDEX_DTYPE)["step"][-1:].tolist()
        if steps:
            expected = min(steps) if self.next_step is None else self.next_step
            following = max(*steps, expected - 1) + 1
            self.missing += following - expected
            self.next_step = following

    def columns(self) -> None:
        """The layers stream: damage inside it is no torn tail either."""
        for damage in self.reader.damage:
            place = damage.path.parent
            stream = [path for _, path in list_segments(place, LAYERS)]
            if damage.path in stream and (
                damage.path != stream[-1] or beyond(read_segment(damage.path))
            ):
                self.broken[damage.path] = damage

    def _policy(self, header: Header, chapter: Chapter) -> tuple[Policy, bool]:
        try:
            if self.wanted is None:
                policy = codec.decode_policy(header.policy)
                same = True
            else:
                policy = self.wanted
                same = codec.encode_policy(policy) == header.policy
        except ProtocolError as error:
            raise _unreadable(chapter, header, error) from error
        self.name = policy.name
        self.same = self.same and same
        return policy, same

    def _state(self, header: Header, chapter: Chapter) -> State | None:
        if not header.state:
            return None  # a sidecar that only recorded
        try:
            return codec.decode_state(header.state)
        except ProtocolError as error:
            raise _unreadable(chapter, header, error) from error

    def _event(self, event: Event, state: State | None, policy: Policy, same: bool) -> State | None:
        if state is None:
            return None
        self.events += 1
        at = state.ledger.last_rollback
        if at is not None and at in self.targets:
            if isinstance(event, Restored):
                self.targets[at] = event.target  # an older one, when that one was damaged
            elif isinstance(event, RestoreFailed):
                del self.targets[at]
        if not same:
            # The statistics of that snapshot as this policy had them, not as the recorded one had.
            if isinstance(event, SnapshotTaken):
                if event.tier != "disk" or event.step not in self.own_stats:
                    self.own_stats[event.step] = state.stats
            elif isinstance(event, Restored) and event.target in self.own_stats:
                event = replace(event, stats=self.own_stats[event.target])
        state = engine.note(state, event, policy)
        if not same:
            kept = {snapshot.step for snapshot in state.ledger.snapshots}
            self.own_stats = {s: v for s, v in self.own_stats.items() if s in kept}
        return state

    def _step(self, record: StepRecord, state: State, policy: Policy, same: bool) -> State | None:
        observation = record.observation
        if state.step != record.step or (record.has_columns and not observation.columns):
            self.unverified += 1
            return None
        decision = engine.decide(state, observation, policy)
        self.steps += 1
        if decision.action is Action.ROLLBACK and decision.target is not None:
            self.targets[record.step] = decision.target
        if same:
            different = codec.encode_decision(decision) != record.decision_bytes
        else:
            before = record.decision
            different = (before.action, before.rule, before.target) != (
                decision.action,
                decision.rule,
                decision.target,
            )
        if different:
            self.different += 1
            if len(self.differences) < self.keep:
                self.differences.append(
                    Difference(record.step, record.attempt, record.decision, decision)
                )
        return engine.apply(state, observation, decision, record.outcome, policy)


def _step_of(payload: memoryview) -> int:
    return int.from_bytes(payload[:8], "little", signed=True)


def _unreadable(chapter: Chapter, header: Header, error: ProtocolError) -> TraceError:
    return TraceError(
        f"{chapter.segment.path} was recorded by engine version {header.engine_version}, this is "
        f"version {ENGINE_VERSION}: {error}; replay it with the version that recorded it"
    )


def replay(
    directory: Path | str, policy: Policy | None = None, *, keep: int = KEEP_DIFFERENCES
) -> ReplayReport:
    """Recompute every decision of a recorded run.

    Args:
        directory: a run's directory, or one incarnation's.
        policy: None for the recorded one.
        keep: at most this many differences are listed; all are counted.

    Raises:
        TraceError: nothing to read there, or another version wrote it.
    """
    reader = Reader(directory)
    run = _Replay(reader, policy, keep)
    if reader.directory not in reader.incarnations:
        run.next_step = 0  # the whole run: what is missing at its start counts too
    state: State | None = None
    incidents: tuple[Incident, ...] = ()
    for chapter in reader.chapters(columns=True):
        state = run.chapter(chapter, state)
        incidents = incidents if state is None else state.ledger.incidents
    run.columns()
    return ReplayReport(
        directory=reader.directory,
        run=run.run,
        policy=run.name,
        same_policy=run.same,
        incarnations=len(reader.incarnations),
        segments=run.segments,
        steps=run.steps,
        events=run.events,
        unverified=run.unverified,
        different=run.different,
        differences=tuple(run.differences),
        state_mismatches=run.state_mismatches,
        targets=tuple(sorted(run.targets.items())),
        engine_versions=tuple(sorted(run.versions)),
        damage=reader.damage,
        missing=run.missing,
        excused=run.excused,
        broken=tuple(run.broken[path] for path in sorted(run.broken)),
        recorded_with=_recorded_with(reader.configuration()),
        incidents=incidents,
        layers=run.layers,
    )


def _names(rows: list[Any]) -> tuple[str, ...]:
    """Of the layer table; it holds what the trainer registered."""
    return tuple(str(row.get("name", row) if isinstance(row, dict) else row) for row in rows)


def _recorded_with(config: Mapping[str, Any] | None) -> str:
    versions, code = ((config or {}).get(name) for name in ("versions", "code"))
    told = []
    if isinstance(versions, dict):
        told = [f"{n} {versions[n]}" for n in ("sentinel", "torch", "python") if n in versions]
    if isinstance(code, dict) and code.get("commit"):
        dirty = {"True": " with changes", "False": ""}.get(str(code.get("dirty")), "")
        told.append(f"commit {code['commit'][:12]}{dirty}")
    return ", ".join(told)
