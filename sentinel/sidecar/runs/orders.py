"""People's orders to one run, and what became of each: pending, delivered, taken, expired.

    order = orders.take(command, ttl_s, now)       the same id again is the same order
    commands, left_s = orders.to_tell(now)         with every answer, until a report acknowledges it
    orders.obeyed(ids, step), orders.expire(now), orders.end()

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

from sentinel.core.types import Command
from sentinel.sidecar.runs.refusal import RefusedError

logger = logging.getLogger(__name__)

MAX_COMMANDS = 256
OPEN_ORDER = ("pending", "delivered")

ToTell = tuple[tuple[Command, ...], tuple[float, ...]]
_NOTHING: ToTell = ((), ())


@dataclass(slots=True)
class Order:
    """A person's command and what became of it: pending, delivered, taken, expired."""

    command: Command
    issued: float
    expires: float
    state: str = "pending"
    taken_step: int | None = None

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

    def obeyed(self, ids: Iterable[str], step: int | None = None) -> None:
        """The trainer has acknowledged these."""
        if not self._orders:
            return
        for key in ids:
            order = self._orders.get(key)
            if order is not None and order.state != "taken":
                order.taken_step = step
                logger.info("order obeyed run=%s id=%s step=%s", self._run, key, step)
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
