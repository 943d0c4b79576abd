"""Attach to a world, let it train, and read what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sentinel_hooks
from sentinel.core.policy import Policy
from sentinel.core.types import Action
from sentinel.traces.reader import Reader
from tests.support.trainers import QUICK, World

POLICY = Policy.parse(QUICK, "quick")

# The frameworks' own warnings are theirs; ours stay errors.
FRAMEWORK_WARNINGS = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:::sentinel_hooks"),
]


def attach(world: World, run_dir: Path, **options: Any) -> Any:
    """attach() as the world is attached to, without a sidecar and with the quick policy."""
    given: dict[str, Any] = {"sidecar": None, "run_dir": run_dir, "policy": POLICY, **options}
    given |= world.attach_options()
    return sentinel_hooks.attach(given.pop("trainer", None), **given)


def records(session: Any) -> list[Any]:
    """Every step of the session's run, as the trace has it."""
    return list(Reader(session.directory).steps())


def acted(session: Any) -> list[tuple[int, str, str]]:
    """(step, action, rule) of each step that did not simply go on."""
    return [
        (r.step, r.outcome.executed.name, r.decision.rule)
        for r in records(session)
        if r.outcome.executed is not Action.PROCEED
    ]
