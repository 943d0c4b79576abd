"""Small groups of real gloo ranks that save and restore; torch is imported once for all of them.

    python -m tests.support.crew DIRECTORY

Forks the ranks of one scenario after the other; what every rank said goes to
DIRECTORY/<scenario>.json: {"exits": [...], "said": [{...} or null, ...]}. A scenario that raises
ends with exit 1 and says its traceback under "error".
"""

from __future__ import annotations

import datetime as dt
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # once, not in each child
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sentinel_hooks.snapshots.parts
from sentinel.core.policy import Policy
from sentinel.core.state import Ledger, Snapshot, Stats
from sentinel.traces import snapshots as store
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.snapshots.disk import (
    DiskStore,
    Failed,
    PartWritten,
    Saved,
    Unprepared,
    prepare_resume,
)
from sentinel_hooks.snapshots.ram import RamStore, SnapshotError
from sentinel_hooks.snapshots.shards import is_sharded, local
from sentinel_hooks.target import Target
from tests.hooks.worlds import digest
from tests.support import killer

POLICY = Policy()
WAIT_S = 60.0
STEP = 3  # the snapshot that everybody restores


class Net(nn.Module):
    """Sizes that no number of ranks divides; a norm with buffers; a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.second = nn.Linear(10, 3)  # 3 rows: one of four ranks has none
        self.back = nn.Linear(10, 3)
        self.back.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        return self.second(h) + self.back(h)


class Position:
    """The user's own state, another on every rank; and an average of the weights, spread as they
    are."""

    def __init__(self, rank: int, weight: Tensor) -> None:
        self.seen, self.rank = torch.tensor([float(rank)]), rank
        self.average = weight.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "rank": self.rank, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.rank, self.average = state["seen"], state["rank"], state["average"]


class Run:
    """One rank of a training run: `kind` is plain, ddp, fsdp or hsdp."""

    def __init__(self, kind: str, rank: int, world: int, directory: Path, run: str) -> None:
        torch.manual_seed(1)
        self.kind, self.rank, self.world = kind, rank, world
        self.net = Net()
        self.model: nn.Module = self.net
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.net)
        elif kind in ("fsdp", "hsdp"):
            if kind == "fsdp":
                mesh = init_device_mesh("cpu", (world,))
            else:
                mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "shard"))
            fully_shard(self.net.first, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.position = Position(rank, self.net.first.weight)
        self.target = Target(
            (self.model,), (self.optimizer,), (self.scheduler,), extra_state=(self.position,)
        )
        self.ram = RamStore(self.target, Snapshots(), sharers=world)
        self.directory = directory / run
        self.disk = self.store()

    def store(self, **config: Any) -> DiskStore:
        return DiskStore(
            self.target,
            Snapshots(**config),
            self.directory,
            run=self.directory.name,
            policy=POLICY,
            rank=self.rank,
            world=self.world,
        )

    def train(self, steps: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x = torch.randn(8, 6, generator=g)
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.position.seen += 1
            with torch.no_grad():
                self.position.average.mul_(0.5).add_(self.net.first.weight.detach(), alpha=0.5)

    def tensors(self) -> dict[str, Tensor]:
        """What this rank holds, by the names of the disk."""
        found: dict[str, Tensor] = {}
        for name, value in self.net.state_dict().items():
            if name != "back.weight":
                found[f"model.{name}"] = value
        for name, parameter in self.net.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.state.{name}.{key}"] = value
        found["extra_0.average"] = self.position.average
        return found

    def held(self) -> str:
        """Digest of this rank's own parts, and of what is its own."""
        with torch.no_grad():
            parts = {name: local(value) for name, value in self.tensors().items()}
        return digest(parts, self.position.seen, self.position.rank)

    def whole(self) -> dict[str, Tensor]:
        """Everything gathered: a collective."""
        with torch.no_grad():
            return {
                name: (value.full_tensor() if is_sharded(value) else value).clone()
                for name, value in self.tensors().items()
            }

    # ---- what the session does, with barriers of the test's own in place of its step reduce

    def events(self) -> Any:
        until = time.perf_counter() + WAIT_S
        while not (ended := self.disk.poll()):
            assert time.perf_counter() < until, "nothing ended"
            time.sleep(0.005)
        [one] = ended
        return one

    def agree(self, mine: bool) -> bool:
        if self.world == 1:
            return mine
        votes = torch.tensor([1.0 if mine else 0.0])
        dist.all_reduce(votes)
        return int(votes.item()) == self.world

    def save(self, step: int, number: int = 0, attempt: int = 0) -> tuple[Any, Any]:
        """(this rank's part, rank 0's commit)."""
        self.ram.take(step, Stats(shape_age=step))
        self.disk.offer(self.ram.image(step), Ledger(attempt=attempt), save=number)
        part = self.events()
        if self.world == 1:
            return part, None
        if not self.agree(isinstance(part, PartWritten)):
            self.disk.abandon(step, getattr(part, "reason", "another rank failed"))
            self.disk.close()
            dist.barrier()
            return part, None
        commit = None
        if self.rank == 0:
            self.disk.commit(step)
            commit = self.events()
        if self.agree(self.rank > 0 or isinstance(commit, Saved)):
            self.disk.committed(step)
        else:
            self.disk.abandon(step, getattr(commit, "reason", "the commit failed"))
        return part, commit

    def confirm(self, *steps: int) -> None:
        """These are healthy; the marker is on the disk when it returns."""
        self.disk.follow(Ledger(snapshots=tuple(Snapshot(s, True) for s in steps)))
        self.disk.close()
        if self.world > 1:
            dist.barrier()


Scenario = Callable[[Path, int, int], dict[str, Any]]
SCENARIOS: dict[str, tuple[int, Scenario]] = {}


def scenario(world: int) -> Callable[[Scenario], Scenario]:
    def add(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (world, function)
        return function

    return add


def _prepared(run: Run, step: int) -> tuple[Any, str]:
    try:
        return run.disk.prepare(step), ""
    except SnapshotError as error:
        return None, str(error)


# ---------------------------------------------------------------- in memory


def _ram(run: Run) -> dict[str, Any]:
    run.train(STEP)
    taken = run.held()
    run.ram.take(STEP, Stats(shape_age=7))
    places = [local(p).data_ptr() for p in run.model.parameters()]
    run.train(2, seed=1)
    moved = run.held()
    # An evaluation after which FSDP2 still holds the gathered parameters.
    run.model.eval()
    with torch.no_grad():
        run.model(torch.ones(4, 6))
    gathered = not all(is_sharded(p) for p in run.model.parameters())
    run.model.train()
    ready = run.ram.prepare(STEP)
    before = run.held()
    stats = ready.commit()
    restored = run.held()
    same_places = places == [local(p).data_ptr() for p in run.model.parameters()]
    run.train(2, seed=1)
    # One rank has not got it: the others are ready, nobody moves.
    run.ram.keep_only([] if run.rank == 1 else [STEP])
    now = run.held()
    try:
        run.ram.prepare(STEP)
        missing = ""
    except SnapshotError as error:
        missing = str(error)
    return {
        "gathered": gathered,
        "prepare changes nothing": before == moved,
        "restored": restored == taken and stats == Stats(shape_age=7),
        "in place": same_places,
        "goes on the same": run.held() == moved,
        "missing": missing,
        "unmoved": run.held() == now,
    }


@scenario(4)
def ram_fsdp(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _ram(Run("fsdp", rank, world, directory, "ram-fsdp"))


@scenario(2)
def ram_ddp(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _ram(Run("ddp", rank, world, directory, "ram-ddp"))


@scenario(4)
def ram_hsdp(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _ram(Run("hsdp", rank, world, directory, "ram-hsdp"))


# ---------------------------------------------------------------- saved by four


def _write(kind: str, directory: Path, rank: int, world: int) -> dict[str, Any]:
    run = Run(kind, rank, world, directory, kind)
    run.train(STEP)
    taken, whole = run.held(), run.whole()
    part, commit = run.save(STEP)
    run.confirm(STEP)
    run.train(2, seed=1)
    moved = run.held()
    ready, reason = _prepared(run, STEP)
    unmoved = run.held() == moved
    if run.agree(ready is not None):
        ready.commit()
    if rank == 0:
        torch.save(whole, directory / f"{kind}.reference.pt")
    files = sorted(os.listdir(run.directory / "snapshots" / store.snapshot_name(STEP, 0, 0)))
    run.disk.close()
    return {
        "part": type(part).__name__,
        "commit": type(commit).__name__,
        "due again": run.disk.due(STEP + 1),
        "unmoved": unmoved,
        "reason": reason,
        "restored": run.held() == taken,
        "token": ready.token if ready is not None else None,
        "files": files,
    }


@scenario(4)
def write_fsdp(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _write("fsdp", directory, rank, world)


@scenario(4)
def write_hsdp(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _write("hsdp", directory, rank, world)


@scenario(2)
def write_ddp(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _write("ddp", directory, rank, world)


@scenario(1)
def write_plain(directory: Path, rank: int, world: int) -> dict[str, Any]:
    run = Run("plain", rank, world, directory, "plain")
    run.train(STEP)
    torch.save(run.whole(), directory / "plain.reference.pt")
    run.save(STEP)
    run.confirm(STEP)
    return {}


# ---------------------------------------------------------------- read by another number


def _read(kind: str, of: str, directory: Path, rank: int, world: int) -> dict[str, Any]:
    """A new process of `kind` finds the snapshot that ranks of `of` have written."""
    run = Run(kind, rank, world, directory, of)
    found = run.disk.find([STEP])
    before = run.held()
    ready, reason = _prepared(run, STEP)
    unmoved = run.held() == before
    same = False
    if run.agree(ready is not None):
        ready.commit()
        reference = torch.load(directory / f"{of}.reference.pt")
        whole = run.whole()
        same = digest(dict(sorted(whole.items()))) == digest(dict(sorted(reference.items())))
    run.train(1)  # moments have the right form for the optimizer
    run.disk.close()
    # The whole of it, with what only a restarted process takes.
    other = Run(kind, rank, world, directory, of)
    path = run.directory / "snapshots" / store.snapshot_name(STEP, 0, 0)
    again = prepare_resume(other.target, path, run=of, rank=rank, world=world)
    step = again.resume()
    return {
        "found": list(found),
        "reason": reason,
        "unmoved": unmoved,
        "same": same,
        "notes": list(ready.notes) if ready is not None else [],
        "position": [run.position.rank, other.position.rank],
        "resumed": step,
        "rate": other.optimizer.param_groups[0]["lr"],
        "sharded": [is_sharded(p) for p in run.model.parameters()],
        "average sharded": is_sharded(other.position.average),
        "moments sharded": [
            is_sharded(run.optimizer.state[p]["exp_avg"]) for p in run.model.parameters()
        ],
    }


@scenario(2)
def fsdp_on_2(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("fsdp", "fsdp", directory, rank, world)


@scenario(2)
def fsdp_on_ddp_2(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("ddp", "fsdp", directory, rank, world)


@scenario(1)
def fsdp_on_1(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("plain", "fsdp", directory, rank, world)


@scenario(4)
def plain_on_4(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("fsdp", "plain", directory, rank, world)


@scenario(4)
def hsdp_on_fsdp_4(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("fsdp", "hsdp", directory, rank, world)


@scenario(4)
def ddp_on_fsdp_4(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("fsdp", "ddp", directory, rank, world)


@scenario(1)
def ddp_on_1(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("plain", "ddp", directory, rank, world)


@scenario(2)
def ddp_on_2(directory: Path, rank: int, world: int) -> dict[str, Any]:
    return _read("ddp", "ddp", directory, rank, world)


# ---------------------------------------------------------------- trouble


@scenario(4)
def alone(directory: Path, rank: int, world: int) -> dict[str, Any]:
    """Every rank does all of its work while the others do nothing at all."""
    run = Run("fsdp", rank, world, directory, "alone")
    run.train(STEP)
    taken = run.held()

    def in_turn(work: Callable[[], object]) -> object:
        answer = None
        for turn in range(world):
            if turn == rank:
                answer = work()
            dist.barrier()
        return answer

    in_turn(lambda: run.ram.take(STEP, Stats()))
    in_turn(lambda: run.disk.offer(run.ram.image(STEP), Ledger(), save=0))
    part = in_turn(run.events)
    commit = None
    if rank == 0:
        run.disk.commit(STEP)
        commit = run.events()
    dist.barrier()
    run.disk.committed(STEP)
    run.train(1)
    ready: Any = in_turn(lambda: run.disk.prepare(STEP))
    in_turn(ready.commit)
    run.disk.close()
    kinds = [type(part).__name__, type(commit).__name__]
    return {"kinds": kinds, "restored": run.held() == taken}


@scenario(4)
def damaged(directory: Path, rank: int, world: int) -> dict[str, Any]:
    """One byte of rank 2's tensors is not as it was written."""
    run = Run("fsdp", rank, world, directory, "damaged")
    run.train(STEP)
    run.save(STEP)
    run.save(STEP + 1, number=1)
    run.confirm(STEP, STEP + 1)
    path = run.directory / "snapshots" / store.snapshot_name(STEP, 0, 0)
    if rank == 0:
        file = path / "__2_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    run.train(1)
    before = run.held()
    ready, reason = _prepared(run, STEP)
    everywhere = run.agree(ready is not None)
    steps = run.disk.steps
    unmoved = run.held() == before
    run.disk.lost(STEP)
    other, _ = _prepared(run, STEP + 1)
    run.disk.close()
    return {
        "reason": reason,
        "agreed": everywhere,
        "unmoved": unmoved,
        "steps": list(steps),
        "after": list(run.disk.steps),
        "next": other is not None,
        "damage": store.find_damage(path),
        "listed": [
            [s.step, str(s.health), s.ranks]
            for s in store.list_snapshots(run.directory, verify=True)
        ],
    }


@scenario(4)
def full(directory: Path, rank: int, world: int) -> dict[str, Any]:
    """Rank 1's disk is full in the middle of its part; then it works again."""
    run = Run("fsdp", rank, world, directory, "full")
    run.train(STEP)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    part, commit = run.save(STEP)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reason = part.reason if isinstance(part, Failed) else ""
    left = [s.path.name for s in store.list_snapshots(run.directory)]
    trouble, steps, due = run.disk.trouble, list(run.disk.steps), run.disk.due(STEP + 1)
    readers = run.ram.image(STEP).readers
    dist.barrier()
    again, committed = run.save(STEP + 1, number=1)
    run.confirm(STEP + 1)
    return {
        "part": type(part).__name__,
        "commit": commit is None,
        "reason": reason,
        "trouble": trouble,
        "left": left,
        "steps": steps,
        "due": due,
        "readers": readers,
        "again": [type(again).__name__, type(committed).__name__],
        "steps again": list(run.disk.steps),
        "trouble again": run.disk.trouble,
        "listed": [s.step for s in store.list_snapshots(run.directory)],
    }


@scenario(4)
def killed(directory: Path, rank: int, world: int) -> dict[str, Any]:
    """Rank 2 dies in the middle of its part; the others finish theirs, and nothing counts."""
    run = Run("fsdp", rank, world, directory, "killed")
    run.train(STEP)
    run.save(STEP)
    run.confirm(STEP)
    if rank == 2:
        killer.arm(run.directory / "snapshots", 7000)
    run.ram.take(STEP + 1, Stats())
    run.disk.offer(run.ram.image(STEP + 1), Ledger(), save=1)
    part = run.events()
    commit = None
    if rank == 0:
        sentinel_hooks.snapshots.disk.COMMIT_WAIT_S = 0.3
        run.disk.commit(STEP + 1)  # as nobody should: it is refused
        commit = run.events()
    return {
        "part": type(part).__name__,
        "commit": [type(commit).__name__, getattr(commit, "reason", "")],
    }


@scenario(2)
def twice(directory: Path, rank: int, world: int) -> dict[str, Any]:
    """A number that was used before: the old parts are not mixed with new ones."""
    run = Run("ddp", rank, world, directory, "twice")
    run.train(1)
    run.save(STEP)
    part, _ = run.save(STEP)
    return {
        "part": type(part).__name__,
        "reason": getattr(part, "reason", ""),
        "highest": run.disk.highest_number(),
    }


@scenario(2)
def own(directory: Path, rank: int, world: int) -> dict[str, Any]:
    """The user's own checkpoints are the disk tier of two ranks."""
    run = Run("ddp", rank, world, directory, "own")
    loaded: list[str] = []
    run.disk = run.store(adopt=loaded.append)
    said = []
    for step, quiet in ((10, True), (20, False)):
        path = directory / f"own-{step}.ckpt"
        if rank == 0:
            path.write_bytes(b"weights")
        dist.barrier()
        run.disk.adopt(
            str(path), step, Stats(shape_age=step), Ledger(), quiet=quiet, incident="i-3", save=step
        )
        part = run.events()
        assert run.agree(isinstance(part, PartWritten))
        if rank == 0:
            run.disk.commit(step)
            said.append(type(run.events()).__name__)
        dist.barrier()
        run.disk.committed(step)
    run.confirm(10)
    ready = run.disk.prepare(10)
    stats = ready.commit()
    run.disk.close()
    return {
        "said": said,
        "unprepared": isinstance(ready, Unprepared),
        "token": ready.token,
        "loaded": loaded == [str(directory / "own-10.ckpt")] and stats == Stats(shape_age=10),
        "listed": [[s.step, str(s.health)] for s in store.list_snapshots(run.directory)],
        "notes": sorted(p.name for p in directory.glob("own-*.json")),
    }


# ---------------------------------------------------------------- forks


def _child(name: str, function: Scenario, directory: Path, rank: int, world: int) -> None:
    out = directory / f"{name}.{rank}"
    try:
        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(directory / f"{name}.store"), world),
                rank=rank,
                world_size=world,
                timeout=dt.timedelta(seconds=60),
            )
        said = function(directory, rank, world)
        out.write_text(json.dumps(said))
    except BaseException:
        out.write_text(json.dumps({"error": traceback.format_exc()}))
        os._exit(1)
    os._exit(0)


def main(directory: Path) -> None:
    """See the module docstring."""
    chosen = sys.argv[2:] or list(SCENARIOS)
    for name in chosen:
        world, function = SCENARIOS[name]
        began = time.perf_counter()
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _child(name, function, directory, rank, world)
            pids.append(pid)
        exits: list[int | None] = [None] * world
        while None in exits and time.perf_counter() - began < 100:
            for rank, pid in enumerate(pids):
                if exits[rank] is None and os.waitpid(pid, os.WNOHANG)[0]:
                    exits[rank] = 0
            time.sleep(0.01)
        for rank, pid in enumerate(pids):
            if exits[rank] is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        said = []
        for rank in range(world):
            out = directory / f"{name}.{rank}"
            said.append(json.loads(out.read_text()) if out.exists() else None)
        took = time.perf_counter() - began
        result = {"said": said, "hung": exits.count(None), "took_s": took}
        (directory / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
