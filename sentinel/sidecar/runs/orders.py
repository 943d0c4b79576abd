"""People's orders to one run, and what became of each.

    order = orders.take(command, ttl_s, now)       the same id again is the same order
    commands, left_s = orders.to_tell(now)         with every answer, until a report acknowledges it
    orders.reported(observation, decision)         a report holds them: what became of each
    orders.happened(moves)                         how what they asked for ended
    orders.known(ids), orders.expire(now), orders.end()

pending -> delivered -> taken (done), or: restoring -> taken or failed, of a rollback; superseded by
another order of the same step; failed; expired. The detail says why, or what was restored.

They belong to the run's name: a later process of it hears what is still open, but not what was open
when the run ended.

Units:   `now` and the times in Unix seconds, `ttl_s` and `left_s` in seconds.
Purity:  no clock, no I/O; `tell` hears of every change.
Errors:  RefusedError when too many are open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sentinel.core.orders import ACTIONS, Fate, settle
from sentinel.core.types import Action, Command, Decision, Observation
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.wire.codec import WireRestored, WireRestoreFailed
from sentinel.wire.messages import Move, WireOutcome

logger = logging.getLogger(__name__)

MAX_COMMANDS = 256
OPEN_ORDER = ("pending", "delivered")
STATES = (*OPEN_ORDER, "restoring", "taken", "superseded", "failed", "expired")
DETAIL = 500  # letters
_STATES = {
    Fate.DONE: "taken",
    Fate.RESTORING: "restoring",
    Fate.SUPERSEDED: "superseded",
    Fate.FAILED: "failed",
}

ToTell = tuple[tuple[Command, ...], tuple[float, ...]]
_NOTHING: ToTell = ((), ())


@dataclass(slots=True)
class Order:
    """A person's command and what became of it; see the module docstring.

    Attributes:
        taken_step: at which a report held it, whatever became of it.
        aim: RESTORING: the snapshot that was decided on, None: not known.
    """

    command: Command
    issued: float
    expires: float
    state: str = "pending"
    taken_step: int | None = None
    detail: str = ""
    aim: int | None = None

    @property
    def open(self) -> bool:
        """Whether the trainer is still to be told."""
        return self.state in OPEN_ORDER


Tell = Callable[[str, Order], None]


def _nobody(run: str, order: Order) -> None:
    pass


class Orders:
    """See the module docstring."""

    def __init__(self, run: str = "", tell: Tell = _nobody) -> None:
        self._run = run
        self._tell = tell
        self._orders: dict[str, Order] = {}

    def __iter__(self) -> Iterator[Order]:
        return iter(self._orders.values())

    def __len__(self) -> int:
        return len(self._orders)

    def get(self, key: str) -> Order | None:
        """The order of that id."""
        return self._orders.get(key)

    def restore(self, order: Order) -> None:
        """Take up one of an earlier start, unless it is known."""
        self._orders.setdefault(order.command.id, order)

    def take(self, command: Command, ttl_s: float, now: float) -> Order:
        """Take a person's order; the same id again changes nothing.

        Raises:
            RefusedError: too many orders are open.
        """
        known = self._orders.get(command.id)
        if known is not None:
            return known
        if len(self._orders) >= MAX_COMMANDS:
            done = [key for key, order in self._orders.items() if not order.open]
            if not done:
                raise RefusedError("full", f"run {self._run!r} has {MAX_COMMANDS} open orders", 429)
            del self._orders[done[0]]
        order = Order(command, now, now + ttl_s)
        self._orders[command.id] = order
        logger.info(
            "order taken run=%s id=%s kind=%s by=%s",
            self._run,
            command.id,
            command.kind,
            command.issued_by,
        )
        self._tell(self._run, order)
        return order

    def to_tell(self, now: float) -> ToTell:
        """What the trainer is told now, and how long it may still obey each [s]."""
        if not self._orders:
            return _NOTHING
        commands, left = [], []
        for order in self._open(now):
            if order.state == "pending":
                self._turn(order, "delivered")
            commands.append(order.command)
            left.append(order.expires - now)
        return tuple(commands), tuple(left)

    def reported(self, observation: Observation, decision: Decision | None) -> None:
        """A report holds these orders.

        Args:
            decision: of that step; None: not known, nor what became of them.
        """
        if not self._orders or not observation.commands:
            return
        if decision is None or decision.step != observation.step:
            fates = tuple((c.id, Fate.DONE, "") for c in observation.commands)
        else:
            fates = settle(observation, decision)
        for key, fate, detail in fates:
            order = self._orders.get(key)
            if order is None or not (order.open or order.taken_step is None):
                continue  # a state that was handed over says that it was heard, and not when
            order.taken_step, order.detail = observation.step, detail
            if fate is Fate.RESTORING and decision is not None:
                order.aim = decision.target
            state = _STATES[fate]
            logger.info(
                "order %s run=%s id=%s step=%s why=%s",
                "obeyed" if state == "taken" else state,
                self._run,
                key,
                observation.step,
                detail or "-",
            )
            self._turn(order, state)

    def happened(self, moves: Iterable[Move]) -> None:
        """What the trainer did since its last report."""
        if not self._orders:
            return
        for move in moves:
            if isinstance(move, WireOutcome):
                self._executed(move.step, move.executed)
            elif isinstance(move, WireRestored | WireRestoreFailed):
                self._restored(move)

    def _restored(self, move: WireRestored | WireRestoreFailed) -> None:
        for order in [o for o in self._orders.values() if o.state == "restoring"]:
            if isinstance(move, WireRestored):
                order.detail = _where(order, move.target)
                self._turn(order, "taken")
            else:
                self._fail(
                    order,
                    f"nothing was restored: {move.reason}; the step was skipped, and the "
                    "learning rate is cut",
                )

    def _executed(self, step: int, executed: Action) -> None:
        for order in self._orders.values():
            wanted = ACTIONS.get(order.command.kind, Action.PROCEED)
            if (
                order.taken_step == step
                and order.state in ("taken", "restoring")
                and executed < wanted
            ):
                did = executed.name.lower()
                self._fail(order, f"it was decided, and the trainer did otherwise: {did}")

    def _fail(self, order: Order, detail: str) -> None:
        order.detail = detail[:DETAIL]
        logger.info("order failed run=%s id=%s why=%s", self._run, order.command.id, detail)
        self._turn(order, "failed")

    def known(self, ids: Iterable[str]) -> None:
        """The trainer's state remembers these: it has heard them, and not when."""
        if not self._orders:
            return
        for key in ids:
            order = self._orders.get(key)
            if order is not None and order.open:
                logger.info("order obeyed run=%s id=%s step=unknown", self._run, key)
                self._turn(order, "taken")

    def expire(self, now: float) -> None:
        """Those that nobody fetched in time are over."""
        for _ in self._open(now):
            pass

    def end(self) -> None:
        """The run is over: a later life of it must not obey what was meant for this one."""
        for order in self._orders.values():
            if order.open:
                self._turn(order, "expired")
        self.cut_off()

    def cut_off(self) -> None:
        """The process that was to restore a snapshot is gone."""
        for order in self._orders.values():
            if order.state == "restoring":
                self._fail(order, "its process ended before a snapshot was restored")

    def _open(self, now: float) -> Iterator[Order]:
        for order in self._orders.values():
            if not order.open:
                continue
            if now < order.issued:  # the clock was set back: it is not obeyed for so much longer
                order.expires -= order.issued - now
                order.issued = now
            if now >= order.expires:
                logger.info("order expired run=%s id=%s", self._run, order.command.id)
                self._turn(order, "expired")
                continue
            yield order

    def _turn(self, order: Order, state: str) -> None:
        order.state = state
        self._tell(self._run, order)


def _where(order: Order, target: int) -> str:
    """Which snapshot was restored, and why not the one that was meant."""
    meant = order.aim if order.aim is not None else order.command.target
    if meant is None or meant == target:
        return f"to step {target}"
    return f"to step {target}: the snapshot of step {meant} could not be used"
