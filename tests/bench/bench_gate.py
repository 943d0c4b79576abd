"""What measuring every gradient and deciding costs a step, with the user's clip and without.

    python -m tests.bench gate

Timed in place (loop.py), with norms as the only signal. Rounds take the loops in random order;
medians of ratios within a round, the bare step being the mean of the round's.

Gate: norms, read, decide, act. Around it: marking gradients at backward, the safe point (which
settles and records the step before), recording a canary batch every fourth step. With the user's
clip, the clip and the gate together are compared with the stock clip alone.

The limits, in an unattached loop of the same round: one pass over as many bytes as the gradients
have, in one buffer; and one `torch._foreach_norm` over the gradients and nothing else, for which
their list is made before. The list itself is a row of its own: who asks for it first pays for the
tensors' Python objects, and the optimizer that comes after finds them made (see finds()).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import torch

from tests.bench.loop import MODELS, NORMS, Loop, Make, Parts
from tests.bench.timing import machine, table

WARM = 2
SCALES, IDLE = 1e-3, 1e6  # a clip that always scales, one that never does


def finds(make: Make, rounds: int) -> tuple[float, float]:
    """(making the list of gradients, what the optimizer's step then saves), in milliseconds."""
    loop = Loop(make)
    spent: dict[bool, list[float]] = {True: [], False: []}
    listed = []
    for t in range(2 * (WARM + rounds)):
        first = bool((t + t // 2) % 2)
        loop.optimizer.zero_grad()
        loop.model(loop.ids).backward()
        start = time.process_time_ns()
        grads = [p.grad for p in loop.parameters] if first else []
        middle = time.process_time_ns()
        loop.optimizer.step()
        end = time.process_time_ns()
        del grads
        if t >= 2 * WARM:
            spent[first].append((end - middle) / 1e6)
            if first:
                listed.append((middle - start) / 1e6)
    saved = statistics.median(spent[False]) - statistics.median(spent[True])
    return statistics.median(listed), saved


def measure(make: Make, rounds: int) -> tuple[float, list[tuple[str, ...]]]:
    """The bare step in milliseconds, and the rows of the table."""
    loops = {
        (attached, clip): Loop(make, NORMS if attached else None, clip)
        for attached in (False, True)
        for clip in (0.0, SCALES, IDLE)
    }
    share: dict[str, list[float]] = {}
    against: dict[str, list[float]] = {}  # ours over the row it is to be compared with
    bare: list[float] = []
    for round_ in range(WARM + rounds):
        order = list(loops)
        random.Random(round_).shuffle(order)
        found: dict[tuple[bool, float], Parts] = {key: loops[key].step() for key in order}
        if round_ < WARM:
            continue
        step = statistics.mean(part["bare"] for part in found.values())
        bare.append(step)
        alone, free = found[True, 0.0], found[False, 0.0]

        def row(name: str, value: float, limit: float = 0.0, step: float = step) -> None:
            share.setdefault(name, []).append(100 * value / step)
            if limit:
                against.setdefault(name, []).append(value / limit)

        row("one pass over as many bytes", free["flat"])
        row("_foreach_norm alone", free["pass"])
        row("gate, no clip", alone["gate"], free["pass"])
        row("around it", alone["around"])
        for name, clip in (("scales", SCALES), ("need not scale", IDLE)):
            stock, ours = found[False, clip]["clip"], found[True, clip]
            row(f"stock clip that {name}", stock)
            row(f"that clip + gate, attached ({name})", ours["clip"] + ours["gate"], stock)
        row("around it, with clip", found[True, IDLE]["around"])
    for loop in loops.values():
        loop.close()
    middle = statistics.median(bare)
    return middle, [_line(name, share, against, middle) for name in share]


def _line(
    name: str, share: dict[str, list[float]], against: dict[str, list[float]], bare: float
) -> tuple[str, ...]:
    part = statistics.median(share[name])
    x = f"{statistics.median(against[name]):.2f}" if name in against else ""
    return name, f"{part * bare * 10:.0f}", f"{part:.2f}", x


def report(models: Sequence[tuple[str, Make, int]] = MODELS) -> None:
    """A table for each model."""
    head = ("part", "us", "% of bare step", "x _foreach_norm, or stock clip")
    for title, make, rounds in models:
        bare, rows = measure(make, rounds)
        listed, saved = finds(make, rounds)
        lines = [
            ("bare step", f"{bare * 1000:.0f}", "100", ""),
            *rows,
            ("the list of gradients", f"{listed * 1000:.0f}", f"{100 * listed / bare:.2f}", ""),
            ("... saves the optimizer", f"{saved * 1000:.0f}", f"{100 * saved / bare:.2f}", ""),
        ]
        at = machine().partition(";")[0]
        print(table(f"{title} ({at}; CPU time, medians of {rounds} rounds)", lines, head))


def main() -> None:
    torch.set_num_threads(1)
    report()


if __name__ == "__main__":
    main()
