"""Timing for tables that a person reads: CPU time, medians, and how busy the machine was."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

ROUNDS = 9


def cpu_us(call: Callable[[], object], *, calls: int = 300, rounds: int = ROUNDS) -> float:
    """CPU microseconds of one call: median over rounds of the mean within a round."""
    call()
    means = []
    for _ in range(rounds):
        start = time.process_time_ns()
        for _ in range(calls):
            call()
        means.append((time.process_time_ns() - start) / calls / 1000)
    return statistics.median(means)


def per_item_us(
    make: Callable[[], Callable[[], object]], items: int, *, rounds: int = ROUNDS
) -> float:
    """CPU microseconds per item of a call that handles `items`; `make` sets each round up."""
    means = []
    for _ in range(rounds):
        call = make()
        start = time.process_time_ns()
        call()
        means.append((time.process_time_ns() - start) / items / 1000)
    return statistics.median(means)


def machine(rounds: int = ROUNDS) -> str:
    """What the figures were taken on."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f}; CPU time, medians of {rounds} rounds"


def table(title: str, rows: Sequence[tuple[str, ...]], head: tuple[str, ...]) -> str:
    """A plain table; the first column is left-aligned, the others right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def text(line: tuple[str, ...]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    rule = "-" * len(text(head))
    return "\n".join([title, rule, text(head), rule, *(text(row) for row in rows), ""])
