"""The first optimizer step of the process attaches.

    first_step(optimizer)      called once, by sitecustomize.py

It comes from a global step pre-hook of torch's own: that fires before the optimizer's own hooks, so
that the session's gate, which is installed here, sees this very step.

Environment:  SENTINEL_ATTACH, JSON: what attach() shall be given: policy, mode, run_dir, run_id.
Errors:       none reach the script; what could not be done is said on standard error and logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from typing import Any

import torch

logger = logging.getLogger(__name__)

VARIABLE = "SENTINEL_ATTACH"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def is_made_up(optimizer: torch.optim.Optimizer) -> bool:
    """No step of a training: torch.distributed.checkpoint steps with lr 0 to make state."""
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def first_step(optimizer: torch.optim.Optimizer) -> None:
    """Attach to what this step belongs to; where step() is compiled, dynamo stays outside."""
    with torch.no_grad():
        _attach(optimizer)


def _attach(optimizer: torch.optim.Optimizer) -> None:
    try:
        from sentinel_hooks.attaching import attach
        from sentinel_hooks.ranks import meeting
        from sentinel_hooks.session import is_attached
        from sentinel_hooks.unasked.finding import find

        if is_attached(optimizer):
            _say("the script attaches by itself; nothing more is done")
            return
        try:
            found = find(optimizer)
        except Exception as error:  # noqa: BLE001  gc shows objects of every kind
            _say(f"NOT ATTACHED, training goes on unprotected: {error}")
            meeting.decline(str(error))
            return
        session = attach(
            model=list(found.models),
            optimizer=list(found.optimizers),
            grad_scaler=found.scaler,
            **_options(),
        )
        if session.detached:
            _say(f"NOT ATTACHED, training goes on unprotected: {session.status().why}")
        else:
            _KEPT.append(session)
            _say(f"attached to {found}; run {session.run_id}")
    except Exception as error:
        _say(f"NOT ATTACHED, training goes on unprotected: {type(error).__name__}: {error}")
        logger.debug("attaching failed", exc_info=error)


_KEPT: list[Any] = []  # nobody else holds the session


def _options() -> dict[str, Any]:
    text = os.environ.get(VARIABLE, "")
    options = json.loads(text) if text.startswith("{") else {}
    known = ("policy", "mode", "run_dir", "run_id", "decide")
    return {name: options[name] for name in known if options.get(name) is not None}


def _say(text: str) -> None:
    rank = os.environ.get("RANK")
    who = "sentinel" if rank is None else f"sentinel[rank {rank}]"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{who}: {text}\n")
        sys.stderr.flush()
