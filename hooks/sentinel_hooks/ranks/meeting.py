"""The meeting: every rank comes to the store before anybody makes a group.

    met = meet(Paper(layers="9f3c...", optimizers=1), deadline_s=30.0)
    met.group          a Group of all ranks, or None
    met.why            why not, in words for a person

A rank writes its paper (what it is about to watch) under its own key and waits for the others'.
Who first sees all papers, or runs out of patience, or cannot attach at all, settles the matter for
everybody with one atomic compare_set: so that no rank can believe that the group is on while
another has given up. Only after a "go" is the group made, over a store of our own prefix.

Papers that differ (pipeline stages have different layers) are no failure: met.alike is False, and
each rank then watches by itself and only observes.

Threads: the calling one. Nothing is left behind in the process when it fails.
Units:   seconds.
Errors:  none raised; a store that fails is a meeting that did not happen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sentinel_hooks.ranks.group import Group

logger = logging.getLogger(__name__)

DEADLINE_VARIABLE = "SENTINEL_RENDEZVOUS_S"
DEADLINE_S = 60.0
POLL_S = 0.01
PREFIX = "sentinel/meeting"
GO, STOP = "go", "stop:"

_held = 0  # meetings that this process has taken part in, so that names are never used twice


class Paper(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is about to watch; equal on all ranks that can act together.

    Attributes:
        layers: digest of the layer table.
        optimizers: how many step together.
        policy: digest of the policy asked for.
        signals: what is measured beside the gradients.
        snapshots: what decides on this rank whether a step has a snapshot, by field.
        norm_fn: a function of the user's says what the gradient norm is.
        acts: its norms can be added up over ranks.
        run: the id that this rank would give the run; rank 0's is taken, whatever else differs.
    """

    layers: str
    optimizers: int
    policy: str
    signals: str = ""
    snapshots: dict[str, str] = {}
    norm_fn: bool = False
    acts: bool = True
    run: str = ""


@dataclass(frozen=True, slots=True)
class Met:
    """How the meeting ended, the same on all ranks.

    Attributes:
        world: ranks of the training run.
        group: None: no common group; see `why`.
        alike: False: all came, but their papers differ in something that must be equal.
        run: rank 0's id for the run; "" when not all came.
    """

    rank: int
    world: int
    group: Group | None = None
    why: str = ""
    alike: bool = True
    run: str = ""


def world_size() -> int:
    """Ranks of the training run; 1 without torch.distributed."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process among them."""
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def deadline(timeout_s: float) -> float:
    """How long ranks wait for each other at attach: less than the training group would."""
    given = os.environ.get(DEADLINE_VARIABLE, "")
    try:
        wanted = float(given) if given else DEADLINE_S
    except ValueError:
        logger.warning("$%s is no number of seconds: %r", DEADLINE_VARIABLE, given)
        wanted = DEADLINE_S
    return max(min(wanted, timeout_s / 2), 0.1)


def group_timeout() -> float:
    """The training group's timeout [s]: ours is never shorter."""
    from torch.distributed import distributed_c10d as c10d

    default = c10d._get_default_group()
    longest = 0.0
    for device in default._device_types:
        try:
            timeout = default._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue  # a backend that does not say
        longest = max(longest, timeout.total_seconds())
    return longest or c10d.default_pg_timeout.total_seconds()


def meet(paper: Paper, *, clock: Callable[[], float] = time.perf_counter) -> Met:
    """Meet all ranks of the default process group; returns on all of them, or on none."""
    global _held
    me, world = rank(), world_size()
    _held += 1
    try:
        timeout_s = group_timeout()
        store = _store()
        verdict, papers = _gather(store, me, world, paper, deadline(timeout_s), clock)
    except Exception as error:  # noqa: BLE001  whatever a store raises: we did not meet
        return Met(me, world, why=f"the ranks could not meet: {type(error).__name__}: {error}")
    if verdict != GO:
        return Met(me, world, why=verdict.removeprefix(STOP))
    run = papers[0].run
    different = _difference(papers)
    if different:
        return Met(me, world, why=different, alike=False, run=run)
    try:
        if store.check(["given_up"]):  # this rank was slow, and nobody is there to connect to
            return Met(me, world, why=bytes(store.get("given_up")).decode(), run=run)
        group = Group.make(_named(store, "group"), me, world, timeout_s)
    except Exception as error:  # noqa: BLE001
        why = f"no group could be made: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store may be what is gone
            store.set("given_up", why)
        return Met(me, world, why=why, run=run)
    return Met(me, world, group, run=run)


def decline(why: str) -> None:
    """This rank cannot attach: the others need not wait for it."""
    global _held
    if world_size() == 1:
        return
    _held += 1
    try:
        _settle(_store(), f"{STOP}rank {rank()} cannot attach: {why}")
    except Exception as error:  # noqa: BLE001
        logger.warning("the other ranks could not be told: %s", error)


def store_of_this_meeting() -> Callable[[], Any]:
    """Where ranks of the last meeting leave notes for each other without a group, also later."""
    held = _held
    return lambda: _store(held)


def _store(held: int | None = None) -> Any:
    from torch.distributed import distributed_c10d as c10d

    number = _held if held is None else held
    return c10d.PrefixStore(f"{PREFIX}/{number}", c10d._get_default_store())


def _named(store: Any, name: str) -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d.PrefixStore(name, store)


def _settle(store: Any, verdict: str) -> str:
    """The first to speak decides for all."""
    return bytes(store.compare_set("verdict", "", verdict)).decode()


def _gather(
    store: Any, me: int, world: int, paper: Paper, patience_s: float, clock: Callable[[], float]
) -> tuple[str, list[Paper]]:
    store.set(f"paper/{me}", msgspec.json.encode(paper).decode())
    keys = [f"paper/{r}" for r in range(world)]
    until = clock() + patience_s
    while True:
        if store.check(["verdict"]):
            verdict = bytes(store.get("verdict")).decode()
            break
        if store.check(keys):
            verdict = _settle(store, GO)
            break
        if clock() >= until:
            missing = [r for r in range(world) if not store.check([f"paper/{r}"])]
            verdict = _settle(
                store,
                f"{STOP}{_listed(missing)} of {world} did not call attach() within "
                f"{patience_s:g} s; call it on every rank, at the same place",
            )
            break
        time.sleep(POLL_S)
    if verdict != GO:
        return verdict, []
    return verdict, [msgspec.json.decode(bytes(store.get(k)), type=Paper) for k in keys]


def _listed(ranks: list[int]) -> str:
    shown = "rank" if len(ranks) == 1 else "ranks"
    shown += f" {', '.join(str(r) for r in ranks[:8])}"
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


_DIFFERENT = {
    "layers": "other layers",
    "optimizers": "another number of optimizers",
    "policy": "another policy or mode",
    "signals": "other signals",
    "snapshots": "other snapshots",
    "norm_fn": "another norm_fn",
}


def _difference(papers: list[Paper]) -> str:
    first = papers[0]
    if not all(p.acts for p in papers):
        return (
            "norms cannot be added up: parameters are sharded without DTensor ("
            "FullyShardedDataParallel; use fully_shard)"
        )
    for name, words in _DIFFERENT.items():
        odd = [r for r, p in enumerate(papers) if getattr(p, name) != getattr(first, name)]
        if odd:
            verb = "has" if len(odd) == 1 else "have"
            return f"{_listed(odd)} {verb} {words} than rank 0{_in_detail(name, papers, odd[0])}"
    return ""


def _in_detail(name: str, papers: list[Paper], odd: int) -> str:
    """Of fields that are small enough to be said: what the first odd rank has, and rank 0."""
    if name == "norm_fn":
        given = {True: "one", False: "none"}
        return f": {given[papers[odd].norm_fn]} on rank {odd}, {given[papers[0].norm_fn]} on rank 0"
    if name != "snapshots":
        return ""
    here, first = papers[odd].snapshots, papers[0].snapshots
    fields = [k for k in first | here if here.get(k) != first.get(k)]
    said = [", ".join(f"{k}={p.get(k)}" for k in fields) for p in (here, first)]
    return f": {said[0]} on rank {odd}, {said[1]} on rank 0"
