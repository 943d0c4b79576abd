"""`sentinel run`: scripts that mention no monitoring are watched, and end as if attached by hand.

The by-hand runs are the same scripts with one line put in before training starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel.traces.reader import Reader
from sentinel.traces.records import StepRecord

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
BY_HAND = {
    "ddp_train.py": (
        "    criterion = nn.CrossEntropyLoss()\n",
        (
            "    import sentinel\n"
            "    session = sentinel.attach(model=model, optimizer=optimizer, sidecar=None)\n"
        ),
    ),
    "hf_train.py": (
        "    trainer = Trained(model=model, args=arguments, train_dataset=Numbers())\n",
        "    import sentinel\n    session = sentinel.attach(trainer, sidecar=None)\n",
    ),
}
FAULT = {"ddp_train.py": {"BAD_ROW": "700"}, "hf_train.py": {"BAD_STEP": "12"}}


def launch(script: Path) -> list[str]:
    return [*(TORCHRUN if script.name.startswith("ddp") else [sys.executable]), str(script)]


def call(
    command: list[str], cwd: Path, environment: dict[str, str] | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done


def sentinel_run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sentinel.cli.main", "run", *arguments]


def weights(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-rank{r}.pt") for r in range(ranks)]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def actions(folder: Path) -> list[tuple[int, str]]:
    """What was done, by the trace of the only run there."""
    (run,) = [p for p in (folder / "sentinel-runs").iterdir() if p.is_dir()]
    return [
        (r.observation.step, r.outcome.executed.name)
        for r in Reader(run)
        if isinstance(r, StepRecord) and r.outcome is not None
    ]


@pytest.mark.parametrize("name", list(BY_HAND))
def test_a_script_that_knows_nothing_of_us_ends_as_if_attached_by_hand(
    name: str, tmp_path: Path
) -> None:
    ranks = 2 if name.startswith("ddp") else 1
    before, line = BY_HAND[name]
    text = (SCRIPTS / name).read_text()
    assert text.count(before) == 1
    changed = tmp_path / name
    changed.write_text(text.replace(before, before + line))
    hand, unasked = tmp_path / "hand", tmp_path / "unasked"
    hand.mkdir()
    unasked.mkdir()
    call([*launch(changed), "out"], hand, FAULT[name])
    done = call(
        [*sentinel_run("--attach"), "--", *launch(SCRIPTS / name), "out"], unasked, FAULT[name]
    )
    for ours, theirs in zip(
        weights(unasked, "out", ranks), weights(hand, "out", ranks), strict=True
    ):
        assert same(ours, theirs)
        assert all(bool(torch.isfinite(t).all()) for t in ours.values() if t.is_floating_point())
    assert actions(unasked) == actions(hand)
    assert sum(action == "SKIP_STEP" for _, action in actions(hand)) >= 1
    assert done.stderr.count("attached to") == ranks
    assert "a sidecar listens on" in done.stderr


def test_without_a_model_nothing_is_done_loudly_and_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "raw.py"
    script.write_text(
        "import torch\n"
        "w = torch.zeros(3, requires_grad=True)\n"
        "o = torch.optim.SGD([w], lr=0.1)\n"
        "for _ in range(3):\n"
        "    o.zero_grad(); ((w - 1) ** 2).sum().backward(); o.step()\n"
        "print(w.tolist())\n"
    )
    plain = call([sys.executable, str(script)], tmp_path)
    watched = call(
        [*sentinel_run("--attach", "--no-sidecar"), "--", sys.executable, str(script)], tmp_path
    )
    assert watched.stdout == plain.stdout
    assert "NOT ATTACHED" in watched.stderr
    assert "no torch.nn.Module in this process holds the parameters of SGD" in watched.stderr
    assert not (tmp_path / "sentinel-runs").exists()


def test_nothing_of_ours_is_imported_while_torch_is_half_imported(tmp_path: Path) -> None:
    """Seen red: stepping imported in sitecustomize, as soon as torch.optim.optimizer was there."""
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys\nimport torch\nprint([m for m in sys.modules if m.startswith('sentinel')])\n"
    )
    done = call(
        [*sentinel_run("--attach", "--no-sidecar"), "--", sys.executable, str(script)], tmp_path
    )
    assert done.stdout == "[]\n"
    (line,) = done.stderr.splitlines()
    assert "torch was imported, but no torch optimizer has made a step" in line


def test_a_script_with_step_hooks_of_its_own_is_watched_and_not_broken_off(tmp_path: Path) -> None:
    """Seen red: the hook that attaches took itself out while torch went through all hooks."""
    script = tmp_path / "hooked.py"
    script.write_text(
        "import torch\n"
        "from torch.optim.optimizer import register_optimizer_step_pre_hook\n"
        "seen = []\n"
        "register_optimizer_step_pre_hook(lambda *_: seen.append(1))\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
        "print(len(seen))\n"
    )
    done = call(
        [*sentinel_run("--attach", "--no-sidecar"), "--", sys.executable, str(script)], tmp_path
    )
    assert done.stdout == "3\n"
    assert "attached to Linear (5 parameters); SGD" in done.stderr


def test_a_compiled_optimizer_step_is_watched_too(tmp_path: Path) -> None:
    """Seen red: dynamo went into attach() itself, which then failed."""
    script = tmp_path / "compiled.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "step = torch.compile(optimizer.step, backend='eager')\n"
        "for i in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    (model(torch.ones(2, 4)).sum() * (float('nan') if i == 2 else 1)).backward()\n"
        "    step()\n"
        "print(bool(torch.isfinite(model.weight).all()))\n"
    )
    done = call(
        [*sentinel_run("--attach", "--no-sidecar"), "--", sys.executable, str(script)], tmp_path
    )
    assert done.stdout == "True\n"
    assert "attached to Linear (5 parameters); SGD" in done.stderr


def test_the_exit_status_is_the_commands_and_its_own_sitecustomize_still_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    done = call(
        [*sentinel_run("--attach", "--no-sidecar"), "--", sys.executable, "-c", "exit(7)"],
        tmp_path,
        {"PYTHONPATH": str(tmp_path)},
        status=7,
    )
    assert done.stdout == "mine\nmine\n"  # sentinel's own process, and the command


GAN = """
import torch
from torch import nn
torch.manual_seed(0)
g = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
d = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
og, od = (torch.optim.Adam(m.parameters(), 1e-3) for m in (g, d))
# attach
for i in range(16):
    fake = g(torch.randn(8, 4))
    of_d = d(fake.detach()).mean() - d(torch.randn(8, 2)).mean()
    od.zero_grad(); of_d.backward(); od.step()
    of_g = -d(fake).mean() * (float("nan") if i == 10 else 1)
    og.zero_grad(); of_g.backward(); og.step()
print([p.sum().item() for m in (g, d) for p in m.parameters()])
"""


RANKS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
g, d = (nn.parallel.DistributedDataParallel(m) for m in (g, d))
def print(what):  # in one write: both ranks have the same pipe
    os.write(1, f"{dist.get_rank()} {what}\\n".encode())
"""
AFTERWARDS = """
alone = nn.Linear(4, 1)
optimizer = torch.optim.SGD(alone.parameters(), 0.1)
for _ in range(20 if dist.get_rank() == 0 else 0):
    optimizer.zero_grad(); alone(torch.ones(2, 4)).sum().backward(); optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gan_whose_generator_steps_later_ends_as_if_attached_by_hand(
    ranks: int, tmp_path: Path
) -> None:
    """Seen red: the discriminator alone was attached, and rolled back for the generator's fault."""
    script, changed = tmp_path / "gan.py", tmp_path / "hand.py"
    text = GAN
    if ranks > 1:
        text = text.replace("og, od", f"{RANKS}og, od").replace("of_d = d(f", "of_d = d.module(f")
        text = text.replace("-d(fake)", "-d.module(fake)") + AFTERWARDS
    script.write_text(text)
    by_hand = "import sentinel\ns = sentinel.attach(model=[d, g], optimizer=[od, og], sidecar=None)"
    changed.write_text(text.replace("# attach", by_hand))
    launch = [sys.executable] if ranks == 1 else TORCHRUN
    hand = call([*launch, str(changed)], tmp_path)
    done = call([*sentinel_run("--attach", "--no-sidecar"), "--", *launch, str(script)], tmp_path)
    assert sorted(done.stdout.splitlines()) == sorted(hand.stdout.splitlines())
    assert "nan" not in done.stdout
    assert done.stderr.count("attached anew, to all that take turns") == ranks
    assert "NOT ATTACHED" not in done.stderr
    # On one rank only: the others do not come to attach, and it does not wait for them.
    unsure = "it is not sure that all 2 ranks step it at the same moment"
    assert (unsure in done.stderr) is (ranks > 1)


@pytest.mark.parametrize(
    ("command", "status", "what"),
    [
        ([sys.executable, "-I", "-c", "exit(3)"], 3, "no Python process of this command has read"),
        ([sys.executable, "-c", "exit(4)"], 4, "no process of it imported torch.optim"),
    ],
)
def test_a_command_of_which_no_process_was_attached_says_so_at_the_end(
    command: list[str], status: int, what: str, tmp_path: Path
) -> None:
    done = call(
        [*sentinel_run("--attach", "--no-sidecar"), "--", *command], tmp_path, status=status
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("sentinel: NOT ATTACHED: no process of this command was watched")
    assert what in line
    unasked = call([*sentinel_run("--no-sidecar"), "--", *command], tmp_path, status=status)
    assert unasked.stderr == ""


def test_a_script_that_attaches_by_itself_is_no_command_that_nobody_watched(
    tmp_path: Path,
) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import torch, sentinel\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "sentinel.attach(model=model, optimizer=optimizer, sidecar=None)\n"
        "model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
    )
    done = call(
        [*sentinel_run("--attach", "--no-sidecar"), "--", sys.executable, str(script)], tmp_path
    )
    assert "the script attaches by itself" in done.stderr
    assert "NOT ATTACHED" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        ([], "run needs a command", 2),
        (["--policy", "observe", "--", "true"], "--policy is for --attach", 2),
        (["--no-sidecar", "--", "no-such-program"], "cannot run 'no-such-program'", 1),
        (["--attach", "--policy", "nowhere.toml", "--", "true"], "nowhere.toml", 1),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_way_out(
    arguments: list[str], message: str, status: int, tmp_path: Path
) -> None:
    done = call(sentinel_run(*arguments), tmp_path, status=status)
    assert message in done.stderr
