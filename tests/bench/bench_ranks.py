"""What agreeing costs: the packed all-reduce by number of ranks, and a whole step at 4 ranks.

    python -m tests.bench ranks

All ranks are processes of this one machine, far more than it has cores: wall-clock times are those
of a machine that is overbooked by ranks / cores, and say how the reduce degrades, not what a
cluster would see. CPU time is each rank's own.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.bench.timing import machine, table
from tests.support.ranks import Ranks
from tests.support.ranks.rank import Rank

LAYERS = 75
SIZES = (2, 4, 8, 16, 32, 64)
ROUNDS, STEPS = 5, 60


def reduces(me: Rank) -> int:
    """One rank: nothing but the packed reduce, again and again."""
    import numpy as np
    import torch

    from sentinel_hooks.probes.together import part_names
    from sentinel_hooks.ranks.agreement import Agreement, Kind, Layout, Says
    from sentinel_hooks.ranks.group import Group
    from sentinel_hooks.signals import Signals

    store = me.join(120.0)
    group = Group.make(torch.distributed.PrefixStore("bench", store), me.number, me.ranks, 120.0)
    agreement = Agreement(group, Layout(LAYERS, *part_names(Signals())))
    layer_sq = np.ones(LAYERS)
    waits, cpu = [], 0
    for i in range(me.args["calls"] + 20):
        says = Says(Kind.STEP, attempt=i, loss=1.0, total_sq=1.0, layer_sq_L=layer_sq)
        start, busy = time.perf_counter_ns(), time.process_time_ns()
        agreement.say(says)
        if i >= 20:
            waits.append(round((time.perf_counter_ns() - start) / 1000))
            cpu += time.process_time_ns() - busy
    me.say("reduces", waits=waits, cpu_us=cpu / 1000 / me.args["calls"])
    return 0


def steps(me: Rank) -> int:
    """One rank: the loop of the tests without its books, attached or not."""
    from tests.support.ranks.loop import Setup, World, attach

    me.join(60.0)
    world = World(me, Setup.of(me.args))
    session = attach(me, world) if me.args["attach"] == "all" else None
    for t in range(20 + STEPS):
        if t == 20:
            busy = time.process_time_ns()
        world.optimizer.zero_grad()
        world.backward(t)
        world.optimizer.step()
    me.say("steps", cpu_us=(time.process_time_ns() - busy) / 1000 / STEPS)
    if session is not None:
        session.detach()
    return 0


def _quantile(values: list[int], q: float) -> int:
    return sorted(values)[min(round(q * (len(values) - 1)), len(values) - 1)]


def _reduce_rows(ranks: Ranks) -> list[tuple[str, ...]]:
    rows = []
    for size in SIZES:
        report = ranks.run(
            "tests.bench.bench_ranks:reduces",
            size,
            args={"calls": max(1200 // size, 60)},
            bound_s=400,
        )
        report.ended_well()
        said = [r.last("reduces") for r in report.ranks]
        waits = [w for s in said for w in s["waits"]]
        cpu = statistics.median(s["cpu_us"] for s in said)
        rows.append(
            (
                f"{size} ranks",
                f"{_quantile(waits, 0.5)}",
                f"{_quantile(waits, 0.99)}",
                f"{cpu:.0f}",
                f"{len(waits) // size}",
            )
        )
    return rows


def _step_rows(ranks: Ranks) -> list[tuple[str, ...]]:
    found: dict[str, list[float]] = {"none": [], "none 0": [], "all": [], "all 0": []}
    args: dict[str, Any] = {"world": "ddp", "snapshots": {"ram": False, "disk": False}}
    for _ in range(ROUNDS):
        for attach in ("none", "all"):
            report = ranks.run(
                "tests.bench.bench_ranks:steps", 4, args={**args, "attach": attach}, bound_s=200
            )
            report.ended_well()
            first, *others = [r.last("steps")["cpu_us"] for r in report.ranks]
            found[attach] += others
            found[f"{attach} 0"].append(first)
    middle = {name: statistics.median(values) for name, values in found.items()}
    return [
        ("bare step", f"{middle['none']:.0f}", f"{middle['none 0']:.0f}"),
        ("attached", f"{middle['all']:.0f}", f"{middle['all 0']:.0f}"),
        (
            "what we add",
            f"{middle['all'] - middle['none']:.0f}",
            f"{middle['all 0'] - middle['none 0']:.0f}",
        ),
    ]


def main() -> None:
    """Print both tables."""
    with Ranks() as ranks:
        head: tuple[str, ...] = ("packed reduce", "p50 us", "p99 us", "CPU us a rank", "calls")
        rows = _reduce_rows(ranks)
        title = f"One packed all-reduce of {LAYERS} layers, all calls of all ranks ({machine(1)})"
        print(table(title, rows, head), flush=True)
        head = ("tiny MLP, DDP on 4 ranks", "CPU us a step", "on rank 0, which records")
        rows = _step_rows(ranks)
        print(table(f"A whole step ({machine(ROUNDS)})", rows, head))


if __name__ == "__main__":
    main()
