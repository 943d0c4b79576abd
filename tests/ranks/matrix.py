"""The trainer matrix: its cells, a pairwise selection of them, and the table in docs/trainers.md.

chosen = pairwise()                    every pair of values in at least one cell
write({cell: "works", ...})            into the page, between its two marks
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from tests.support import ROOT

FRAMEWORKS = ("plain", "hf", "lightning", "lightning-manual", "accelerate")
LAYOUTS = ("one", "ddp", "fsdp")
PAGE = ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- matrix: written by tests/ranks -->", "<!-- end of the matrix -->"


@dataclass(frozen=True, order=True)
class MatrixCell:
    """One combination."""

    framework: str
    layout: str
    compiled: bool
    accumulation: int
    clip: bool

    @property
    def ranks(self) -> int:
        return 1 if self.layout == "one" else 2

    def args(self, backend: str) -> dict[str, Any]:
        return {
            "framework": self.framework,
            "layout": self.layout,
            "backend": backend if self.compiled else "",
            "accumulation": self.accumulation,
            "clip": 0.7 if self.clip else None,
        }

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        clip = "clip" if self.clip else "no clip"
        return f"{self.framework}-{self.layout}-{how}-{self.accumulation}-{clip}"


VALUES = (FRAMEWORKS, LAYOUTS, (False, True), (1, 4), (False, True))
CELLS = tuple(MatrixCell(*values) for values in itertools.product(*VALUES))


def _pairs(cell: MatrixCell) -> set[tuple[int, Any, int, Any]]:
    values = astuple(cell)
    return {
        (i, values[i], j, values[j]) for i in range(len(values)) for j in range(i + 1, len(values))
    }


def pairwise() -> tuple[MatrixCell, ...]:
    """Greedy: the cell that brings most new pairs, the first of equals."""
    left = set().union(*map(_pairs, CELLS))
    chosen = []
    while left:
        best = max(CELLS, key=lambda cell: len(_pairs(cell) & left))
        chosen.append(best)
        left -= _pairs(best)
    return tuple(chosen)


NAMES = {
    "plain": "plain loop",
    "hf": "HF Trainer",
    "lightning": "Lightning, automatic",
    "lightning-manual": "Lightning, manual",
    "accelerate": "accelerate",
}


def table(results: Mapping[MatrixCell, str]) -> str:
    """A row for framework and layout, a column for the rest; notes below."""
    columns = [MatrixCell("", "", *rest) for rest in itertools.product(*VALUES[2:])]
    head = [
        f"{'compiled' if c.compiled else 'eager'}, {c.accumulation}{', clip' if c.clip else ''}"
        for c in columns
    ]
    notes: list[str] = []
    lines = [
        "| trainer | ranks | " + " | ".join(head) + " |",
        "|---|---|" + "---|" * len(head),
    ]
    layouts = {"one": "one process", "ddp": "DDP, 2", "fsdp": "FSDP2, 2"}
    for framework, layout in itertools.product(FRAMEWORKS, LAYOUTS):
        row = []
        for column in columns:
            cell = MatrixCell(framework, layout, column.compiled, column.accumulation, column.clip)
            result = results.get(cell, "not run")
            if result not in ("works", "not run"):
                if result not in notes:
                    notes.append(result)
                result = f"limit {notes.index(result) + 1}"
            row.append(result)
        lines.append(f"| {NAMES[framework]} | {layouts[layout]} | " + " | ".join(row) + " |")
    told = [f"{i + 1}. {note}" for i, note in enumerate(notes)]
    return "\n".join([*lines, *([""] if told else []), *told])


def write(results: Mapping[MatrixCell, str]) -> None:
    """Into docs/trainers.md, which keeps everything else."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", encoding="utf-8")
