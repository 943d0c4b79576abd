"""What happens by the clock: lost runs, saving, retention, layer maps, watched folders, Grafana.

    async with running(service): ...       inside the application's lifespan

The rules are not here: they run on arrival. APScheduler only wakes these jobs; each ends its own
errors, counted in `service.health.job_errors`, and is tried again at its next turn. What touches
disks runs in a thread.

Shutdown: no new turn is begun, those in flight are awaited for DRAIN_S, then the store is closed.
Units:    seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from functools import partial

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy.orm import Session

from sentinel.sidecar.security import Caller
from sentinel.sidecar.service import Service
from sentinel.sidecar.store import retention
from sentinel.sidecar.verify import Result

logger = logging.getLogger(__name__)

EXPIRE_S = 5.0
SAVE_S = 10.0
RETENTION_S = 300.0
MAPS_S = 60.0
WATCH_S = 3.0
TOKENS_S = 1.0
MARKS_S = 30.0
VERIFY_S = 30.0
RESUMED_S = 7 * 86_400.0  # a run that was lost or halted may still be resumed from its snapshots
LAG_S = 0.25
LET_GO_S = 3600.0
DRAIN_S = 5.0
BITE_S = 0.01  # between two bites of a long work in the database
DAY_S = 86_400.0

SIDECAR = Caller("sidecar", frozenset())

Job = Callable[[], Awaitable[None]]


class Jobs:
    """The jobs of one sidecar."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._flying: set[asyncio.Task[None]] = set()
        self._reading = asyncio.Lock()
        self._draining = False
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        lost = service.settings.lost_after_s
        self._add(self.expire, min(EXPIRE_S, lost / 4))
        self._add(self.save, SAVE_S)
        self._add(self.retain, RETENTION_S)
        self._add(self.maps, MAPS_S)
        if service.settings.watch:
            self._add(self.watch, WATCH_S)
        if service.verifier is not None:
            self._add(self.verify, VERIFY_S)
        grafana = service.settings.grafana
        if grafana is not None:
            self._add(self.marks, MARKS_S)
            if grafana.keeper is not None:
                self._add(self.grafana, grafana.every_s)
        if service.settings.token_files:
            self._add(self.tokens, TOKENS_S)
            service.reread = self._reread
        self._lag: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on."""
        self._scheduler.start()
        self._begin(self.retain)  # not awaited: it looks at every file there is
        if self._service.verifier is not None:
            self._begin(self.verify)
        if self._service.settings.grafana is not None:
            self._begin(self.marks)
            self._begin(self.grafana)
        self._lag = asyncio.create_task(self._measure_lag())

    async def drain(self) -> None:
        """Begin nothing new, and wait for what runs."""
        self._draining = True
        self._scheduler.pause()
        if self._lag is not None:
            self._lag.cancel()
            with suppress(asyncio.CancelledError):
                await self._lag
        if self._flying:
            await asyncio.wait(self._flying, timeout=DRAIN_S)
        self._scheduler.shutdown(wait=False)

    def _add(self, job: Job, seconds: float) -> None:
        async def turn() -> None:
            await self._begin(job)

        self._scheduler.add_job(
            turn, "interval", seconds=seconds, coalesce=True, max_instances=1, id=job.__name__
        )

    def _reread(self) -> None:
        self._begin(self.tokens)

    def _begin(self, job: Job) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._guarded(job))
        self._flying.add(task)
        task.add_done_callback(self._flying.discard)
        return task

    async def _guarded(self, job: Job) -> None:
        try:
            await job()
        except Exception:
            errors = self._service.health.job_errors
            errors[job.__name__] = errors.get(job.__name__, 0) + 1
            logger.exception("a job failed job=%s", job.__name__)

    # ---- the jobs ------------------------------------------------------------------------

    async def expire(self) -> None:
        """Runs that are silent are lost; orders that nobody fetched expire."""
        self._service.runs.expire(self._service.now())

    async def save(self) -> None:
        """What runs have said since the last turn goes into the database, and so shows its health.

        A restarted sidecar then knows when it heard of each.
        """
        heard = []
        for run in self._service.runs.runs.values():
            if run.run_state == "running" and run.last_heard != run.saved_at:
                run.saved_at = run.last_heard
                last_step = None if run.observation is None else run.observation.step
                heard.append((run.name, run.last_heard, last_step))
        store = self._service.store
        store.save_heard(heard)
        for name in store.take_rowless():
            unknown = self._service.runs.runs.get(name)
            if unknown is not None:
                logger.warning("a run had no row in the database, it is written again run=%s", name)
                self._service.runs.save(unknown)
        store.probe()
        await self._service.catch_up()

    async def retain(self) -> None:
        """Old series make room; so do those of runs that are over, when there is too much.

        A run's rows in the database go when its retention is over, whenever its series went.
        """
        service, store = self._service, self._service.store
        settings, now = service.settings, service.now()
        for run in service.runs.runs.values():
            if run.run_state != "lost" or run.ended is None or run.kept.record is None:
                continue
            if now - run.ended > LET_GO_S:
                service.runs.let_go(run)
        over = sorted(
            [
                (run.ended or run.last_heard, run.name)
                for run in service.runs.runs.values()
                if run.run_state != "running" and run.kept.record is None
            ]
            + [(at, name) for name, at in service.runs.stored.items()]
        )
        sizes = await asyncio.to_thread(store.sizes)
        total = sum(sizes.values())
        for ended, name in over:
            old = now - ended > settings.retention_days * DAY_S
            if not old and total <= settings.max_store_bytes:
                continue
            freed = await asyncio.to_thread(store.forget, name)
            total -= freed
            service.runs.forget(name)
            why = "its retention is over" if old else "the store is full"
            logger.info("series deleted run=%s why=%s freed_bytes=%s", name, why, freed)
        store.bytes = total
        limit = store.run_limit()
        for record in store.records.values():
            record.limit(limit)
        if store.database.opened:
            await self._forget_rows(now)

    async def _forget_rows(self, now: float) -> None:
        """What the database holds of runs that are over for long; in bites, so that writes pass."""
        service, database = self._service, self._service.store.database
        cutoff = now - service.settings.retention_days * DAY_S
        deleted = 0
        for name in await database.run(lambda session: retention.over(session, cutoff)):
            if name in service.runs.runs or name in service.runs.stored:
                continue  # in use, or its series are still there
            rows = await self._bites(partial(retention.forget, run=name, cutoff=cutoff))
            if rows:
                service.runs.parked.pop(name, None)
                logger.info("rows deleted run=%s rows=%s why=its retention is over", name, rows)
            deleted += rows
        audited = now - service.settings.audit_days * DAY_S
        lines = await self._bites(partial(retention.forget_audit, cutoff=audited))
        if lines:
            logger.info("audit lines deleted lines=%s why=their retention is over", lines)
        if deleted + lines:
            await self._bites(retention.shrink)

    async def _bites(self, bite: Callable[[Session], int]) -> int:
        """Until there is nothing left to do; returns the sum."""
        total = 0
        while not self._draining:
            done = await self._service.store.database.run(bite)
            if done <= 0:
                break
            total += done
            await asyncio.sleep(BITE_S)
        return total

    async def maps(self) -> None:
        """Maxima of closed layer segments, so that a long run's map opens at once."""
        store = self._service.store
        for name in list(store.records):
            await asyncio.to_thread(store.series.prepare, store.run_directory(name))

    async def tokens(self) -> None:
        """Read the token files again; what is not in them any more opens nothing from now on."""
        service, files = self._service, self._service.tokens
        before = files.trouble
        async with self._reading:  # what was read first is taken first
            changed = files.take(await asyncio.to_thread(files.read))
        if files.trouble and files.trouble != before:
            logger.error(
                "the tokens of before stay in use: %s; mend the file, or put the old one back",
                files.trouble,
            )
            service.people.audit(
                "tokens", SIDECAR, outcome="refused", detail={"why": files.trouble[:500]}
            )
        elif before and not files.trouble:
            logger.warning("the token files are sound again")
        if changed is None:
            return
        told = {"added": list(changed.added), "removed": list(changed.removed)}
        logger.warning("tokens changed added=%s removed=%s", *told.values())
        service.people.audit("tokens", SIDECAR, outcome="accepted", detail=told)
        if changed.removed:
            # A stream was let in once and may go on for days: everybody has to come in again.
            service.hub.dismiss()

    async def marks(self) -> None:
        """Marks that Grafana has not got: of an earlier start, or those there was no room for."""
        await self._service.runs.marks.bring()

    async def grafana(self) -> None:
        """See that Grafana holds what it should; in a thread of the keeper's own."""
        grafana = self._service.settings.grafana
        if grafana is not None and grafana.keeper is not None:
            grafana.keeper.begin()

    async def watch(self) -> None:
        """Look at the folders of embedded runs."""
        await self._service.watched.look(self._service.now())

    async def verify(self) -> None:
        """Have snapshots read again that are due, and tell of those that are damaged."""
        service, verifier = self._service, self._service.verifier
        if verifier is None:
            return
        for checked in verifier.news():
            if not checked.changed:
                continue
            told = {
                "name": checked.name,
                "step": checked.step,
                "result": str(checked.result),
                "reason": checked.reason,
            }
            log = logger.error if checked.result is Result.DAMAGED else logger.warning
            log(
                "a snapshot on disk is %s run=%s name=%s why=%s",
                checked.result,
                checked.run,
                checked.name,
                checked.reason or "it was read again",
            )
            service.hub.publish("snapshot", checked.run, told)
            service.people.audit(
                "snapshot", SIDECAR, outcome=str(checked.result), run=checked.run, detail=told
            )
        now = service.now()
        verifier.begin(
            {
                run.name: service.seen_at(run.name)
                for run in service.all_runs()
                if run.ended is None
                or now - run.ended <= (DAY_S if run.run_state == "finished" else RESUMED_S)
            }
        )

    async def _measure_lag(self) -> None:
        timer, health = self._service.timer, self._service.health
        while True:
            before = timer()
            await asyncio.sleep(LAG_S)
            health.lag.add(max(timer() - before - LAG_S, 0.0), self._service.now())


@asynccontextmanager
async def running(service: Service) -> AsyncGenerator[None]:
    """The jobs run inside; the service is ready inside, and closed after."""
    jobs = Jobs(service)
    if service.settings.watch:
        await jobs.watch()
    jobs.start()
    service.ready = True
    try:
        yield
    finally:
        service.ready = False
        await jobs.drain()
        await asyncio.to_thread(service.close)
