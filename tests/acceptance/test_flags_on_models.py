"""Each flag on a small GPT that really has the illness, and silence on its healthy twin.

The models are in ill_models.py. `python -m tests.acceptance.ill_models` prints the confusion table;
with -s, these tests print its rows.
"""

from __future__ import annotations

import pytest

from tests.acceptance import ill_models
from tests.acceptance.ill_models import ADVISORY, CASES, TWINS, Case, Trial, run

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.flag}: {c.what}")
def test_the_ill_model_is_flagged(case: Case) -> None:
    found = run(case.ill)
    print(f"{case.flag}: {case.what}: {dict(found)}")
    assert case.flag in found


@pytest.mark.parametrize("twin", TWINS, ids=lambda t: next(c.flag for c in CASES if c.twin == t))
def test_the_healthy_twin_raises_no_flag_at_all(twin: Trial) -> None:
    assert run(twin) == {}, [c.what for c in CASES if c.twin == twin]


def test_every_flag_has_an_ill_model() -> None:
    assert {case.flag for case in CASES} == set(ADVISORY)


@pytest.mark.full
def test_the_confusion_table_over_three_seeds() -> None:
    rows = list(ill_models.table(range(100, 103)))
    print("\n".join((ill_models.HEAD, *map(ill_models.line, rows))))
    assert sum(row.missed for row in rows) == 0
    assert [row.false for row in rows if row.false] == []
