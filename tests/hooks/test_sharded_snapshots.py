"""Parts of several ranks: the arithmetic, the files and the protocol, in one process.

Real ranks save and restore in tests/e2e/test_rank_snapshots.py.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.policy import Policy
from sentinel.core.state import Ledger, Snapshot, Stats
from sentinel.traces import snapshots as store
from sentinel.traces.snapshots import Health, find_damage, inspect_snapshot, list_snapshots
from sentinel_hooks.snapshots import Snapshots, disk, files, parts, shards
from sentinel_hooks.snapshots.disk import DiskStore, Failed, PartWritten, Saved, Unprepared
from sentinel_hooks.snapshots.ram import HostTensor, Image, RamStore, SnapshotError, prepare
from sentinel_hooks.snapshots.unhealthy import forget, note, note_path, warn_if_unhealthy
from sentinel_hooks.target import Target
from tests.hooks.test_ram import OPTIMIZERS, everything, train
from tests.hooks.worlds import Net, digest
from tests.support import confirm

pytestmark = pytest.mark.torch
POLICY = Policy()


# ---------------------------------------------------------------- which part is whose


@pytest.fixture
def fake_ranks() -> Iterator[Any]:
    """Start(rank): this process is that one of four; messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def test_offsets_are_those_of_dtensor_and_every_part_has_one_owner(fake_ranks: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes = [(8, 3), (7, 5), (3, 4), (1, 2), (0, 4), (5, 9)]
    layouts = [
        ((4,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((4,), (Replicate(),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(1), Shard(0))),
        ((2, 2), (Shard(0), Shard(0))),
        ((2, 2), (Shard(0), Replicate())),
    ]
    owned: dict[Any, list[int]] = {}
    for rank in range(4):
        fake_ranks(rank)
        for size, (shape, placements) in itertools.product(sizes, layouts):
            mesh = init_device_mesh("cpu", shape)
            cut = shards.make_cut(size, mesh, placements)
            expected = compute_local_shape_and_global_offset(size, mesh, placements)
            assert cut.shape == expected[0], (rank, size, placements)
            assert cut.offsets is not None
            if 0 not in cut.shape:
                assert cut.offsets == expected[1], (rank, size, placements)
                key = (size, shape, placements, cut.offsets)
                owned.setdefault(key, [])
                if cut.owner:
                    owned[key].append(rank)
            whole = shards.rebuild(torch.zeros(cut.shape), cut)
            assert isinstance(whole, DTensor)
            found = shards.cut_of(whole)
            assert found is not None
            assert found.same_part(cut)
    assert {len(ranks) for ranks in owned.values()} == {1}


def test_a_placement_without_offsets_stays_in_ram_and_is_refused_for_the_disk(
    fake_ranks: Any, tmp_path: Path
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    fake_ranks(1)
    mesh = init_device_mesh("cpu", (4,))
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    target = Target((), (torch.optim.SGD([weight], lr=1.0),))
    ram = RamStore(target, Snapshots())
    ram.take(0, Stats())
    with torch.no_grad():
        weight.to_local().zero_()
    ram.restore(0)
    with torch.no_grad():
        assert weight.to_local().tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(SnapshotError, match=r"outside.0.0.0 is placed P\(sum\).*disk=False"):
        files.write(tmp_path, ram.image(0), files.capture(target), attempt=0, rank=1, world=4)


def test_another_part_of_the_same_tensor_is_refused_before_anything_moves(fake_ranks: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    fake_ranks(1)
    mesh = init_device_mesh("cpu", (4,))
    model = torch.nn.Linear(8, 8, bias=False)
    plain = model.weight
    other = torch.nn.Parameter(plain.detach().double())

    def of(placement: Any, shape: tuple[int, int]) -> torch.nn.Parameter:
        made = DTensor.from_local(torch.ones(shape), mesh, [placement], run_check=False)
        return torch.nn.Parameter(made)

    target = Target((model,), ())
    ram = RamStore(target, Snapshots())
    model.weight = of(Shard(0), (2, 8))
    ram.take(0, Stats())
    ram.prepare(0).commit()
    for now, message in (
        (of(Shard(1), (8, 2)), r"part of weight was .*\[8, 8\], placed S\(0\) and is .* S\(1\)"),
        (plain, r"this rank's part of weight was the part \[2, 8\] at \[2, 0\] .* and is whole"),
        (other, r"and is whole"),
    ):
        model.weight = now
        with pytest.raises(SnapshotError, match=message):
            ram.prepare(0)
    model.weight = plain
    ram.take(1, Stats())
    model.weight = other
    with pytest.raises(SnapshotError, match=r"was of type torch.float32 and is of type torch.fl"):
        ram.prepare(1)


# ---------------------------------------------------------------- two phases


def test_preparing_changes_nothing_and_committing_does_all() -> None:
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    target = Target((model,), (optimizer,))
    ram = RamStore(target, Snapshots())
    ram.take(0, Stats())  # before the first step: no moments yet
    empty = everything(target)
    train(model, optimizer, 2)
    ram.take(2, Stats(shape_age=2))
    two = everything(target)
    train(model, optimizer, 2)
    now = everything(target)
    back, first = ram.prepare(2), ram.prepare(0)
    assert everything(target) == now
    assert back.commit() == Stats(shape_age=2)
    assert everything(target) == two
    first.commit()
    assert everything(target) == empty
    assert not any(optimizer.state.values())


def test_what_has_gone_from_extra_state_or_the_optimizers_is_found_while_preparing() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    ram = RamStore(Target((model,), (optimizer,), extra_state=(scheduler,)), Snapshots())
    ram.take(0, Stats())
    image = ram.image(0)
    with pytest.raises(SnapshotError, match="holds 1 objects in extra_state and there are 0"):
        prepare(Target((model,), (optimizer,)), image)
    with pytest.raises(SnapshotError, match="holds 1 optimizers and there are 2"):
        prepare(Target((model,), (optimizer, optimizer), extra_state=(scheduler,)), image)


def test_the_ranks_of_one_machine_share_its_memory() -> None:
    model = Net()
    target = Target((model,), (torch.optim.SGD(model.parameters(), lr=0.1),))
    need = RamStore(target, Snapshots()).take(0, Stats())
    RamStore(target, Snapshots(memory_share=1.0), available=lambda: 2 * need).take(0, Stats())
    four = RamStore(target, Snapshots(memory_share=1.0), available=lambda: 2 * need, sharers=4)
    with pytest.raises(SnapshotError, match="host memory on the 4 ranks of this machine"):
        four.take(0, Stats())


# ---------------------------------------------------------------- files of several ranks


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 4),
    world=st.integers(1, 5),
    data=st.data(),
)
def test_any_slice_comes_back_from_the_parts_of_any_number_of_ranks(
    rows: int, columns: int, world: int, data: st.DataObject, tmp_path_factory: Any
) -> None:
    directory = tmp_path_factory.mktemp("parts")
    whole = torch.arange(float(rows * columns)).reshape(rows, columns)
    scalar = torch.tensor(7.0)
    step = -(-rows // world)
    for rank in range(world):
        begin = min(rank * step, rows)
        mine = whole[begin : begin + step].contiguous()
        items = [parts.Item(("a", "w"), mine, (rows, columns), (begin, 0))] if len(mine) else []
        if rank == 0:
            items.append(parts.Item(("a", "step"), scalar))
        parts.save(
            directory, items, rank=rank, world=world, borrowed=() if rank == 0 else ("a.step",)
        )
    if world > 1:
        parts.merge(directory, world)
    top = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, columns - 1))
    high = data.draw(st.integers(1, rows - top))
    wide = data.draw(st.integers(1, columns - left))
    source = parts.Source(directory)
    assert source.about("a.w") == ((rows, columns), torch.float32)
    part, number = torch.empty(high, wide), torch.empty(())
    source.want("a.w", part, (top, left))
    source.want("a.step", number, ())
    source.load()
    assert torch.equal(part, whole[top : top + high, left : left + wide])
    assert number.item() == 7.0
    touched = {f"__{r // step}_0.distcp" for r in range(top, top + high)}
    assert set(source.files) == touched | {"__0_0.distcp"}, "and no other file is read"


def _item(name: str, rows: int, begin: int, dtype: torch.dtype = torch.float32) -> parts.Item:
    return parts.Item(("m", name), torch.zeros(rows, 2, dtype=dtype), (4, 2), (begin, 0))


@pytest.mark.parametrize(
    ("second", "borrowed", "message"),
    [
        ([_item("w", 1, 2)], (), r"the ranks' parts of m.w hold 6 of its 8 values"),
        ([_item("w", 2, 0)], (), "ranks 0 and 1 hold the same part of m.w"),
        (
            [_item("w", 2, 2, torch.float64)],
            (),
            r"rank 1 holds m.w as torch.float64 \(4, 2\), another one as torch.float32",
        ),
        ([_item("w", 2, 2)], ["m.b"], r"rank 1 holds m.b for itself \(1 such tensors\)"),
    ],
)
def test_parts_that_make_no_whole_are_refused(
    second: list[parts.Item], borrowed: list[str], message: str, tmp_path: Path
) -> None:
    parts.save(tmp_path, [_item("w", 2, 0)], rank=0, world=2)
    parts.save(tmp_path, second, rank=1, world=2, borrowed=borrowed)
    with pytest.raises(ValueError, match=message):
        parts.merge(tmp_path, 2)
    assert not (tmp_path / ".metadata").exists()


# ---------------------------------------------------------------- the protocol


class Own:
    """The user's own state, another on each rank."""

    def __init__(self, rank: int) -> None:
        self.seen = torch.tensor([100.0 * rank])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Rank:
    """One of two replicas of a run, as one rank sees it; the test is the session."""

    def __init__(self, directory: Path, rank: int, world: int = 2, **config: Any) -> None:
        torch.manual_seed(3)
        self.rank = rank
        self.model = Net(dropout=0.0)
        self.optimizer = OPTIMIZERS["adamw amsgrad"](self.model.parameters())
        self.own = Own(rank)
        self.target = Target((self.model,), (self.optimizer,), extra_state=(self.own,))
        self.ram = RamStore(self.target, Snapshots())
        self.disk = DiskStore(
            self.target,
            Snapshots(**config),
            directory,
            run=directory.name,
            policy=POLICY,
            rank=rank,
            world=world,
        )

    def event(self) -> Saved | Failed | PartWritten:
        until = time.perf_counter() + 60
        while not (ended := self.disk.poll()):
            assert time.perf_counter() < until
            time.sleep(0.005)
        [one] = ended
        return one


class Pair:
    """Both ranks."""

    def __init__(self, tmp_path: Path, **config: Any) -> None:
        self.directory = tmp_path / "r7"
        self.ranks = [Rank(self.directory, rank, **config) for rank in range(2)]
        for rank in self.ranks:
            train(rank.model, rank.optimizer, 2)

    def offer(self, step: int, number: int) -> list[Saved | Failed | PartWritten]:
        for rank in self.ranks:
            rank.ram.take(step, Stats(shape_age=step))
            assert rank.disk.offer(rank.ram.image(step), Ledger(), save=number)
        return [rank.event() for rank in self.ranks]

    def save(self, step: int, number: int) -> Path:
        assert [type(e) for e in self.offer(step, number)] == [PartWritten, PartWritten]
        self.ranks[0].disk.commit(step)
        saved = self.ranks[0].event()
        assert isinstance(saved, Saved), saved
        for rank in self.ranks:
            rank.disk.committed(step)
        return saved.path

    def abandon(self, step: int) -> None:
        for rank in self.ranks:
            rank.disk.abandon(step, "rank 1: the disk is full")

    def settle(self) -> None:
        for rank in self.ranks:
            rank.disk.close()

    def path(self, step: int, number: int) -> Path:
        return self.directory / "snapshots" / store.snapshot_name(step, 0, number)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.settle()


def test_replicas_are_written_once_and_what_is_a_ranks_own_comes_back_to_it(pair: Pair) -> None:
    path = pair.save(50, 0)
    assert sorted(os.listdir(path)) == [
        ".metadata",
        "COMMIT",
        "__0_0.distcp",
        "manifest-0.json",
        "manifest-1.json",
        "part-0.pickle",
        "part-1.pickle",
        "rank-0.pt",
        "rank-1.pt",
    ]
    taken = [everything(rank.target) for rank in pair.ranks]
    for rank in pair.ranks:
        train(rank.model, rank.optimizer, 2, seed=5)
        rank.own.seen.fill_(-1)
        moved = everything(rank.target)
        ready = rank.disk.prepare(50)
        assert everything(rank.target) == moved
        assert ready.commit() == Stats(shape_age=50)
    assert [everything(rank.target) for rank in pair.ranks] == taken
    assert [rank.own.seen.item() for rank in pair.ranks] == [0, 100]


def test_it_counts_only_when_it_is_committed_and_the_same_is_due_on_all_ranks(pair: Pair) -> None:
    first, second = (rank.disk for rank in pair.ranks)
    assert first.due(50)
    assert second.due(50)
    pair.offer(50, 0)
    assert (first.due(10_000), second.due(10_000)) == (False, False), "one at a time"
    assert not first.ready
    assert (first.steps, second.steps) == ((), ())
    assert inspect_snapshot(pair.path(50, 0)).reason == (
        "no COMMIT: the save was cut off; of its 2 ranks none had no part"
    )
    first.commit(50)
    assert isinstance(pair.ranks[0].event(), Saved)
    assert first.steps == (), "rank 1 does not know yet"
    first.committed(50)
    second.committed(50)
    assert (first.steps, second.steps) == ((50,), (50,))
    assert (first.due(100), second.due(100)) == (True, True)
    assert not first.due(99)
    found = inspect_snapshot(pair.path(50, 0), verify=True)
    assert (found.health, found.ranks, found.parts) == (Health.CANDIDATE, 2, (0, 1))


def test_an_abandoned_save_leaves_nothing_and_the_next_one_tries_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write

    def full(directory: Path, *args: Any, rank: int, **kwargs: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device", str(directory))
        return write(directory, *args, rank=rank, **kwargs)

    monkeypatch.setattr(files, "write", full)
    ended = pair.offer(50, 0)
    assert [type(e) for e in ended] == [PartWritten, Failed]
    assert getattr(ended[1], "reason", "").startswith("No space left on device: ")
    pair.abandon(50)
    for rank in pair.ranks:
        assert rank.disk.trouble == "rank 1: the disk is full"
        assert rank.disk.due(51), "and not only at the next step of the schedule"
        assert rank.disk.steps == ()
        assert rank.ram.image(50).readers == 0
    pair.ranks[0].disk.close()
    assert list_snapshots(pair.directory) == []
    monkeypatch.undo()
    pair.save(51, 1)
    assert {rank.disk.trouble for rank in pair.ranks} == {""}


def test_a_commit_that_fails_abandons_the_save_on_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "commit", full)
    pair.offer(50, 0)
    pair.ranks[0].disk.commit(50)
    failed = pair.ranks[0].event()
    assert failed == Failed(50, "No space left on device")
    assert inspect_snapshot(pair.path(50, 0)).health is Health.TORN
    pair.abandon(50)
    pair.settle()
    assert list_snapshots(pair.directory) == []
    monkeypatch.undo()
    pair.save(51, 1)


def test_what_a_slow_rank_says_of_an_abandoned_save_is_not_heard(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    go = threading.Event()
    write = files.write

    def slow(*args: Any, rank: int, **kwargs: Any) -> Any:
        if rank == 1:
            assert go.wait(30)
        return write(*args, rank=rank, **kwargs)

    monkeypatch.setattr(files, "write", slow)
    for rank in pair.ranks:
        rank.ram.take(50, Stats())
        rank.disk.offer(rank.ram.image(50), Ledger(), save=0)
    pair.ranks[0].event()
    pair.abandon(50)
    pair.ranks[0].disk.close()
    old = pair.ranks[1].ram.image(50)
    for rank in pair.ranks:
        rank.ram.take(51, Stats())
        rank.disk.offer(rank.ram.image(51), Ledger(), save=1)
    go.set()
    assert {getattr(rank.event(), "step", 0) for rank in pair.ranks} == {51}
    assert old.readers == 0
    pair.ranks[0].disk.commit(51)
    assert isinstance(pair.ranks[0].event(), Saved)
    for rank in pair.ranks:
        rank.disk.committed(51)
    pair.settle()
    assert [(s.step, str(s.health)) for s in list_snapshots(pair.directory)] == [(51, "candidate")]


def test_tidying_up_leaves_alone_what_another_rank_has_just_begun(pair: Pair) -> None:
    pair.save(50, 3)
    begun, left = pair.path(51, 4), pair.path(20, 2)
    for path in (begun, left):
        path.mkdir()
    pair.ranks[0].disk._put(lambda: pair.ranks[0].disk._rotate(3))
    pair.ranks[0].disk.close()
    assert begun.exists()
    assert not left.exists()


def test_a_number_that_was_used_before_destroys_nothing(pair: Pair) -> None:
    path = pair.save(50, 0)
    ended = pair.offer(50, 0)
    assert [type(e) for e in ended] == [Failed, Failed]
    assert "00000050-0-0 holds a part of rank 0 already" in getattr(ended[0], "reason", "")
    pair.abandon(50)
    pair.settle()
    assert find_damage(path) == ""
    assert pair.ranks[0].disk.highest_number() == 0


def test_two_ranks_that_do_not_see_the_same_directory_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "COMMIT_WAIT_S", 0.1)
    first, second = Rank(tmp_path / "a" / "r7", 0), Rank(tmp_path / "b" / "r7", 1)
    for rank in (first, second):
        rank.ram.take(50, Stats())
        rank.disk.offer(rank.ram.image(50), Ledger(), save=0)
        assert isinstance(rank.event(), PartWritten)
    first.disk.commit(50)
    failed = first.event()
    assert isinstance(failed, Failed)
    assert "manifest-1.json is missing; do all ranks see the same" in failed.reason
    first.disk.close()
    second.disk.close()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", 49, "manifest-1.json says step 49, manifest-0.json says step? ?50"),
        ("policy_hash", "x", "manifest-1.json says policy_hash 'x'"),
        ("parameters", "x", "manifest-1.json says parameters 'x'"),
        ("rank", 3, "manifest-1.json is of rank 3 of 2, not of 2"),
        ("files", [{"name": "rank-1.pt", "size": 1, "crc32": "0"}], "rank-1.pt has"),
    ],
)
def test_manifests_that_do_not_agree_are_not_committed(
    key: str, value: Any, message: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "COMMIT_WAIT_S", 0.1)
    pair.offer(50, 0)
    manifest = pair.path(50, 0) / "manifest-1.json"
    data = json.loads(manifest.read_text())
    data[key] = value
    manifest.write_text(json.dumps(data))
    pair.ranks[0].disk.commit(50)
    failed = pair.ranks[0].event()
    assert isinstance(failed, Failed)
    assert message.split("manifest-0")[0] in failed.reason
    assert not (pair.path(50, 0) / "COMMIT").exists()


def test_what_is_said_of_a_save_on_its_way_is_marked_when_it_arrives(pair: Pair) -> None:
    pair.offer(50, 0)
    for rank in pair.ranks:
        rank.disk.follow(Ledger(snapshots=(Snapshot(50, True),)))
    pair.ranks[0].disk.commit(50)
    pair.ranks[0].event()
    for rank in pair.ranks:
        rank.disk.committed(50)
    pair.settle()
    assert inspect_snapshot(pair.path(50, 0)).health is Health.HEALTHY
    # And afterwards by rank 0 alone.
    pair.ranks[1].disk.find([50])
    forgotten = Ledger(attempt=1, last_target=0, snapshots=())
    pair.ranks[1].disk.follow(forgotten)
    pair.ranks[1].disk.close()
    assert inspect_snapshot(pair.path(50, 0)).health is Health.HEALTHY
    pair.ranks[0].disk.follow(forgotten)
    pair.ranks[0].disk.close()
    assert inspect_snapshot(pair.path(50, 0)).health is Health.UNHEALTHY


def test_a_tensor_that_only_one_rank_holds_is_refused_by_name(pair: Pair) -> None:
    """ZeroRedundancyOptimizer and its kind: each rank has moments of its own parameters."""
    first = pair.ranks[0]
    first.optimizer.state.pop(next(first.model.parameters()))
    assert [type(e) for e in pair.offer(50, 0)] == [PartWritten, PartWritten]
    first.disk.commit(50)
    failed = first.event()
    assert isinstance(failed, Failed)
    assert "rank 1 holds optimizer.state.first.weight.exp_avg for itself" in failed.reason


def test_torch_and_json_alone_read_what_several_ranks_have_written(pair: Pair) -> None:
    path = pair.save(50, 0)
    tensors, rest = confirm.read(path)
    model = pair.ranks[0].model
    for name, tensor in model.state_dict().items():
        assert digest(tensors[f"model.{name}"]) == digest(tensor)
    assert rest["step"] == 50
    _, other = confirm.read(path, rank=1)
    assert (rest["rank"], other["rank"]) == (0, 1)


def test_a_snapshot_of_two_ranks_serves_one_and_three_and_says_what_is_missing(
    pair: Pair, tmp_path: Path
) -> None:
    path = pair.save(50, 0)
    taken = everything(pair.ranks[0].target)
    for rank, world, notes in (
        (0, 1, ["saved by 2 ranks and is put back on one rank", "of rank 1 are not used"]),
        (2, 3, ["saved by 2 ranks and is put back on 3 ranks", "rank 2 was not among them"]),
        (1, 2, []),
    ):
        one = Rank(pair.directory, rank, world)
        assert one.disk.find([50]) == (50,)
        ready = one.disk.prepare(50)
        ready.commit()
        assert everything(one.target) == taken
        assert one.own.seen.item() == (100 if (rank, world) == (1, 2) else 0)
        assert len(ready.notes) == len(notes)
        assert all(piece in said for piece, said in zip(notes, ready.notes, strict=True))
        torch.manual_seed(99)
        before = torch.get_rng_state()
        again = Rank(pair.directory, rank, world)
        torch.set_rng_state(before)
        disk.resume(again.target, path, rank=rank, world=world)
        assert torch.equal(torch.get_rng_state(), before) is (rank == 2)
        one.disk.close()


@pytest.mark.parametrize(
    "name",
    [
        "__0_0.distcp",
        ".metadata",
        "rank-0.pt",
        "rank-1.pt",
        "part-1.pickle",
        "manifest-1.json",
        "COMMIT",
    ],
)
def test_damage_in_any_ranks_part_is_found_by_name(name: str, pair: Pair) -> None:
    path = pair.save(50, 0)
    pair.settle()  # tidying up would take what is damaged
    assert find_damage(path, run="r7") == ""
    data = bytearray((path / name).read_bytes())
    data[len(data) // 3] ^= 0x10
    (path / name).write_bytes(data)
    assert find_damage(path, run="r7").startswith(name)
    assert inspect_snapshot(path, verify=True).health is Health.DAMAGED
    reads = {0: {"rank-0.pt"}, 1: {"rank-1.pt"}}
    for rank in pair.ranks:
        now = everything(rank.target)
        harmless = name == "part-1.pickle" or name in reads[1 - rank.rank]
        if harmless:
            rank.disk.prepare(50)
        else:
            with pytest.raises(SnapshotError, match=f"00000050-0-0: {name}"):
                rank.disk.prepare(50)
        assert everything(rank.target) == now
        assert rank.disk.steps == (50,), "until all ranks say that it is lost"
        rank.disk.lost(50)
        assert rank.disk.steps == ()
    (path / name).unlink()
    said = inspect_snapshot(path)
    if name == "COMMIT":
        assert said.health is Health.TORN
    else:
        assert (said.health, said.reason) == (Health.DAMAGED, f"{name} is missing")


# ---------------------------------------------------------------- the user's own checkpoints


def test_two_ranks_adopt_a_checkpoint_and_its_loading_cannot_be_tried_before(
    tmp_path: Path,
) -> None:
    loaded: list[str] = []
    pair = Pair(tmp_path, adopt=loaded.append)
    mine = tmp_path / "checkpoint-50"
    mine.mkdir()
    for rank in pair.ranks:
        rank.disk.adopt(str(mine), 50, Stats(shape_age=5), Ledger(), quiet=True, save=0)
        assert isinstance(rank.event(), PartWritten)
    pair.ranks[0].disk.commit(50)
    assert isinstance(pair.ranks[0].event(), Saved)
    for rank in pair.ranks:
        rank.disk.committed(50)
        ready = rank.disk.prepare(50)
        assert isinstance(ready, Unprepared)
        assert loaded == [str(mine)] * rank.rank, "not before it is committed"
        assert ready.commit() == Stats(shape_age=5)
    assert loaded == [str(mine), str(mine)]
    pair.settle()


def test_a_checkpoint_saved_inside_an_incident_says_so_itself(tmp_path: Path) -> None:
    one = Rank(tmp_path / "r7", 0, 1, adopt=lambda path: None)
    folder, file = tmp_path / "checkpoint-510", tmp_path / "last.ckpt"
    folder.mkdir()
    file.write_bytes(b"weights")
    for number, path in enumerate((folder, file)):
        one.disk.adopt(
            str(path), 510 + number, Stats(), Ledger(), quiet=False, incident="incident 3"
        )
        assert isinstance(one.event(), Saved)
    one.disk.close()
    assert note_path(folder) == folder / "unhealthy.json"
    assert note_path(file) == tmp_path / "last.ckpt.unhealthy.json"
    said = json.loads(note_path(file).read_text())
    assert said.pop("when").startswith("20")
    assert said == {
        "kind": "sentinel unhealthy checkpoint",
        "run": "r7",
        "step": 511,
        "incident": "incident 3",
        "reason": "it was saved inside an incident",
    }
    for path in (folder, file):
        warning = warn_if_unhealthy(path)
        assert warning is not None
        assert "it was saved inside an incident (incident 3); resume from an earlier one" in warning
    # A quiet one of the same name: the note goes.
    one.disk.adopt(str(file), 600, Stats(), Ledger(), quiet=True)
    one.event()
    one.disk.close()
    assert warn_if_unhealthy(file) is None
    assert not note_path(file).exists()
    assert file.read_bytes() == b"weights"


def test_a_checkpoint_whose_incident_came_later_is_noted_when_it_is_dropped(tmp_path: Path) -> None:
    one = Rank(tmp_path / "r7", 0, 1, adopt=lambda path: None)
    file = tmp_path / "a.ckpt"
    file.write_bytes(b"weights")
    one.disk.adopt(str(file), 50, Stats(), Ledger(), quiet=True)
    one.disk.follow(Ledger(snapshots=(Snapshot(50, False),)))
    one.event()
    one.disk.close()
    assert warn_if_unhealthy(file) is None
    one.disk.follow(Ledger(snapshots=()))
    one.disk.close()
    assert "trouble came before it was confirmed" in (warn_if_unhealthy(file) or "")


def test_a_note_does_not_speak_of_a_later_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    for checkpoint in (tmp_path / "last.ckpt", tmp_path / "checkpoint-500"):
        inside = checkpoint if checkpoint.suffix else checkpoint / "model.safetensors"
        inside.parent.mkdir(exist_ok=True)
        inside.write_bytes(b"w")
        note(checkpoint, run="r7", step=5, incident="", reason="because", when="now")
        assert "step 5 of run r7: because; resume" in (warn_if_unhealthy(checkpoint) or "")
        later = time.time() + 3600
        os.utime(inside, (later, later))
        assert warn_if_unhealthy(checkpoint) is None
        os.utime(inside, (0, 0))
        note_path(checkpoint).write_text("{")
        assert "the note cannot be read" in (warn_if_unhealthy(checkpoint) or "")
        forget(checkpoint)
        assert warn_if_unhealthy(checkpoint) is None
    assert warn_if_unhealthy(tmp_path / "nothing") is None


def test_images_that_hold_parts_hash_and_count_as_what_they_hold() -> None:
    cut = shards.Cut((4, 2), (2, 1), (1, 2), (3, 0), None, (), owner=True)
    image = Image(0, Stats(), size_bytes=8)
    image.tensors[(0, "parameter", "w")] = HostTensor(torch.ones(1, 2), torch.device("cpu"), cut)
    whole = Image(0, Stats(), size_bytes=32)
    whole.tensors[(0, "parameter", "w")] = HostTensor(torch.ones(4, 2), torch.device("cpu"))
    assert files.layout(image) == files.layout(whole)
    assert files.total_bytes(image, 4) == 4 * 8
    assert files.total_bytes(whole, 4) == 32, "replicas are written once"
