"""Training processes that are killed at a named moment and started again, for tests of restarts.

    python -m tests.support.mortals RUN_DIR PLAN...

Each PLAN is one process of run r7, as `key=value,...`: steps=N (how many it attempts), nan=A-B
(attempts with a loss that is no number), die=MOMENT, load=NAME and save=NAME@ATTEMPT (a checkpoint
of the user's in RUN_DIR). MOMENT is one of: step (before the last step), decided (the rollback is
on disk, not begun), restoring (half of the weights are copied), saving (after the first rollback a
snapshot's files are written, its COMMIT is not), halted (the marker is set, nothing raised). After
each process a line of JSON says how it ended. torch is imported once for all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import sentinel_hooks
from sentinel.core.policy import Policy
from sentinel_hooks import Snapshots
from tests.hooks.worlds import Net

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
window = 1000
quiet = 4
relapse = 0
halt_when_spent = true
[lr]
hold = 6
rewarm = 10
[snapshots]
ram_every = 8
confirm = 4
disk_at = []
disk_every = 8
""",
    "mortal",
)


def kill() -> None:
    """Nothing of this process runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def live(run_dir: Path, plan: dict[str, str]) -> None:
    """One process's life."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(int(plan.get("seed", "2")))
    model = Net(dropout=0.0, norm=plan.get("norm") != "no")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if "load" in plan:
        loaded = torch.load(run_dir / plan["load"])
        model.load_state_dict(loaded[0])
        optimizer.load_state_dict(loaded[1])
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        policy=POLICY,
        sidecar=None,
        run_dir=run_dir,
        run_id="r7",
        snapshots=Snapshots(disk=plan.get("disk") == "yes"),
    )
    arm(session, plan.get("die", ""))
    first, _, last = plan.get("nan", "9999-9999").partition("-")
    save, _, when = plan.get("save", "@-1").partition("@")
    steps = int(plan["steps"])
    for attempt in range(steps):
        if attempt == int(when):
            torch.save([model.state_dict(), optimizer.state_dict()], run_dir / save)
        x = torch.randn(32, 12, generator=g)
        optimizer.zero_grad()
        loss: Any = model(x, x.sum(1, keepdim=True).sin() + 2)
        if int(first) <= attempt <= int(last):
            loss = loss * math.nan
        loss.backward()
        if plan.get("die") == "step" and attempt == steps - 1:
            kill()
        optimizer.step()
        if plan.get("disk") == "yes":
            session._disk.wait()  # saves end where the schedule says, however fast the steps are
    (run_dir / "status.txt").write_text(str(session.status()))
    session.detach()


def arm(session: Any, moment: str) -> None:
    """Have the process killed at that moment."""
    if moment == "decided":
        session._store.restore = lambda step: kill()
    if moment == "restoring":
        copy = torch._foreach_copy_

        def torn(into: list[Any], source: list[Any]) -> None:
            if session._restoring_now:
                half = len(into) // 2
                copy(into[:half], source[:half])
                kill()
            copy(into, source)

        session_restore = session._store.restore

        def restore(step: int) -> Any:
            session._restoring_now = True
            torch._foreach_copy_ = torn
            return session_restore(step)

        session._restoring_now = False
        session._store.restore = restore
    if moment == "saving":
        from sentinel_hooks.snapshots import disk

        write = disk.files.write

        def cut_off(*args: Any, **kwargs: Any) -> Any:
            written = write(*args, **kwargs)
            if session._state.ledger.attempt:
                kill()
            return written

        disk.files.write = cut_off
    if moment == "halted":
        session._saving.save_evidence = kill
        session._disk.enabled = True


def main() -> None:
    """See the module docstring."""
    import torch.distributed.checkpoint  # noqa: F401  once, not in each process

    run_dir = Path(sys.argv[1])
    for text in sys.argv[2:]:
        plan = dict(part.split("=", 1) for part in text.split(","))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(run_dir, plan)
                code = 0
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException as error:
                (run_dir / "error.txt").write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        kept = run_dir / f"ledger-{text_number(run_dir)}"
        kept.mkdir()
        for file in (run_dir / "r7").glob("ledger*"):
            shutil.copy(file, kept)
        error = run_dir / "error.txt"
        said = {"status": os.waitstatus_to_exitcode(status), "ledger": kept.name, "error": ""}
        if error.exists():
            said["error"] = error.read_text()
            error.unlink()
        print(json.dumps(said), flush=True)


def text_number(run_dir: Path) -> int:
    """How many lives have been lived."""
    return len(list(run_dir.glob("ledger-*")))


if __name__ == "__main__":
    main()
