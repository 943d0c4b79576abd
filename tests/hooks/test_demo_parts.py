"""The demo's parts, without training: text, faults, what is printed."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sentinel_hooks.demo.__main__ as demo_main
from sentinel_hooks.demo import faults, table
from sentinel_hooks.demo.__main__ import main, parse, plan
from sentinel_hooks.demo.corpus import Corpus, DemoError, garbage
from sentinel_hooks.demo.model import GPT, Shape
from sentinel_hooks.demo.runner import Progress, Run, run_all
from sentinel_hooks.demo.sidecar import total
from sentinel_hooks.demo.train import Settings

pytestmark = pytest.mark.torch

TINY = Shape(width=8, heads=2, layers=1, rows=3, length=4)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.load()


def test_whole_files_are_held_out(tmp_path: Path) -> None:
    for number in range(32):
        (tmp_path / f"m{number}.py").write_bytes(bytes([number]) * 50_000)
    corpus = Corpus.load(tmp_path)
    train, held_out = set(corpus.train.tolist()), set(corpus.held_out.tolist())
    assert not train & held_out
    assert train | held_out == set(range(32))
    assert len(held_out) == 4


def test_a_python_without_its_sources_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(DemoError, match="1,000,000 bytes"):
        Corpus.load(tmp_path)


def test_a_batch_depends_on_seed_and_step_alone(corpus: Corpus) -> None:
    inputs, targets = corpus.batch(3, 7, rows=5, length=16)
    torch.rand(4)
    again, _ = corpus.batch(3, 7, rows=5, length=16)
    other, _ = corpus.batch(3, 8, rows=5, length=16)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_garbage_has_no_structure() -> None:
    inputs, _ = garbage(0, 1, rows=200, length=32)
    counts = torch.bincount(inputs.flatten(), minlength=256)
    assert counts.min() > 0


def test_each_fault_strikes_when_it_is_due_and_only_then() -> None:
    model = GPT(TINY)
    batch = (torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long))
    rate = faults.make("lr", 10)
    assert [rate.learning_rate(s) for s in (9, 10, 14, 15)] == [1.0, 30.0, 30.0, 1.0]
    data = faults.make("garbage", 10)
    struck = [s for s in range(5, 40) if not torch.equal(data.batch(s, batch, 0)[0], batch[0])]
    assert struck == list(range(10, 30))
    weights = faults.make("weights", 10)
    before = model.blocks[0].qkv.weight.detach().clone()
    weights.before_step(9, model)
    assert torch.equal(model.blocks[0].qkv.weight, before)
    weights.before_step(10, model)
    assert not torch.equal(model.blocks[0].qkv.weight, before)


def test_the_nan_is_in_one_gradient_value() -> None:
    model = GPT(Shape(width=8, heads=2, layers=2, rows=3, length=4))
    batch = (torch.zeros(3, 4, dtype=torch.long), torch.ones(3, 4, dtype=torch.long))
    model(*batch).backward()
    faults.make("nan", 10).after_backward(9, model)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    faults.make("nan", 10).after_backward(10, model)
    assert sum(int(p.grad.isnan().sum()) for p in model.parameters()) == 1


def test_fault_steps_come_from_the_seed_and_do_not_depend_on_the_worlds_chosen() -> None:
    draws = [faults.draw_steps(seed) for seed in range(20)]
    assert draws[3] == faults.draw_steps(3)
    assert len({draw["nan"] for draw in draws}) > 5
    assert all(faults.EARLIEST <= s <= faults.LATEST for draw in draws for s in draw.values())
    chosen = plan(parse(["--worlds", "weights", "--seed", "3"]), None, Path("x"))
    assert [(s.fault, s.protected) for s in chosen] == [
        ("none", False),
        ("weights", False),
        ("weights", True),
    ]
    assert chosen[1].fault_step == draws[3]["weights"]


def test_all_worlds_are_ten_runs_in_pairs() -> None:
    everything = plan(parse([]), None, Path("x"))
    assert [(s.fault, s.protected) for s in everything] == [
        (key, how) for key in ("none", "nan", "lr", "garbage", "weights") for how in (False, True)
    ]


def test_settings_travel_as_text() -> None:
    settings = Settings(
        fault="nan", fault_step=140, protected=True, seed=1, steps=240, run_id="r", run_dir="d"
    )
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--worlds", "nan,flood"], "flood"),
        (["--steps", "100"], "must be at least"),
        (["--json", "/no/such/folder/demo.json"], "no folder"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_status_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_the_share_recovered_counts_a_nan_as_guessing() -> None:
    assert table.recovered(3.0, 2.2, 2.0) == pytest.approx(0.8)
    assert table.recovered(math.nan, 2.0, 2.0) == pytest.approx(1.0)
    assert table.recovered(3.0, math.nan, 2.0) < 0
    assert table.recovered(2.0, 2.0, 2.0) is None


def test_actions_are_told_in_plain_words() -> None:
    skip = {"action": "skip_step", "step": 1, "reason": "", "rule": "loss_outlier"}
    back = {"action": "rollback", "step": 4, "reason": "", "rule": "loss_spike", "target": 100}
    assert table.actions_in_words([], 1.0) == "nothing was done"
    assert table.actions_in_words([skip] * 3 + [back], 0.5) == (
        "skipped 3 batches (loss far above its baseline), rolled back to step 100 (loss spike "
        "lasts), learning rate x0.5, then re-warmed"
    )


def test_metrics_are_summed_over_the_series_with_the_labels_asked_for() -> None:
    scrape = {
        'sentinel_decisions_total{run="a",source="sidecar"}': 3.0,
        'sentinel_decisions_total{run="b",source="sidecar"}': 4.0,
        'sentinel_decisions_total{run="b",source="trainer"}': 5.0,
        'sentinel_decisions_total_created{run="b",source="sidecar"}': 99.0,
    }
    assert total(scrape, "sentinel_decisions_total") == 12.0
    assert total(scrape, "sentinel_decisions_total", source="sidecar") == 7.0


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_that_breaks_ends_the_demo_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = Shape(width=8, heads=3, layers=1)  # heads that do not divide the width
    settings = Settings(
        fault="nan",
        fault_step=140,
        protected=False,
        seed=0,
        steps=240,
        run_id="r",
        run_dir=str(tmp_path),
        shape=broken,
    )
    with pytest.raises(DemoError, match=r"(?s)'one NaN gradient, unprotected' broke.*RuntimeError"):
        run_all([settings] * 3, tmp_path, Progress(io.StringIO()))


def test_a_broken_demo_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise DemoError("a run broke")

    monkeypatch.setattr(demo_main, "run_all", broken)
    assert main(["--embedded"]) == 1
    assert "a run broke" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def active_run() -> Run:
    settings = Settings(
        fault="nan", fault_step=140, protected=True, seed=1, steps=240, run_id="r", run_dir="d"
    )
    process: Any = object()
    return Run(settings, step=119, loss="nan", process=process)


def test_progress_redraws_one_line_on_a_terminal_and_is_sparing_elsewhere() -> None:
    now = [0.0]
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        now[0] = 0.0
        progress = Progress(out, clock=lambda: now[0])
        for _ in range(100):
            now[0] += 0.5
            progress.show([active_run()])
    assert terminal.getvalue().count("\n") == 0
    assert terminal.getvalue().count("\r") == 100
    assert file.getvalue().splitlines() == [
        f"0:{s}  0/1 runs | one NaN gradient, protected 120/240 loss nan" for s in (20, 40)
    ]
