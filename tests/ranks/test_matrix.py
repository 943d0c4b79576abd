"""Every trainer, alone and on two ranks: unharmed, a NaN skipped, a divergence rolled back.

Each cell runs three times: without sentinel; with it and no fault, bitwise the same; with it, a NaN
gradient on rank 1 at NAN_AT and the weights of all ranks damaged before DAMAGE_AT. A cell that the
framework itself cannot run without us is that framework's limit, in its own words.

`make test-full` runs all cells and writes the table in docs/trainers.md; otherwise a pairwise
selection runs. Compiled cells use the backend aot_eager: hooks meet Dynamo and AOTAutograd as with
any other, and inductor's C++ compiler would take an hour; three cells run with inductor too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest

from tests.ranks import judge
from tests.ranks.matrix import CELLS, VALUES, MatrixCell, pairwise, table, write
from tests.support import require
from tests.support.ranks import Ranks, Report
from tests.support.trainers import frameworks_present

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

CELL = "tests.support.ranks.cells:cell"
BACKEND = "aot_eager"
NAN_AT, DAMAGE_AT, STEPS = 10, 26, 40
# What a framework cannot do by itself: framework, layout, compiled -> a part of its own error.
LIMITS: dict[tuple[str, str, bool], str] = {
    (name, "fsdp", True): "Using a compiled model is incompatible with the current strategy"
    for name in ("lightning", "lightning-manual")
}


@pytest.fixture(scope="module")
def frameworks() -> Iterator[Ranks]:
    require(frameworks_present(), "transformers, lightning and accelerate")
    names = ("transformers.trainer", "lightning.pytorch", "accelerate", "tests.support.ranks.cells")
    with Ranks(preload=names) as found:
        yield found


class Runner:
    """Runs a cell with a backend of torch.compile."""

    def __init__(self, ranks: Ranks, backend: str) -> None:
        self._ranks, self._backend = ranks, backend

    def __call__(self, cell: MatrixCell, **more: Any) -> Report:
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        args = {**cell.args(self._backend), **more}
        return self._ranks.run(CELL, cell.ranks, args=args, bound_s=400, environment=environment)


def checked(ranks: Ranks, cell: MatrixCell, backend: str = BACKEND) -> str:
    """ "works", or the framework's own limit; raises AssertionError where we are to blame."""
    run = Runner(ranks, backend)
    bare = run(cell, steps=16)
    if any(r.exit for r in bare.ranks):
        judge.none_hangs(bare)
        text = next(r.text for r in bare.ranks if r.exit)
        limit = text.strip().splitlines()[-1].split(". ")[0][:200]
        known = LIMITS.get((cell.framework, cell.layout, cell.compiled), "")
        assert known, f"{cell} does not run without us: {text}"
        assert known in text, f"{cell} does not run without us, and not for {known!r}: {text}"
        return limit
    calm = run(cell, steps=16, attach=True)
    calm.ended_well()
    for with_us, without in zip(calm.ranks, bare.ranks, strict=True):
        end = with_us.last("end")
        assert end["fingerprint"] == without.last("end")["fingerprint"]
        assert end["sharded"] == (cell.layout == "fsdp"), f"parameters are {end['kind']}"
        assert end["ranks"] == cell.ranks
        assert not end["status"]["errors"], end["status"]["text"]
        assert end["status"]["skipped"] == end["status"]["rollbacks"] == {}
        assert "states differ" not in with_us.text
    trouble = run(cell, steps=STEPS, nan_at=[NAN_AT], damage_at=DAMAGE_AT, attach=True)
    trouble.ended_well()
    judge.together(trouble, replicated=cell.layout == "ddp")
    for rank in trouble.ranks:
        assert "states differ" not in rank.text
        acted = judge.actions(rank)
        held = [t for t, (h, _, _) in acted.items() if h]
        assert [t for t in held if t < DAMAGE_AT] == [NAN_AT], rank.last("end")["status"]["text"]
        back = {t: k for t, (_, _, k) in acted.items() if k is not None and t > DAMAGE_AT}
        assert back, rank.last("end")["status"]["text"]
        assert all(0 <= k < DAMAGE_AT for k in back.values()), back
        assert not rank.last("end")["status"]["errors"], rank.last("end")["status"]["text"]
    return "works"


@pytest.mark.parametrize("cell", pairwise(), ids=str)
def test_a_cell_of_the_matrix(frameworks: Ranks, cell: MatrixCell) -> None:
    checked(frameworks, cell)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_all_cells_of_the_matrix_and_the_table_in_the_docs(frameworks: Ranks) -> None:
    results, failed = {}, {}
    for cell in CELLS:
        try:
            results[cell] = checked(frameworks, cell)
        except AssertionError as error:
            failed[cell] = str(error)
            results[cell] = "FAILS"
        print(f"{len(results)}/{len(CELLS)} {cell}: {failed.get(cell, results[cell])}", flush=True)
    if not failed:
        write(results)
    assert not failed, "\n".join(f"{cell}: {why[:600]}" for cell, why in failed.items())


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("framework", "layout"), [("plain", "ddp"), ("plain", "fsdp"), ("hf", "ddp")]
)
def test_a_cell_compiled_by_inductor(frameworks: Ranks, framework: str, layout: str) -> None:
    assert checked(frameworks, MatrixCell(framework, layout, True, 1, True), "inductor") == "works"


def test_the_selection_holds_each_pair_of_values() -> None:
    chosen = [astuple(cell) for cell in pairwise()]
    assert len(chosen) < 24
    for i, j in itertools.combinations(range(len(VALUES)), 2):
        assert {(c[i], c[j]) for c in chosen} == set(itertools.product(VALUES[i], VALUES[j]))


def test_the_table_shows_limits_below_it() -> None:
    text = table({CELLS[0]: "works", CELLS[1]: "it cannot"})
    assert "| works | limit 1 |" in text
    assert text.endswith("1. it cannot")
