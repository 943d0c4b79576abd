"""A trainer under watch: from attach(trainer) on, through every train() of it, until detach().

    session = sentinel.attach(trainer)        -> TrainerSession; returns at once
    trainer.train()                           a real Session lives from its start to its end
    session.session                           that Session (the last one, after the end); else None

A framework makes model, optimizer and scaler ready only when training starts, so nothing can be
hooked before. Until then protection is off and says what it waits for. Training that ends detaches;
a second train() attaches again, as the same run where an id was given, else as a new one.

An `Adapter` knows one kind of trainer: it hears of the start, the safe points and the end, and
tells them to the TrainerSession by begin(), safe_point(), saved() and end(). docs/adapters.md shows
how to write one.

Errors:  what can be checked is checked in attach(). Later, nothing of ours ends the training: a
         begin() that fails is logged, and protection stays off and says why. The one exception is
         a run that was halted and that nobody has cleared (StillHalted).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import IncidentState, Protection
from sentinel_hooks.errors import AttachError, StillHalted
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.link import LinkStatus
from sentinel_hooks.seams.patch import Patch, Stand
from sentinel_hooks.seams.safe_point import INERT
from sentinel_hooks.session import Session
from sentinel_hooks.snapshots import unhealthy
from sentinel_hooks.status import BlindSpot, Status

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])
_watched: weakref.WeakValueDictionary[int, TrainerSession] = weakref.WeakValueDictionary()


class Adapter(Protocol):
    """Knows one kind of trainer.

    Attributes:
        name: for people: "HF Trainer".
        waits_for: the call that starts training: "trainer.train()".
    """

    name: str
    waits_for: str

    def accepts(self, trainer: Any) -> bool:
        """It is one of mine. Must not import the framework: the user may not have it."""
        ...

    def watch(self, trainer: Any, session: TrainerSession) -> Callable[[], None]:
        """Hook into `trainer`, so that `session` hears of it; returns what unhooks again."""
        ...


def is_a(thing: Any, module: str, name: str) -> bool:
    """`thing` is an object of the class `name` defined in `module` or below, or of a subclass.

    Looks at names only, so that nothing is imported: isinstance() for a class one does not have.
    """
    return any(
        kind.__name__ == name and f"{kind.__module__}.".startswith(f"{module}.")
        for kind in type(thing).__mro__
    )


def watched(trainer: Any) -> TrainerSession | None:
    """Who watches `trainer` already."""
    found = _watched.get(id(trainer))
    if found is None or found.detached or found.trainer is not trainer:
        return None
    return found


class TrainerSession:
    """What attach(trainer) returns: the face of a Session, before, during and after training."""

    def __init__(
        self,
        trainer: Any,
        adapter: Adapter,
        begin: Callable[..., Session],
        *,
        policy: Policy,
        run_dir: Path,
        run_id: str,
        loss_fn: Any = None,
        adopts: bool = False,
    ) -> None:
        """Use attach().

        Args:
            begin: attach() for the objects, all options but the objects given.
            policy: the one in force until a Session knows better.
            run_id: the one that was given, "" for none.
            adopts: the trainer's own checkpoints are the disk tier.
        """
        self._adapter = adapter
        self._begin = begin
        self._policy = policy
        self._run_dir = run_dir
        self._given_id = run_id
        self._loss_fn = loss_fn
        self._adopts = adopts
        self._guard = Guard(run_id or "(not begun)")
        self._session: Session | None = None
        self._why = ""  # the last begin() failed
        self._spots: list[BlindSpot] = []
        self._detached = False
        self._trainer = _weak(trainer)
        self._unhook: Callable[[], None] | None = None
        self._attaching = True  # errors are the caller's
        self._unhook = adapter.watch(trainer, self)
        self._attaching = False
        _watched[id(trainer)] = self

    # ---------------------------------------------------------------- for the user

    def __enter__(self) -> TrainerSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with whatever holds it, it is None: no other process has these hooks."""
        return type(None), ()

    def __copy__(self) -> TrainerSession:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerSession:
        return self

    @property
    def trainer(self) -> Any:
        """The one that is watched; None once it is gone."""
        return self._trainer()

    @property
    def session(self) -> Session | None:
        """The Session of the training that runs, or that ran last; None before the first."""
        return self._session

    @property
    def detached(self) -> bool:
        """Nothing of ours is in the trainer any more."""
        return self._detached

    @property
    def run_id(self) -> str:
        """Names the run; "" before training starts, where none was given."""
        return self._session.run_id if self._session is not None else self._given_id

    @property
    def run_dir(self) -> Path:
        """Where runs are written."""
        return self._run_dir

    @property
    def directory(self) -> Path:
        """Where this run is written."""
        return self._session.directory if self._session is not None else self._run_dir / self.run_id

    @property
    def policy(self) -> Policy:
        """The one in force."""
        return self._session.policy if self._session is not None else self._policy

    @property
    def layers(self) -> LayerTable:
        """The layer table; empty before training starts."""
        return self._session.layers if self._session is not None else LayerTable(())

    @property
    def state(self) -> State:
        """The engine's state, with the last step settled."""
        return self._session.state if self._session is not None else engine.initial()

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """`loss_fn(*args, **kwargs)`, remembered so that the canary can ask the same again.

        Raises:
            AttachError: attach() was given no function as loss_fn.
        """
        session = self._session
        if session is not None and not session.detached and self._loss_fn is not None:
            return session.loss(*args, **kwargs)
        if self._loss_fn is None or not callable(self._loss_fn):
            raise AttachError(
                "session.loss(...) calls the function given as attach(loss_fn=...), and none was "
                "given; pass the function that computes the loss from a batch"
            )
        return self._loss_fn(*args, **kwargs)

    def status(self) -> Status:
        """How the run and its protection are doing; moves nothing of the run."""
        session = self._session
        if session is not None:
            status = session.status()
            if session.detached and not self._detached:
                why = f"training has ended; waiting for {self._adapter.waits_for}"
                status = dataclasses.replace(status, why=why, canary="no training runs")
        else:
            if self._detached:
                why = "detached"
            elif self._why:
                why = self._why
            elif "adapter" in self._guard.counts:
                why = f"the adapter for {self._adapter.name} failed: {self._guard.last}"
            else:
                why = f"waiting for {self._adapter.waits_for}"
            ledger = engine.initial().ledger
            status = Status(
                run_id=self.run_id,
                step=0,
                mode=self._policy.mode,
                policy=self._policy.name,
                protection=Protection.OFF,
                why=why,
                blind_spots=(),
                canary="no step seen yet",
                candidate=None,
                healthy=(),
                snapshot_bytes=0,
                counters=ledger.counters,
                link=LinkStatus(),
            )
        return dataclasses.replace(
            status,
            blind_spots=(*status.blind_spots, *self._spots),
            internal_errors={**self._guard.counts, **status.internal_errors},
        )

    def checkpointed(self, path: str | os.PathLike[str]) -> None:
        """Say that a checkpoint of your own, of this moment between two steps, lies at `path`.

        HF, Lightning and accelerate checkpoints are told by their adapters.

        Raises:
            AttachError: attach() was given no function that could load it, or nothing trains.
        """
        if self._session is None or self._session.detached:
            raise AttachError(
                f"session.checkpointed(path) is for checkpoints of a running training, and "
                f"{self._adapter.waits_for} has not started or has ended; call it in the loop"
            )
        self._session.checkpointed(path)

    def detach(self) -> None:
        """Take every hook out, of the trainer too; a second call does nothing."""
        if self._detached:
            return
        self._detached = True
        self.end()
        unhook, self._unhook = self._unhook, None
        if unhook is not None:
            self._guard.run("detach", unhook)

    # ---------------------------------------------------------------- for the adapter

    @property
    def live(self) -> bool:
        """A training runs and is watched."""
        return self._session is not None and not self._session.detached

    def begin(
        self,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        grad_scaler: Any = None,
        loss_fn: Any = None,
        blind_spots: Sequence[BlindSpot] = (),
        resumed_from: str | os.PathLike[str] | None = None,
    ) -> Session | None:
        """Training starts, with these objects; the arguments are those of attach().

        A training that was not ended (it raised) is ended first.

        Args:
            loss_fn: how the adapter computes a loss again; the user's own goes before it.
            blind_spots: what cannot be seen of this training.
            resumed_from: the trainer's own checkpoint that its weights come from: if it was saved
                inside an incident, that is said.

        Returns:
            The Session, or None when it could not be made: that is logged, and status() says why.

        Raises:
            StillHalted: the run was halted and nobody has cleared that.
        """
        self.end()
        if self._detached:
            return None
        self._session, self._why, self._spots = None, "", []
        try:
            self._session = self._begin(
                model=model,
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                grad_scaler=grad_scaler,
                loss_fn=self._loss_fn if self._loss_fn is not None else loss_fn,
            )
        except StillHalted:
            raise
        except Exception as error:
            if self._attaching:
                raise
            self._why = f"could not attach to this {self._adapter.name}: {error}"
            self._guard.note("begin", error)
            return None
        for spot in blind_spots:
            self.blind_spot(spot.what, spot.way_out)
        if resumed_from is not None:
            self.resumed(resumed_from)
        return self._session

    def resumed(self, path: str | os.PathLike[str]) -> None:
        """The weights come from this checkpoint of the trainer's own."""
        warning = self._guard.run("snapshot", unhealthy.warn_if_unhealthy, path)
        if warning:
            self.blind_spot(warning)

    @property
    def has_loss_fn(self) -> bool:
        """The user gave a loss_fn: the adapter's own is not used."""
        return self._loss_fn is not None

    def blind_spot(self, what: str, way_out: str = "") -> None:
        """Say what cannot be seen of this training; once is enough, until the next begin()."""
        spot = BlindSpot(what, way_out)
        if spot in self._spots:
            return
        self._spots.append(spot)
        logger.warning(
            "blind spot run=%s trainer=%s what=%s way_out=%s",
            self.run_id,
            self._adapter.name,
            what,
            way_out,
        )

    def safe_point(self, *batch: Any) -> None:
        """One step is over and the next has not begun: no graph of it is alive.

        Args:
            batch: what the next step will see, where that is known: its size is noted.
        """
        if self._session is not None:
            self._session.safe_point(*batch)

    def saved(self, path: str | os.PathLike[str]) -> None:
        """The trainer has just written a checkpoint of its own there.

        One that was saved inside an incident gets a note beside it: unhealthy.json.
        """
        session = self._session
        if session is None or session.detached:
            return
        session.saved(path)
        dist = torch.distributed
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        if first and not self._adopts:  # else the disk tier notes it
            self._guard.run("snapshot", _note_health, session, path)

    def end(self) -> None:
        """Training is over, one way or another."""
        if self._session is not None:
            self._session.detach()

    def guarded(self, function: _F) -> _F:
        """`function` as a callback that the trainer may call: it never raises (but StillHalted).

        In a deep copy or a pickle of the trainer it does nothing.
        """
        wrapped: Any = _Callback(self._guard, function)
        return wrapped  # type: ignore[no-any-return]

    def beside(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[[Any], Any] | None = None,
        at_end: Callable[[], Any] | None = None,
    ) -> Callable[[], None]:
        """Hear of calls of the method `name` of the object `owner`, where there are no callbacks.

        Args:
            before: called before each, with its arguments; guarded, as the others are.
            after: called with what it returned.
            at_end: called last, also when it raised.

        Returns:
            What gives `owner` its own method back.
        """
        method = getattr(owner, name)
        first = self.guarded(before) if before is not None else None
        then = self.guarded(after) if after is not None else None
        last = self.guarded(at_end) if at_end is not None else None

        def body(*args: Any, **kwargs: Any) -> Any:
            if first is not None:
                first(*args, **kwargs)
            try:
                answer = method(*args, **kwargs)
                if then is not None:
                    then(answer)
                return answer
            finally:
                if last is not None:
                    last()

        patch = Patch(owner, name, Stand(owner, name, body))

        def undo() -> None:
            patch.remove()

        return undo


def _note_health(session: Session, path: str | os.PathLike[str]) -> None:
    if not os.path.exists(path):
        return
    ledger = session.state.ledger
    for incident in reversed(ledger.incidents):
        if incident.key == "instability" and incident.state is not IncidentState.RESOLVED:
            unhealthy.note(
                path,
                run=session.run_id,
                step=session.state.step,
                incident=f"i-{incident.number}",
                reason=incident.summary,
                when=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            )
            return
    unhealthy.forget(path)  # of another checkpoint that had this name


class _Callback:
    """A function that does not travel and does not raise."""

    def __init__(self, guard: Guard, function: Callable[..., Any]) -> None:
        self._guard = guard
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        halted: list[StillHalted] = []

        def call() -> Any:
            try:
                return self._function(*args, **kwargs)
            except StillHalted as error:  # goes past the guard
                halted.append(error)

        answer = self._guard.run("adapter", call)
        if halted:
            raise halted[0]
        return answer

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (INERT.func, *INERT.args)


def _weak(trainer: Any) -> Callable[[], Any]:
    with contextlib.suppress(TypeError):
        return weakref.ref(trainer)
    return lambda: trainer
