"""Optimizer steps of a process that did not ask for us: the first attaches, later ones may anew.

    on_step(optimizer)         before every step of any optimizer, called by sitecustomize.py

It comes from a global step pre-hook of torch's own: that fires before the optimizer's own hooks, so
that the session's gate, which is installed here, sees this very step.

One session at a time. An optimizer that steps and is not watched is attached: alone, when what was
watched is over, or together with it, when both take turns (judging.py). Where that shows only
later, a line says at once that this one is not watched. A script that attaches by itself is left to
itself. A process that makes optimizers anew every few steps (an inner loop) is not followed for
ever: after HASTY sessions of a few steps, what is watched stays.

With several ranks all must attach anew at the same step. That is sure where the model is wrapped in
DistributedDataParallel or sharded, whose ranks step together, and where all ranks judge by equal
facts: there nobody asks the garbage collector. Of anything else it is said that it is not watched.

Environment:  SENTINEL_ATTACH, JSON: what attach() shall be given: policy, mode, run_dir, run_id.
              SENTINEL_ATTACH_REPORT: a file in which lines are left for `sentinel run`.
Errors:       none reach the script; what could not be done is said on standard error and logged.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sentinel_hooks.seams.step_tap import STEP_TAP, has_no_rate
from sentinel_hooks.unasked.finding import Found, find, parameters_of
from sentinel_hooks.unasked.judging import OVER, Seen, Verdict, judge

if TYPE_CHECKING:
    from sentinel_hooks.session import Session

logger = logging.getLogger(__name__)

VARIABLE = "SENTINEL_ATTACH"
REPORT_VARIABLE = "SENTINEL_ATTACH_REPORT"
HASTY = 8  # sessions of less than OVER steps, one after the other
BACK = 2  # times that an optimizer which was let go of is taken again for the same parameters
_WAY_OUT = "call sentinel.attach(model=[...], optimizer=[...]) in the script, with all that train"


@dataclass(slots=True)
class _Stranger:
    """An optimizer that steps and is not watched.

    Attributes:
        since: steps of the session when it made its first.
        own: its steps.
    """

    since: int
    own: int = 0


class Follower:
    """What one process watches, unasked."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._session: weakref.ref[Session] | None = None
        self._held: Session | None = None  # with several ranks: none may find it gone, alone
        self._began = False
        self._left_alone = False  # the script's own matter, or given up
        self._steps = 0  # of the watched, since they are
        self._hasty = 0  # sessions in a row that came to less than OVER of them
        self._failed = 0
        self._given: list[weakref.ref[torch.optim.Optimizer]] = []  # to attach(), in order
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # and inside of them
        self._hopeless: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._strangers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stranger] = (
            weakref.WeakKeyDictionary()
        )
        self._returns: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._looks: dict[str, int] = {}  # steps of strangers, by kind, since the last attach
        self._said: set[str] = set()

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """It is about to step, and there is nothing to be done about that."""
        if optimizer in self._ours:
            self._steps += 1
            return True
        return self._left_alone or optimizer in self._hopeless

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One that is not known is about to step."""
        from sentinel_hooks.session import is_attached

        if has_no_rate(optimizer):
            return
        if is_attached(optimizer):
            self._left_alone = True
            _say("the script attaches by itself; nothing more is done")
            report("own")
        elif not self._began:
            self._first(optimizer)
        elif not self._in_step():
            verdict = self._judge(optimizer)
            if verdict is not None:
                self._again(optimizer, partner=verdict is Verdict.PARTNER)

    def failed(self, why: str) -> None:
        """Attaching ended in an error."""
        self._failed += 1
        self._left_alone = self._left_alone or self._failed >= HASTY
        if why not in self._said:
            self._said.add(why)
            _say(f"NOT ATTACHED, training goes on unprotected: {why}")
        report("refused")

    def _now(self) -> Session | None:
        return self._session() if self._session is not None else None

    def _in_step(self) -> bool:
        """Inside of a watched one."""
        session = self._now()
        return session is not None and session.in_step

    # -- the first ---------------------------------------------------------------------------

    def _first(self, optimizer: torch.optim.Optimizer) -> None:
        from sentinel_hooks.ranks import meeting

        try:
            found = find(optimizer)
        except Exception as error:  # noqa: BLE001  gc shows objects of every kind
            self._hopeless.add(optimizer)  # the next one may be the one that trains
            self._left_alone = meeting.world_size() > 1
            self.failed(str(error))
            meeting.decline(str(error))
            return
        self._began = True
        self._attach(found, "attached to")

    # -- and who comes later -----------------------------------------------------------------

    def _judge(self, optimizer: torch.optim.Optimizer) -> Verdict | None:
        """What it is to the one that is watched; None: nothing is to be done."""
        from sentinel_hooks.ranks import meeting

        kind = _kind(optimizer)
        self._looks[kind] = looks = self._looks.get(kind, 0) + 1
        if meeting.world_size() == 1 and _is_power_of_two(looks):
            gc.collect()  # what nobody holds any more, the session lets go of
        session = self._now()
        one = self._strangers.get(optimizer)
        if one is None:
            one = self._strangers[optimizer] = _Stranger(self._steps)
        one.own += 1
        watched = session.optimizers if session is not None and not session.detached else ()
        held = {p for o in watched for p in parameters_of(o)}
        shares = not held.isdisjoint(parameters_of(optimizer))
        if shares and session is not None and session.switched_off:
            return None  # it has said so, and this is still its run
        verdict = judge(
            Seen(
                alive=bool(watched),
                shares=shares,
                age=self._steps,
                own=one.own,
                between=self._steps > one.since,
            )
        )
        names = ", ".join(_kind(o) for o in watched)
        if verdict is Verdict.OPEN:
            self._say_unwatched(
                kind,
                f"it cannot be told yet whether it takes turns with what is watched ({names}) or "
                "follows it; it is attached when that shows",
            )
            return None
        if self._hasty >= HASTY:
            self._left_alone = True
            self._say_unwatched(
                kind,
                f"optimizers come and go every few steps here ({HASTY} sessions of less than "
                f"{OVER} steps), and no other is attached any more",
            )
            return None
        if shares:
            self._returns[optimizer] = self._returns.get(optimizer, 0) + 1
            if self._returns[optimizer] > BACK:
                self._hopeless.add(optimizer)
                self._say_unwatched(
                    kind,
                    f"it moves the same parameters in turns with what is watched ({names}), and "
                    "only one of the two can be",
                )
                return None
        return verdict

    def _again(self, optimizer: torch.optim.Optimizer, *, partner: bool) -> None:
        """Attach to this one, and to what is watched if that is its partner."""
        from sentinel_hooks.adapters import plain
        from sentinel_hooks.ranks import meeting

        world = meeting.world_size()
        together = world > 1
        others = self._givens() if partner else []
        try:
            found = find(*others, optimizer)
            plain.collect(list(found.models), list(found.optimizers), None, found.scaler)
        except Exception as error:  # noqa: BLE001  nothing was touched yet
            self._hopeless.add(optimizer)
            self._say_unwatched(_kind(optimizer), str(error))
            return
        if together and not all(_steps_on_all_ranks(m, world) for m in found.models):
            self._hopeless.add(optimizer)
            self._say_unwatched(
                _kind(optimizer),
                f"it is not sure that all {world} ranks step it at the same moment (its model is "
                "neither DistributedDataParallel nor sharded over all), and ranks attach together "
                "or not at all",
            )
            return
        self._hasty = self._hasty + 1 if self._steps < OVER else 0
        session = self._now()
        if session is not None:
            session.detach()
        if others and not together:
            # Detached, they live only if the script holds them.
            del session, found
            others.clear()
            self._held = None
            gc.collect()
            others = self._givens()
            found = find(*others, optimizer)
        words = "attached anew, to all that take turns:" if others else "attached anew, to"
        self._attach(found, words, others)

    def _givens(self) -> list[torch.optim.Optimizer]:
        return [o for o in (r() for r in self._given) if o is not None]

    def _attach(
        self, found: Found, words: str, stepped: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        """Attach to `found`, of which `stepped` have had their turn in this logical step."""
        from sentinel_hooks.adapters import plain
        from sentinel_hooks.attaching import attach
        from sentinel_hooks.ranks import meeting

        self._session = self._held = None
        self._looks.clear()
        self._strangers.clear()
        self._given = [weakref.ref(o) for o in found.optimizers]
        self._ours = weakref.WeakSet(found.optimizers)
        self._steps = 1
        session = attach(
            model=list(found.models),
            optimizer=list(found.optimizers),
            grad_scaler=found.scaler,
            **_options(),
        )
        if session.detached:
            self._left_alone = True  # ranks: they are apart now
            self.failed(session.status().why)
            return
        self._ours.update(session.optimizers)
        if stepped:
            session.begin_within([plain.unwrap(o) for o in stepped])
        self._session = weakref.ref(session)  # the optimizers hold it, by its hooks
        self._held = session if meeting.world_size() > 1 else None
        _say(f"{words} {found}; run {session.run_id}")
        report("attached")

    def _say_unwatched(self, kind: str, why: str) -> None:
        """At once, and once for each kind: an inner loop makes a new one every time."""
        text = f"NOT WATCHED: {kind} steps and is unprotected: {why}; {_WAY_OUT}"
        if text not in self._said:
            self._said.add(text)
            _say(text)


_FOLLOWER = Follower()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def on_step(optimizer: torch.optim.Optimizer) -> None:
    """Follow the script; where step() is compiled, dynamo stays outside."""
    STEP_TAP.carried()  # torch goes through its hooks now: none may be put in or taken out
    try:
        if not _FOLLOWER.knows(optimizer):
            with torch.no_grad():
                _FOLLOWER.on_step(optimizer)
    except Exception as error:
        _FOLLOWER.failed(f"{type(error).__name__}: {error}")
        logger.debug("attaching failed", exc_info=error)
    STEP_TAP.on_step(optimizer)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return f"{type(optimizer).__name__} ({count:,} parameters)"


def _steps_on_all_ranks(model: torch.nn.Module, world: int) -> bool:
    """Its backward pass waits for all the other ranks."""
    ddp = torch.nn.parallel.DistributedDataParallel
    return any(
        isinstance(m, ddp) and torch.distributed.get_world_size(m.process_group) == world
        for m in model.modules()
    ) or any(p.device_mesh.size() == world for p in model.parameters() if hasattr(p, "device_mesh"))


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _options() -> dict[str, Any]:
    text = os.environ.get(VARIABLE, "")
    options = json.loads(text) if text.startswith("{") else {}
    known = ("policy", "mode", "run_dir", "run_id", "decide")
    return {name: options[name] for name in known if options.get(name) is not None}


def report(what: str) -> None:
    """One line for `sentinel run`: attached, own (the script attaches by itself) or refused."""
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"{what}\n")


def _say(text: str) -> None:
    rank = os.environ.get("RANK")
    who = "sentinel" if rank is None else f"sentinel[rank {rank}]"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{who}: {text}\n")
        sys.stderr.flush()
