"""People's orders of one step: which take effect at it, and what became of each?

    due(waiting) -> (orders of this step, orders of a later one)
    settle(observation, decision) -> ((id, Fate, detail), ...)

A step has one action, so that not every order of it can be carried out. Two orders to skip the next
step mean two steps: the second waits for the step after. The others are settled here, as the
engine's rules have settled them (rules.py, 1): a halt goes before a rollback, the later of two
rollbacks or factors before the earlier one; a rollback whose snapshot is gone is not done. Whoever
gave an order is told which of these it was.

Purity:  no clock, no I/O. Nothing here changes a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sentinel.core.types import Action, Command, CommandKind, Decision, Observation

ACTIONS = {
    CommandKind.SKIP_NEXT: Action.SKIP_STEP,
    CommandKind.ROLLBACK: Action.ROLLBACK,
    CommandKind.HALT: Action.HALT,
}
_SWITCHES = (CommandKind.PAUSE, CommandKind.RESUME)


class Fate(StrEnum):
    """What became of an order at the step that heard of it."""

    DONE = "done"
    RESTORING = "restoring"  # a rollback: Restored or RestoreFailed says how it ended
    SUPERSEDED = "superseded"  # by another order, or by a rule, of the same step
    FAILED = "failed"


def due(waiting: Sequence[Command]) -> tuple[tuple[Command, ...], tuple[Command, ...]]:
    """The orders that take effect at the next step, and those that wait for a later one."""
    now: list[Command] = []
    later: list[Command] = []
    skips = 0
    for command in waiting:
        skips += command.kind is CommandKind.SKIP_NEXT
        more = command.kind is CommandKind.SKIP_NEXT and skips > 1
        (later if more else now).append(command)
    return tuple(now), tuple(later)


def settle(observation: Observation, decision: Decision) -> tuple[tuple[str, Fate, str], ...]:
    """Of each order of this step: its id, what became of it, and why it was not simply done."""
    commands = observation.commands
    return tuple((c.id, *_fate(at, commands, decision)) for at, c in enumerate(commands))


def _fate(at: int, commands: Sequence[Command], decision: Decision) -> tuple[Fate, str]:
    command, action = commands[at], decision.action
    later = commands[at + 1 :]
    kind = command.kind
    if kind in _SWITCHES:
        last = next((c for c in reversed(later) if c.kind in _SWITCHES), command)
        if last.kind is not kind:
            return _superseded(last)
    elif kind is CommandKind.SCALE_LR:
        last = next((c for c in reversed(later) if c.kind is kind), command)
        if last.value != command.value:
            return _superseded(last)
    elif kind is CommandKind.SKIP_NEXT and action is Action.HALT:
        return Fate.SUPERSEDED, "the run is halted at this step"
    elif kind is CommandKind.SKIP_NEXT:
        if any(c.kind is kind for c in commands[:at]):
            return Fate.SUPERSEDED, "another order has skipped this very step"
        if action is Action.PROCEED:
            return Fate.FAILED, "the step was not skipped"
    elif kind is CommandKind.HALT and action is not Action.HALT:
        return Fate.FAILED, "the run was not halted"
    elif kind is CommandKind.ROLLBACK:
        return _rolled_back(at, commands, decision)
    return Fate.DONE, ""


def _rolled_back(at: int, commands: Sequence[Command], decision: Decision) -> tuple[Fate, str]:
    target = commands[at].target
    if decision.action is Action.HALT:
        return Fate.SUPERSEDED, "the run is halted at this step"
    # The last one that could be done is the one that was: see rules.py, 1.
    done = [
        i
        for i, c in enumerate(commands)
        if c.kind is CommandKind.ROLLBACK and c.target in (None, decision.target)
    ]
    ordered = decision.action is Action.ROLLBACK and decision.rule == "command"
    if not ordered or not done or at > done[-1]:
        what = "no healthy snapshot" if target is None else f"no healthy snapshot of step {target}"
        return Fate.FAILED, f"there is {what} any more"
    if at == done[-1] or target == decision.target:
        return Fate.RESTORING, ""
    return _superseded(commands[done[-1]])


def _superseded(by: Command) -> tuple[Fate, str]:
    what = by.kind.value
    if by.kind is CommandKind.SCALE_LR:
        what += f" {by.value:g}"
    elif by.target is not None:
        what += f" to step {by.target}"
    who = f" by {by.issued_by}" if by.issued_by else ""
    return Fate.SUPERSEDED, f"a later order for the same step{who}: {what}"
