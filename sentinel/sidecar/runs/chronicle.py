"""What became of a run, for the database, for those who listen, and for Grafana.

    chronicle.changed(run, "registered")       its state is written down and told
    chronicle.back(run), chronicle.lost(run, now), chronicle.ends(run, "finished", now)
    chronicle.decision(run, decision, attempt, source, now, live=True)
    chronicle.incidents(run, now)              those of its ledger that have changed
    chronicle.anew(old, name, now)             those that are open are over; next_incident(name)

Series are not written here, see recording.py. The database's queue never makes anybody wait.

Units:   `now` in Unix seconds; steps are attempted optimizer steps.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec

from sentinel.core.errors import SentinelError
from sentinel.core.types import Decision, IncidentState, Source
from sentinel.sidecar.hub import Hub
from sentinel.sidecar.marks import Marks
from sentinel.sidecar.runs.run import Run
from sentinel.sidecar.store import incidents as incidents_kept
from sentinel.sidecar.store.models import DecisionRow, RunRow
from sentinel.sidecar.store.store import Store

logger = logging.getLogger(__name__)

MOST_KEPT = 16  # second writers that are listed
ANEW = "closed: the run was begun anew"
UNKNOWN = "closed: the trainer that goes on does not know of it"


class Chronicle:
    """See the module docstring."""

    def __init__(self, store: Store, hub: Hub, marks: Marks) -> None:
        self._store = store
        self._hub = hub
        self._marks = marks
        self._numbers: dict[str, int] = {}  # the highest of an incident, by run

    # ---- its life ----------------------------------------------------------------

    def save(self, run: Run) -> None:
        """Write what is known of a run into the database."""
        self._store.save(
            RunRow(
                name=run.name,
                incarnation=run.incarnation,
                fence=run.fence,
                state=run.run_state,
                engine_version=run.engine_version,
                policy=run.policy_bytes,
                reason=run.reason,
                json=run.session is not None,
                session="" if run.session is None else run.session.id,
                layers=msgspec.to_builtins(run.layers),
                info=dict(run.info),
                refused=list(run.refused),
                registered_at=run.registered,
                heard_at=run.last_heard,
                ended_at=run.ended,
                last_step=None if run.observation is None else run.observation.step,
            )
        )

    def changed(self, run: Run, what: str = "") -> None:
        """Its state changed: write that down and tell; `what` where the state does not say it."""
        self.save(run)
        told = {"state": run.run_state, "what": what or run.run_state, "run": run.name}
        self._hub.publish("run", run.name, told | {"incarnation": run.incarnation})

    def back(self, run: Run) -> None:
        """It was heard; if it was lost, it is not any more."""
        if run.run_state == "lost":
            run.run_state, run.ended = "running", None
            logger.info("run is back run=%s", run.name)
            self.changed(run, "back")

    def lost(self, run: Run, now: float) -> None:
        """It has been silent for too long."""
        run.run_state, run.ended = "lost", now
        logger.warning("run lost run=%s silent_s=%.0f", run.name, now - run.last_heard)
        self.changed(run)

    def ends(self, run: Run, state: str, now: float) -> None:
        """It is over, and with it the orders that are still open."""
        run.run_state, run.ended = state, now
        logger.info("run closed run=%s state=%s", run.name, run.run_state)
        run.orders.end()
        self.changed(run)

    def refused(self, run: Run, incarnation: str, detail: str) -> None:
        """A second writer was refused."""
        run.refused = [*run.refused[1 - MOST_KEPT :], incarnation]
        told = {"incarnation": incarnation, "detail": detail}
        self._hub.publish("refused", run.name, told)
        self.save(run)
        logger.warning("second writer refused run=%s incarnation=%s", run.name, incarnation)

    # ---- what was done -----------------------------------------------------------

    def decision(
        self,
        run: Run,
        decision: Decision,
        attempt: int,
        source: Source,
        now: float,
        *,
        live: bool,
        found: bool = False,
    ) -> None:
        """Write an executed action down.

        Args:
            live: it is told to everybody, now.
            found: on disk, of the time before a restart: Grafana has not heard of it either.
        """
        row = {
            "step": decision.step,
            "attempt": attempt,
            "action": decision.action.name.lower(),
            "rule": decision.rule,
            "reason": decision.reason,
            "target": decision.target,
            "source": str(source),
            "at": now,
        }
        self._store.save_decision(
            DecisionRow(run=run.name, incarnation=run.incarnation, **row),
            mark=(live or found) and self._marks.wanted,
        )
        if live:
            self._hub.publish("decision", run.name, row)
            self._marks.decided(run.name, run.incarnation, row)

    def restored(
        self, run: Run, step: int, target: int | None, why: str = "", *, live: bool = True
    ) -> None:
        """How a rollback ended, before that step: its decision is told as what was done.

        Args:
            target: the snapshot that was restored; None: none was, `why` says the reason.
            live: it is told to everybody, now.
        """
        self._store.end_rollback(run.name, run.incarnation, step, target, why)
        if live:
            told = {"step": step, "target": target, "failed": why}
            self._hub.publish("restored", run.name, told)

    def undone(self, run: Run, step: int) -> None:
        """The action decided at that step was not carried out after all."""
        self._store.drop_decision(run.name, run.incarnation, step)

    def incidents(self, run: Run, now: float) -> None:
        """Write incidents that have changed."""
        state = run.mirror.state
        if state is None:
            return
        incidents, before = state.ledger.incidents, run.saved_incidents
        if not run.settled:
            run.settled = True
            known = {(i.number, i.opened) for i in incidents}
            incidents_kept.close(self._store.database, run.name, known, UNKNOWN, now)
        if incidents is before:
            return
        changed = [i for i in incidents if i not in before]
        for incident in changed:
            self._numbers[run.name] = max(self._numbers.get(run.name, 0), incident.number)
        run.saved_incidents = incidents
        if not changed:
            return
        self._store.save_incidents(run.name, changed, now)
        for incident in changed:
            self._hub.publish("incident", run.name, incident)

    def remember(self) -> None:
        """Learn the numbers that incidents of an earlier start have; waits for the database."""
        try:
            self._numbers = self._store.database.sync(incidents_kept.highest_numbers)
        except SentinelError as error:
            logger.error("numbers of earlier incidents cannot be read error=%s", error)

    async def catch_up(self) -> None:
        """The same, from a database that came late; raises StoreError."""
        earlier = await self._store.database.run(incidents_kept.highest_numbers)
        for run, number in earlier.items():
            self._numbers[run] = max(self._numbers.get(run, 0), number)

    def next_incident(self, run: str) -> int:
        """The number of its next incident, where the engine has none yet: none is given twice."""
        return self._numbers.get(run, 0) + 1

    def anew(self, old: Run | None, name: str, now: float) -> None:
        """A run begins anew: nobody looks after the incidents that are open any more."""
        if old is not None and old.mirror.state is not None:
            self.incidents(old, now)
            for incident in old.mirror.state.ledger.incidents:
                if incident.state is not IncidentState.RESOLVED:
                    over = replace(
                        incident,
                        state=IncidentState.RESOLVED,
                        resolved=incident.last,
                        summary=f"{incident.summary} ({ANEW})",
                    )
                    self._hub.publish("incident", name, over)
        incidents_kept.close(self._store.database, name, (), ANEW, now)
