"""A run that ends and is started again: what was done to it is known, what was learned may be.

The processes are played by sessions one after another on fresh objects; tests/e2e/test_restart.py
kills real ones. Files are read here with json and hashlib alone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
import sentinel_hooks
from sentinel.cli.main import main
from sentinel.core.policy import Policy
from sentinel.core.types import Protection
from sentinel.traces.places import RUN_DIR_VARIABLE
from sentinel.traces.replay import replay
from sentinel_hooks import AttachError, Session, Snapshots, TrainingHalted
from tests.hooks.worlds import Net
from tests.support.ledgers import read_ledger

pytestmark = pytest.mark.torch

POLICY = Policy.parse(
    """
# The losses are spoiled here, not the weights: a canary would blame the data.
[canary]
mode = "off"
[spike]
window = 24
warmup = 12
[grad_norm]
window = 24
warmup = 12
[rollback]
budget = 2
window = 400
quiet = 8
relapse = 0
[lr]
hold = 6
rewarm = 10
[snapshots]
ram_every = 8
confirm = 4
disk_at = []
disk_every = 8
""",
    "quick",
)
HALTING = Policy.parse(
    "[rollback]\nbudget = 0\nhalt_when_spent = true\n[snapshots]\nram_every = 8\nconfirm = 4\n"
    "[canary]\nmode = 'off'\n",
    "halting",
)
RAM_ONLY = Snapshots(disk=False)


class Process:
    """One process of a run."""

    def __init__(
        self, run_dir: Path, *, module: nn.Module | None = None, seed: int = 5, **options: Any
    ) -> None:
        torch.manual_seed(5)
        self.g = torch.Generator().manual_seed(seed)
        self.model: nn.Module = module if module is not None else Net(dropout=0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.rates: list[float] = []
        self.session: Session = sentinel_hooks.attach(
            model=self.model,
            optimizer=self.optimizer,
            policy=options.pop("policy", POLICY),
            sidecar=None,
            run_dir=run_dir,
            run_id=options.pop("run_id", "r7"),
            snapshots=options.pop("snapshots", RAM_ONLY),
            **options,
        )

    def forward(self, spoil: float = 1.0) -> Any:
        self.optimizer.zero_grad()
        x = torch.randn(32, 12, generator=self.g)
        y = x.sum(1, keepdim=True).sin() + 2 + 0.3 * torch.randn(32, 1, generator=self.g)
        return self.model(x, y) * spoil

    def step(self, spoil: float = 1.0) -> None:
        self.forward(spoil).backward()
        self.optimizer.step()
        last = self.session._last
        self.rates.append(last.lr_factor if last is not None else 0.0)

    def steps(self, count: int) -> Process:
        for _ in range(count):
            self.step()
        return self

    def go_wrong(self) -> None:
        """The third loss in a row that is no number: a rollback, restored at the next forward."""
        for _ in range(3):
            self.step(float("nan"))

    def checkpoint(self) -> Any:
        return torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, torch.Tensor) else v,
            (self.model.state_dict(), self.optimizer.state_dict()),
        )

    def load(self, checkpoint: Any) -> Process:
        self.model.load_state_dict(checkpoint[0])
        self.optimizer.load_state_dict(checkpoint[1])
        return self

    def die(self) -> None:
        """As a killed process ends: nothing of ours runs any more."""
        session = self.session
        session._keeper._enabled = False
        session._disk.enabled = False
        session._chronicle.recorder = None
        session.detach()


def on_disk(run_dir: Path, run: str = "r7") -> dict[str, Any]:
    """The ledger and its tail, as anybody can read them."""
    return read_ledger(run_dir / run)


def spots(process: Process) -> str:
    return "\n".join(map(str, process.session.status().blind_spots))


# ---------------------------------------------------------------- written in time


def test_the_ledger_is_on_disk_before_a_rollback_is_carried_out(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(20)
    one.go_wrong()
    seen: list[Any] = []
    restore = one.session._store.restore

    def watched(step: int) -> Any:
        seen.append(on_disk(tmp_path)["ledger"])
        return restore(step)

    one.session._store.restore = watched  # type: ignore[method-assign]
    one.step()
    [ledger] = seen
    assert ledger["pending_restore"] == ledger["last_target"] is not None
    assert ledger["rollbacks"] == [22]
    assert ledger["attempt"] == 0
    after = on_disk(tmp_path)["ledger"]
    assert (after["attempt"], after["pending_restore"]) == (1, None)
    assert after["lr"]["factor"] == 0.5
    one.session.detach()


def test_quiet_steps_are_not_written_one_by_one(tmp_path: Path) -> None:
    one = Process(tmp_path, snapshots=Snapshots(ram=False, disk=False))
    one.step()
    directory = tmp_path / "r7"
    ledger = (directory / "ledger").read_bytes()
    for _ in range(99):
        one.step()
    assert (directory / "ledger").read_bytes() == ledger
    assert len((directory / "ledger.tail").read_text().split()) <= 2 * 4
    assert on_disk(tmp_path)["step"] >= 100 - 33
    one.session.detach()
    assert on_disk(tmp_path)["step"] == 100


def test_a_disk_that_takes_no_ledger_hurts_no_step_and_it_is_told(tmp_path: Path) -> None:
    one = Process(tmp_path, record=False).steps(20)
    directory = tmp_path / "r7"
    shutil.rmtree(directory)
    directory.write_text("in the way")
    one.go_wrong()
    one.steps(2)
    status = one.session.status()
    assert dict(status.counters.rollbacks) == {"nonfinite_loss/restored": 1}
    assert dict(status.internal_errors) == {}
    assert "the ledger cannot be written" in spots(one)
    directory.unlink()
    one.go_wrong()
    one.step()
    assert "the ledger cannot be written" not in spots(one)
    assert on_disk(tmp_path)["step"] > 24
    assert on_disk(tmp_path)["ledger"]["attempt"] == 1
    one.session.detach()


def test_a_rollback_that_broke_half_way_is_not_begun_again(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(20)
    one.go_wrong()
    seen: list[int] = []

    def breaks(step: int) -> Any:
        seen.append(step)
        raise RuntimeError("half of it is copied")

    one.session._store.restore = breaks  # type: ignore[method-assign]
    one.steps(4)
    assert len(seen) == 1
    assert dict(one.session.status().counters.rollbacks) == {"nonfinite_loss/failed": 1}
    one.session.detach()


# ---------------------------------------------------------------- found again


def test_budget_cooldown_cut_incident_and_attempt_are_as_they_were_left(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(20)
    one.go_wrong()
    one.steps(4)
    left = one.session.state
    weights = one.checkpoint()
    one.die()
    two = Process(tmp_path).load(weights)
    two.step()
    found = two.session.state
    assert found.step == left.step + 1
    for name in ("attempt", "rollbacks", "last_rollback", "last_target", "commands", "rules"):
        assert getattr(found.ledger, name) == getattr(left.ledger, name), name
    assert (left.ledger.lr.hold, found.ledger.lr.hold) == (2, 1)
    assert two.rates == [0.5]
    assert [(i.number, i.key) for i in found.ledger.incidents] == [(1, "instability")]
    two.steps(12)
    assert two.rates[2:5] == pytest.approx([0.5 + 0.5 * k / 11 for k in (1, 2, 3)])
    two.session.detach()


def test_a_crash_loop_cannot_refill_a_budget(tmp_path: Path) -> None:
    rollbacks, checkpoint = 0, None
    for _ in range(5):
        process = Process(tmp_path)
        if checkpoint is not None:
            process.load(checkpoint)
        process.steps(20)
        checkpoint = checkpoint or process.checkpoint()
        process.go_wrong()
        process.forward()
        rollbacks = len(process.session.state.ledger.rollbacks)
        process.die()
    assert rollbacks == 2
    assert process.session.state.ledger.stopped
    ended = on_disk(tmp_path)
    assert ended["ledger"]["attempt"] == 2
    assert len(ended["lives"]) == 5
    assert ended["lives"][-1]["parent"] == ended["lives"][-2]["incarnation"]


def test_a_second_process_without_the_id_is_another_run(tmp_path: Path) -> None:
    one = Process(tmp_path, run_id=None).steps(20)
    one.go_wrong()
    one.step()
    one.session.detach()
    two = Process(tmp_path, run_id=None).steps(1)
    assert two.session.run_id != one.session.run_id
    assert two.session.state.ledger.rollbacks == ()
    two.session.detach()


@pytest.mark.parametrize(
    ("variable", "value", "continues"),
    [
        ("SENTINEL_RUN_ID", "r9", True),
        ("TORCHELASTIC_RUN_ID", "r9", True),
        ("TORCHELASTIC_RUN_ID", "none", False),
    ],
)
def test_the_environment_and_the_launcher_name_the_run(
    variable: str, value: str, continues: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    one = Process(tmp_path, run_id=None).steps(3)
    one.session.detach()
    two = Process(tmp_path, run_id=None)
    assert (two.session.state.step == 3) is continues
    assert (two.session.run_id == value) is continues
    two.session.detach()


def test_the_environment_says_where_runs_lie_unless_the_call_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the Kubernetes Job said so to nobody, and runs lay off its volume."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)

    def folder(**given: Any) -> Path:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sentinel.attach(
            model=model, optimizer=optimizer, sidecar=None, run_id="r1", **given
        ) as session:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            del session
        (found,) = tmp_path.glob("*/r1")
        shutil.rmtree(found.parent)
        return found.parent

    assert folder() == tmp_path / "sentinel-runs"
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "volume"))
    assert folder() == tmp_path / "volume"
    assert folder(run_dir="mine") == tmp_path / "mine"


@pytest.mark.parametrize("variable", ["SENTINEL_RUN_ID", "TORCHELASTIC_RUN_ID"])
def test_two_live_sessions_of_a_launch_are_two_runs_and_each_is_found_again(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the second attach() of a torchrun job was refused, though nobody chose an id."""
    monkeypatch.setenv(variable, "r9")
    for steps in (0, 3):
        one, two = Process(tmp_path, run_id=None), Process(tmp_path, run_id=None)
        assert (one.session.run_id, two.session.run_id) == ("r9", "r9-2")
        assert two.session.state.step == steps
        with pytest.raises(AttachError, match="another session in this process"):
            Process(tmp_path, run_id="r9")
        for process in (one, two):
            process.steps(3).session.detach()


# ---------------------------------------------------------------- whose weights are these?


def test_statistics_come_back_with_the_weights_they_belong_to(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(30)
    assert one.session.status().protection is Protection.ARMED
    one.session.detach()
    stats, weights = one.session.state.stats, one.checkpoint()
    two = Process(tmp_path).load(weights)
    two.forward()
    assert two.session.state.stats == stats
    assert "the weights are those of step 30" in str(two.session.status())
    assert spots(two) == ""
    two.step()
    assert two.session.status().protection is Protection.ARMED
    two.session.detach()


def test_unknown_weights_are_noticed_and_statistics_start_cold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Process(tmp_path).steps(13)
    odd = one.checkpoint()
    one.steps(17)
    one.session.detach()
    with caplog.at_level(logging.WARNING):
        two = Process(tmp_path).load(odd).steps(1)
    assert "these weights are none that this run has seen" in spots(two)
    assert "an older checkpoint" in caplog.text
    assert two.session.status().protection is Protection.WARMING
    assert two.session.state.ledger.counters.steps == 31
    two.session.detach()
    assert on_disk(tmp_path)["lives"][-1]["from_step"] is None


def test_an_older_state_of_the_run_is_recognised_as_older(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(16)
    older = one.checkpoint()
    loss = one.forward()  # the safe point of step 16: its snapshot is taken
    stats = one.session.state.stats
    loss.backward()
    one.optimizer.step()
    one.steps(17)
    one.session.detach()
    two = Process(tmp_path).load(older)
    two.forward()
    assert two.session.state.stats == stats
    assert two.session.state.step == 34  # attempted steps are counted on
    assert "step 16, older than the newest known, of step 34" in str(two.session.status())
    two.session.detach()


def test_another_model_is_noticed_and_no_snapshot_of_the_old_one_is_used(tmp_path: Path) -> None:
    one = Process(tmp_path, snapshots=Snapshots()).steps(30)
    one.session.detach()
    two = Process(tmp_path, snapshots=Snapshots(), module=Net(dropout=0.0, norm=False))
    two.forward()
    assert "this is another model than the run had" in spots(two)
    assert [s.step for s in two.session.state.ledger.snapshots] == [30]  # its own, just taken
    two.steps(2)
    two.session.detach()


def test_one_changed_weight_is_another_fingerprint_and_wrappers_are_not(tmp_path: Path) -> None:
    from sentinel_hooks.ledger_file import fingerprint

    one = Process(tmp_path)
    target = one.session._target
    print_ = fingerprint(target)
    assert fingerprint(target) == print_
    with torch.no_grad():
        next(one.model.parameters()).mul_(1 + 1e-6)
    changed = fingerprint(target)
    assert changed != print_
    assert changed.split("-")[0] == print_.split("-")[0]
    one.session.detach()


# ---------------------------------------------------------------- a rollback cut short


def test_a_rollback_that_died_with_its_snapshot_counts_as_failed_and_cuts(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(20)
    one.go_wrong()
    one.session.state  # noqa: B018  settles: the rollback is decided, on disk, and not done
    weights = one.checkpoint()  # the damaged way goes on
    one.die()
    assert on_disk(tmp_path)["ledger"]["pending_restore"] is not None
    two = Process(tmp_path).load(weights)
    two.step()
    ledger = two.session.state.ledger
    assert ledger.pending_restore is None
    assert ledger.rollbacks == (22,)
    assert dict(ledger.counters.rollbacks) == {"nonfinite_loss/failed": 1}
    assert two.rates == [0.5]
    assert "the process ended before it was restored" in ledger.incidents[-1].summary
    two.session.detach()
    assert replay(tmp_path / "r7").identical


def test_started_again_from_its_target_the_rollback_is_done(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(16)
    target = one.checkpoint()
    loss = one.forward()
    stats = one.session.state.stats
    loss.backward()
    one.optimizer.step()
    one.steps(5)
    one.go_wrong()
    assert one.session.state.ledger.pending_restore == 16
    one.die()
    two = Process(tmp_path).load(target)
    two.forward()
    ledger = two.session.state.ledger
    assert (ledger.attempt, ledger.pending_restore, ledger.last_target) == (1, None, 16)
    assert ledger.lr.factor == 0.5
    assert two.session.state.stats.spike == stats.spike
    two.session.detach()
    assert replay(tmp_path / "r7").identical


def test_a_rollback_cut_short_is_done_from_disk_when_its_way_goes_on(tmp_path: Path) -> None:
    both = Snapshots(ram=False)
    one = Process(tmp_path, snapshots=both).steps(8)
    one.session._disk.wait()
    held = one.checkpoint()
    one.step()  # the snapshot of step 8
    one.session._disk.wait()
    one.steps(6)  # ... is healthy
    bad = one.checkpoint()
    one.session._saving.remember()  # as a snapshot of this moment would
    one.go_wrong()
    assert one.session.state.ledger.pending_restore == 8
    one.session._disk.close()
    one.die()
    two = Process(tmp_path, snapshots=both).load(bad)
    two.session._maybe_safe_point()
    ledger = two.session.state.ledger
    assert (ledger.attempt, ledger.pending_restore, ledger.last_target) == (1, None, 8)
    for name, value in two.model.state_dict().items():
        assert torch.equal(value, held[0][name]), name
    two.steps(2)
    two.session.detach()
    assert replay(tmp_path / "r7").identical


# ---------------------------------------------------------------- halted, paused, damaged


def test_a_halt_leaves_a_marker_and_attach_refuses_until_it_is_cleared(tmp_path: Path) -> None:
    one = Process(tmp_path, policy=HALTING).steps(10)
    one.step(float("nan"))
    one.step(float("nan"))
    with pytest.raises(TrainingHalted) as halted:
        one.step(float("nan"))
    assert halted.value.code == 86
    marker = tmp_path / "r7" / "HALTED"
    said = json.loads(marker.read_text())
    assert (said["run"], said["step"], said["exit_code"]) == ("r7", 12, 86)
    assert [row["loss"] for row in said["last_steps"][-3:]] == ["nan", "nan", "nan"]
    assert on_disk(tmp_path)["ledger"]["stopped"]
    one.die()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = dict(vars(model))
    with pytest.raises(AttachError, match=r"r7 was halted at step 12 .*HALTED.*sentinel resume"):
        sentinel_hooks.attach(
            model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path, run_id="r7"
        )
    assert dict(vars(model)) == hooks
    assert main(["resume", "r7", "--run-dir", str(tmp_path)]) == 0
    assert not marker.exists()
    assert main(["resume", "r7", "--run-dir", str(tmp_path)]) == 2
    two = Process(tmp_path, policy=HALTING).steps(2)
    assert two.session.state.step == 15
    two.session.detach()


def test_nobody_catches_a_halt_and_the_process_ends_with_86(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {os.getcwd()!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.hooks.test_restart import HALTING, Process
one = Process(Path({str(tmp_path)!r}), policy=HALTING)
for step in range(20):
    one.step(float("nan") if step >= 10 else 1.0)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 86, ended.stderr
    assert "halted run=r7 step=12" in ended.stderr


def test_a_halt_saves_the_weights_as_evidence_that_no_rollback_uses(tmp_path: Path) -> None:
    one = Process(tmp_path, policy=HALTING, snapshots=Snapshots()).steps(10)
    with pytest.raises(TrainingHalted):
        one.go_wrong()
    one.session.detach()
    [saved] = (tmp_path / "r7" / "snapshots").iterdir()
    assert "13" in saved.name
    assert (saved / "UNHEALTHY").exists()


def test_the_pause_file_pauses_and_its_pause_ends_with_it(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(9)
    (tmp_path / "r7" / "PAUSE").touch()
    one.steps(9)
    assert "paused" in one.session.status().why
    one.step(float("nan"))
    assert one.session.state.ledger.counters.skipped == ()
    one.die()
    two = Process(tmp_path).steps(1)
    assert "paused" in two.session.status().why
    two.die()
    (tmp_path / "r7" / "PAUSE").unlink()
    three = Process(tmp_path).steps(9)
    assert three.session.state.ledger.automation
    three.session.detach()


def test_a_damaged_ledger_is_never_used_and_that_is_told(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(20)
    one.session.detach()
    path = tmp_path / "r7" / "ledger"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    two = Process(tmp_path).steps(1)
    assert two.session.state.step == 1
    assert "is damaged: its checksum does not match" in spots(two)
    assert (tmp_path / "r7" / "ledger.damaged-0").read_bytes() == bytes(data)
    two.session.detach()
    assert on_disk(tmp_path)["step"] == 1


def test_a_torn_tail_line_is_passed_over_and_the_one_before_counts(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(20)
    one.die()
    tail = tmp_path / "r7" / "ledger.tail"
    before = on_disk(tmp_path)["step"]
    assert before == 16  # of the last snapshot
    with tail.open("ab") as file:
        file.write(tail.read_bytes()[: len(tail.read_bytes()) // 2].splitlines()[1][:99])
    two = Process(tmp_path)
    assert two.session.state.step == before
    two.steps(9)
    two.die()
    assert on_disk(tmp_path)["step"] > before
    tail.write_bytes(tail.read_bytes().replace(b'","step":', b'","step":9'))
    three = Process(tmp_path)
    assert three.session.state.step == on_disk(tmp_path)["step"] < 90
    three.session.detach()


def test_a_tail_of_another_ledger_does_not_count(tmp_path: Path) -> None:
    one = Process(tmp_path).steps(20)
    tail = (tmp_path / "r7" / "ledger.tail").read_bytes()
    one.session.detach()
    (tmp_path / "r7" / "ledger.tail").write_bytes(tail)
    two = Process(tmp_path)
    assert two.session.state.step == 20
    two.session.detach()


# ---------------------------------------------------------------- one at a time


def test_a_second_live_process_with_the_id_is_refused_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    one = Process(tmp_path).steps(2)
    with pytest.raises(AttachError, match="r7 is being trained by another session in this process"):
        Process(tmp_path)
    script = f"""
import sys
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from tests.hooks.test_restart import Process
Process(Path({str(tmp_path)!r}))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert f"r7 is being trained by process {os.getpid()} on " in ended.stderr
    one.step()
    one.session.detach()
    two = Process(tmp_path)
    assert two.session.state.step == 3
    two.session.detach()


def test_weights_that_cannot_be_read_cost_the_statistics_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Process(tmp_path).steps(20)
    one.go_wrong()
    one.step()
    weights = one.checkpoint()
    one.session.detach()

    def broken(target: Any) -> str:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("sentinel_hooks.saving.fingerprint", broken)
    two = Process(tmp_path).load(weights).steps(8)
    assert two.session.state.ledger.rollbacks == (22,)
    assert two.session.status().healthy == (24,)
    assert "none that this run has seen" in spots(two)
    two.go_wrong()
    two.step()
    assert two.session.state.step == 24 + 8 + 4
    two.session.detach()
