"""Snapshots on disk: written behind the trainer, checked byte by byte, put back bit by bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy, SnapshotConfig
from sentinel.core.state import Ledger, Snapshot, Stats
from sentinel.core.types import Mode
from sentinel.traces import snapshots as store
from sentinel.traces.snapshots import Health, find_damage, list_snapshots
from sentinel_hooks import AttachError
from sentinel_hooks.snapshots import Snapshots, files
from sentinel_hooks.snapshots.disk import (
    DiskStore,
    Failed,
    Saved,
    expendable,
    newest_healthy,
    next_due,
    resume,
)
from sentinel_hooks.snapshots.ram import RamStore, SnapshotError
from sentinel_hooks.target import Target
from tests.hooks.test_ram import OPTIMIZERS, everything, train
from tests.hooks.test_session import QUICK, Loop
from tests.hooks.worlds import Net, dice, digest
from tests.support import confirm

pytestmark = pytest.mark.torch
POLICY = Policy()


class Ema:
    """The user's own state, with a class of its own inside."""

    def __init__(self) -> None:
        self.shadow = {"w": torch.ones(3), "seen": 4, "where": Path("data/part-3")}

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


class World:
    """A small training run with both tiers."""

    def __init__(self, tmp_path: Path, make: Any = OPTIMIZERS["adamw amsgrad"]) -> None:
        torch.manual_seed(3)
        self.directory = tmp_path / "r7"
        self.model, self.ema = Net(), Ema()
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.target = Target(
            (self.model,), (self.optimizer,), (self.scheduler,), extra_state=(self.ema,)
        )
        self.ram = RamStore(self.target, Snapshots())
        self.disk = self.store()
        self.registry: tuple[Snapshot, ...] = ()

    def store(self, **config: Any) -> DiskStore:
        return DiskStore(self.target, Snapshots(**config), self.directory, run="r7", policy=POLICY)

    def save(self, step: int, *, healthy: bool = True, attempt: int = 0) -> Path:
        """Take and write the snapshot of `step`; wait for it."""
        self.ram.take(step, Stats(shape_age=step))
        self.registry = (*self.registry, Snapshot(step, healthy))
        self.disk.offer(self.ram.image(step), Ledger(attempt=attempt))
        self.disk.follow(Ledger(attempt=attempt, snapshots=self.registry))
        [ended] = self.wait()
        assert isinstance(ended, Saved), ended
        self.disk.close()
        return ended.path

    def wait(self) -> list[Saved | Failed]:
        until = time.perf_counter() + 60
        while not (ended := self.disk.poll()):
            assert time.perf_counter() < until
            time.sleep(0.005)
        return ended


# ---------------------------------------------------------------- bit by bit


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_bit_comes_back_from_disk(name: str, tmp_path: Path) -> None:
    world = World(tmp_path, OPTIMIZERS[name])
    train(world.model, world.optimizer, 2)
    taken = everything(world.target)
    path = world.save(2)
    train(world.model, world.optimizer, 3, seed=1)
    world.ema.shadow = {}
    assert everything(world.target) != taken
    image = world.disk.load(2)
    assert world.ram.put_back(image) == Stats(shape_age=2)
    assert everything(world.target) == taken
    assert world.ema.shadow["w"].tolist() == [1.0, 1.0, 1.0]
    assert world.ema.shadow["where"] == Path("data/part-3")
    assert find_damage(path, run="r7") == ""
    world.disk.close()


def test_odd_tensors_keep_their_bits_and_their_layout(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for name, value in {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "narrow": torch.full((3,), float("nan"), dtype=torch.bfloat16),
        "column": torch.arange(24.0).reshape(6, 4)[:, 1],
        "flag": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
    }.items():
        model.register_buffer(name, value)
    outside = nn.Parameter(torch.ones(2))
    target = Target((model,), (torch.optim.SGD([*model.parameters(), outside], lr=1.0),))
    ram = RamStore(target, Snapshots())
    ram.take(0, Stats())
    kept = ram.image(0)
    files.write(tmp_path, kept, files.capture(target), attempt=0)
    back, _ = files.read(tmp_path, files.places(target))
    assert back.tensors.keys() == kept.tensors.keys()
    for key, saved in kept.tensors.items():
        assert digest(back.tensors[key].data) == digest(saved.data), key
        assert back.tensors[key].data.stride() == saved.data.stride(), key
    assert files.layout(back) == files.live_layout(target)
    assert files.weights_hash(back) == files.weights_hash(kept)


def test_a_new_process_goes_on_exactly_where_the_snapshot_was_taken(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    world = World(tmp_path)
    train(world.model, world.optimizer, 2)
    world.scheduler.step()
    draw()
    path = world.save(2)
    train(world.model, world.optimizer, 3, seed=1)
    world.scheduler.step()
    rates = world.optimizer.param_groups[0]["lr"], world.scheduler.state_dict()
    expected = everything(world.target), draw(), rates, dice()

    other = World(tmp_path)
    train(other.model, other.optimizer, 1, seed=9)
    draw()
    assert resume(other.target, path, run="r7") == 2
    train(other.model, other.optimizer, 3, seed=1)
    other.scheduler.step()
    assert everything(other.target) == expected[0]
    rates = other.optimizer.param_groups[0]["lr"], other.scheduler.state_dict()
    assert (draw(), rates, dice()) == expected[1:]


def test_taking_what_only_the_disk_holds_draws_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = dice()
    world.save(0)
    assert dice() == before


def test_torch_and_json_alone_read_it_under_the_names_that_people_expect(tmp_path: Path) -> None:
    world = World(tmp_path)
    train(world.model, world.optimizer, 2)
    path = world.save(2)
    tensors, rest = confirm.read(path)
    for name, tensor in world.model.state_dict().items():
        assert digest(tensors[f"model.{name}"]) == digest(tensor)
    moments = world.optimizer.state[world.model.first.weight]
    for key, value in moments.items():
        assert digest(tensors[f"optimizer.state.first.weight.{key}"]) == digest(value)
    assert (rest["step"], rest["attempt"]) == (2, 0)
    manifest = json.loads((path / "manifest-0.json").read_text())
    assert (manifest["run"], manifest["step"], manifest["torch"]) == ("r7", 2, torch.__version__)
    assert manifest["weights"] == files.weights_hash(world.ram.image(2))


# ---------------------------------------------------------------- damage, by name and reason


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    world = World(tmp_path_factory.mktemp("saved"))
    train(world.model, world.optimizer, 1)
    return world, world.save(1)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".metadata", "rank-0.pt", "manifest-0.json", "COMMIT"]
)
def test_one_flipped_byte_is_found_in_every_kind_of_file(
    name: str, part: float, saved: tuple[World, Path], tmp_path: Path
) -> None:
    path = tmp_path / saved[1].name
    shutil.copytree(saved[1], path)
    assert find_damage(path, run="r7") == ""
    size = (path / name).stat().st_size
    _flip(path / name, int(part * (size - 1)))
    assert find_damage(path, run="r7").startswith(name)
    assert store.inspect_snapshot(path, verify=True).health is Health.DAMAGED


def _without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _cut(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 7)


def _of_another_run(path: Path) -> None:
    manifest = json.loads((path / "manifest-0.json").read_text())
    manifest["run"] = "r8"
    (path / "manifest-0.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "reason", "health"),
    [
        (_without("COMMIT"), "no COMMIT: the save was cut off", Health.TORN),
        (_without("manifest-0.json"), "manifest-0.json is missing", Health.DAMAGED),
        (_without("__0_0.distcp"), "__0_0.distcp is missing", Health.DAMAGED),
        (_without("rank-0.pt"), "rank-0.pt is missing", Health.DAMAGED),
        (_cut("__0_0.distcp"), r"__0_0.distcp has \d+ bytes, and manifest-0.json says \d+", None),
        (_cut("manifest-0.json"), r"manifest-0.json has \d+ bytes, and COMMIT says \d+", None),
        (_of_another_run, "manifest-0.json is of run 'r8', not of 'r7'", Health.DAMAGED),
        (shutil.rmtree, "the directory is gone", Health.TORN),
    ],
)
def test_a_damaged_snapshot_is_refused_by_name_and_reason_and_nothing_moves(
    spoil: Callable[[Path], None], reason: str, health: Health | None, tmp_path: Path
) -> None:
    world = World(tmp_path)
    train(world.model, world.optimizer, 1)
    path = world.save(1)
    train(world.model, world.optimizer, 1)
    now = everything(world.target)
    spoil(path)
    with pytest.raises(SnapshotError, match=f"{path.name}: {reason}"):
        world.disk.load(1)
    with pytest.raises(SnapshotError, match=f"{path.name}: {reason}"):
        resume(world.target, path)
    assert everything(world.target) == now
    assert store.inspect_snapshot(path).health is (health or Health.DAMAGED)
    assert world.disk.steps == (), "it is not tried again"
    world.disk.close()


def test_a_whole_snapshot_of_another_run_or_model_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    path = world.save(1)
    with pytest.raises(SnapshotError, match="is of run 'r7', not of 'r9'"):
        resume(world.target, path, run="r9")
    world.model.last = nn.Linear(24, 2)
    with pytest.raises(SnapshotError, match="it holds other parameters"):
        resume(world.target, path)
    with pytest.raises(SnapshotError, match="it holds other parameters"):
        world.disk.load(1)
    world.disk.close()


def test_a_renamed_directory_does_not_pass_for_another_step(tmp_path: Path) -> None:
    path = World(tmp_path).save(1)
    moved = path.with_name(store.snapshot_name(500, 0, 0))
    path.rename(moved)
    assert "directory's name says step 500" in find_damage(moved)


# ---------------------------------------------------------------- healthy or not


def test_the_marker_follows_the_engines_registry(tmp_path: Path) -> None:
    world = World(tmp_path)
    paths = {step: world.save(step, healthy=False) for step in (50, 100, 200)}

    def healths() -> dict[int, Health]:
        world.disk.close()
        return {s.step: s.health for s in list_snapshots(world.directory, verify=True)}

    world.disk.follow(Ledger(snapshots=(Snapshot(50, True), Snapshot(200, False))))
    assert healths() == {50: Health.HEALTHY, 100: Health.UNHEALTHY, 200: Health.CANDIDATE}
    assert newest_healthy(world.directory).step == 50  # type: ignore[union-attr]
    world.disk.follow(Ledger(snapshots=(Snapshot(50, True), Snapshot(200, True))))
    assert healths()[200] is Health.HEALTHY
    # A rollback to 50: what lies after it belongs to the abandoned way, confirmed or not.
    world.disk.follow(Ledger(attempt=1, last_target=50, snapshots=(Snapshot(50, True),)))
    assert healths() == {50: Health.HEALTHY, 100: Health.UNHEALTHY, 200: Health.UNHEALTHY}
    shown = store.inspect_snapshot(paths[200])
    assert shown.reason == "a rollback went past it, to step 50"
    _flip(paths[50] / "HEALTHY", 30)
    assert store.inspect_snapshot(paths[50]).health is Health.CANDIDATE
    assert newest_healthy(world.directory) is None


def test_rotation_keeps_what_a_rollback_may_need_and_never_deletes_the_last_good_one(
    tmp_path: Path,
) -> None:
    def found(*healths: tuple[int, Health]) -> list[store.DiskSnapshot]:
        return [store.DiskSnapshot(Path(str(s)), s, 0, 0, h) for s, h in healths]

    h, c, u, t = Health.HEALTHY, Health.CANDIDATE, Health.UNHEALTHY, Health.TORN
    some = found((0, h), (50, h), (100, h), (200, h), (500, u), (600, u), (700, t), (800, c))
    assert expendable(some, {0}, 4) == [Path("700"), Path("500")]
    assert expendable(some, {0}, 1) == [Path("700"), Path("500"), Path("50"), Path("100")]
    assert expendable(found((0, h), (5, c), (6, c)), (), 4) == [Path("5")]
    assert expendable(found((0, h)), (), 1) == []

    world = World(tmp_path)
    world.disk = world.store(disk_keep=1)
    for step in (0, 50, 100, 200):
        world.ram.take(step, Stats())
        world.disk.offer(world.ram.image(step), Ledger())
        world.disk.follow(Ledger(snapshots=(Snapshot(0, True), Snapshot(step, True))))
        world.wait()
        world.disk.close()
    assert [s.step for s in list_snapshots(world.directory)] == [0, 100, 200]


def test_copies_of_an_earlier_process_count_only_when_they_are_asked_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    train(world.model, world.optimizer, 1)
    taken = everything(world.target)
    world.save(50)
    other = World(tmp_path)
    assert other.disk.steps == ()
    with pytest.raises(SnapshotError, match="there is no copy of step 50 on disk"):
        other.disk.load(50)
    assert other.disk.find([50, 100]) == (50,)
    other.ram.put_back(other.disk.load(50))
    assert everything(other.target) == taken
    other.disk.close()


def test_what_a_new_process_could_go_back_to_is_listed_as_a_registry(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in (50, 100, 200):
        world.registry = ()
        world.save(step, healthy=step != 100)
    other = World(tmp_path).disk
    assert other.healthy_copies(150) == (Snapshot(50, True),)
    assert other.healthy_copies(200) == (Snapshot(50, True), Snapshot(200, True))
    assert other.find(s.step for s in other.healthy_copies(200)) == (50, 200)


def test_a_copy_of_an_earlier_process_does_not_stand_in_for_one_that_failed(
    tmp_path: Path,
) -> None:
    World(tmp_path).save(50)
    world = World(tmp_path)
    world.disk = world.store(disk_share=1e-12)
    assert world.disk.find([50]) == (50,)
    world.ram.take(50, Stats())
    world.disk.offer(world.ram.image(50), Ledger())
    assert isinstance(world.wait()[0], Failed)
    with pytest.raises(SnapshotError, match="there is no copy of step 50"):
        world.disk.load(50)
    world.disk.close()


def test_the_same_step_again_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    first, second = World(tmp_path).save(50), World(tmp_path).save(50)
    assert (first.name, second.name) == ("00000050-0-0", "00000050-0-1")
    assert find_damage(first) == find_damage(second) == ""


# ---------------------------------------------------------------- when, and at what price


def test_the_schedule_is_the_policys() -> None:
    config, steps, step = SnapshotConfig(), [], 0
    while step < 2000:
        step = next_due(step, config)
        steps.append(step)
    assert steps == [50, 100, 200, 500, 1000, 1500, 2000]
    assert next_due(730, config) == 1000
    assert next_due(0, SnapshotConfig(disk_at=(), disk_every=7)) == 7
    assert Policy.parse("snapshots.disk_at = [3, 4]").snapshots.disk_at == (3, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk_at = [100, 50]", r"snapshots.disk_at must be steps .* got \[100, 50\]"),
        ("disk_at = [0]", r"snapshots.disk_at must be steps of at least 1"),
        ("disk_at = 50", r"snapshots.disk_at must be a list, got 50"),
        ("disk_at = ['a']", r"snapshots.disk_at\[0\] must be a whole number, got 'a'"),
        ("disk_every = 0", r"snapshots.disk_every must lie between 1 and 1e\+07, got 0"),
    ],
)
def test_a_senseless_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy.parse(f"[snapshots]\n{text}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_share": 0.0}, "snapshots.disk_share must lie above 0 and be at most 1, got 0.0"),
        ({"disk_keep": 0}, r"snapshots.disk_keep must be at least 1, got 0; .*disk=False"),
        ({"disk_bytes": -1}, "snapshots.disk_bytes must be at least 0, got -1"),
    ],
)
def test_a_senseless_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Snapshots(**options)


def test_a_save_reads_the_copy_and_its_buffers_are_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    train(world.model, world.optimizer, 1)
    taken = everything(world.target)
    go = threading.Event()
    write = files.write
    monkeypatch.setattr(files, "write", lambda *a, **k: go.wait(30) and write(*a, **k))
    world.ram.take(50, Stats())
    world.disk.offer(world.ram.image(50), Ledger())
    assert not world.disk.due(10_000), "one at a time: nothing queues up on a slow disk"
    # The trainer goes on: the snapshot is dropped, others are taken, weights move.
    for step in (51, 52):
        train(world.model, world.optimizer, 1, seed=step)
        world.ram.keep_only([])
        world.ram.take(step, Stats())
    go.set()
    world.wait()
    assert world.disk.due(100)
    world.ram.put_back(world.disk.load(50))
    assert everything(world.target) == taken
    world.disk.close()


def test_a_load_waits_for_the_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    write = files.write
    monkeypatch.setattr(files, "write", lambda *a, **k: time.sleep(0.2) or write(*a, **k))
    world.ram.take(50, Stats())
    world.disk.offer(world.ram.image(50), Ledger())
    assert world.disk.load(50).step == 50
    world.disk.close()


def test_observing_and_opting_out_write_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.store(disk=False).due(50)
    observing = DiskStore(
        world.target, Snapshots(), tmp_path, run="r", policy=POLICY.with_mode(Mode.OBSERVE)
    )
    assert not observing.due(50)
    assert world.store().due(50)
    assert not world.store().due(0), "a short run writes nothing"
    assert world.store(ram=False).due(0), "but without RAM there must be something to go back to"


# ---------------------------------------------------------------- when the disk is in trouble


def test_no_room_is_told_with_the_way_out_and_tried_again_with_the_next_snapshot(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.disk = world.store(disk_share=1e-12)
    world.ram.take(50, Stats())
    world.disk.offer(world.ram.image(50), Ledger())
    [ended] = world.wait()
    assert isinstance(ended, Failed)
    for piece in ("a snapshot needs", "Snapshots(disk_share=...)", "Snapshots(disk=False)"):
        assert piece in world.disk.trouble
    assert list_snapshots(world.directory) == []
    assert world.ram.image(50).readers == 0
    world.disk._config = Snapshots()
    assert world.disk.due(51), "and not only at the next step of the schedule"
    world.ram.take(51, Stats())
    world.disk.offer(world.ram.image(51), Ledger())
    assert isinstance(world.wait()[0], Saved)
    assert world.disk.trouble == ""
    world.disk.close()


def test_the_quota_deletes_the_expendable_and_then_refuses(tmp_path: Path) -> None:
    world = World(tmp_path)
    size = 4 * (1 << 20) + 400_000  # four with their slack
    world.disk = world.store(disk_bytes=size)
    outcomes = []
    for step in (50, 100, 200, 500, 1000):
        world.ram.take(step, Stats())
        world.disk.offer(world.ram.image(step), Ledger())
        world.disk.follow(Ledger(snapshots=(Snapshot(50, True), Snapshot(step, True))))
        outcomes += world.wait()
        world.disk.close()
    held = list_snapshots(world.directory)
    assert {50, 1000} <= {s.step for s in held}
    assert sum(s.size_bytes for s in held) <= size
    assert all(isinstance(o, Saved) for o in outcomes)
    world.disk._config = Snapshots(disk_bytes=10)
    world.ram.take(1500, Stats())
    world.disk.offer(world.ram.image(1500), Ledger())
    world.wait()
    assert "raise Snapshots(disk_bytes=...)" in world.disk.trouble
    assert 50 in {s.step for s in list_snapshots(world.directory)}, "what is needed stays"
    world.disk.close()


def test_what_cannot_be_pickled_fails_the_copy_and_nothing_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ema.shadow["f"] = lambda: 0
    world.ram.take(50, Stats())
    world.disk.offer(world.ram.image(50), Ledger())
    [ended] = world.wait()
    assert isinstance(ended, Failed)
    assert "pickle" in ended.reason
    assert list_snapshots(world.directory) == [], "the torn directory is gone"
    world.disk.close()


def test_closing_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    go = threading.Event()
    monkeypatch.setattr(files, "write", lambda *a, **k: go.wait(30) and [])
    world.ram.take(50, Stats())
    world.disk.offer(world.ram.image(50), Ledger())
    began = time.perf_counter()
    world.disk.close(wait_s=0.1)
    assert time.perf_counter() - began < 5
    go.set()


def test_a_marker_that_could_not_be_written_is_written_after_the_next_save(tmp_path: Path) -> None:
    world = World(tmp_path)
    path = world.save(50, healthy=False)
    aside = path.with_name("aside")
    path.rename(aside)
    confirmed = Ledger(snapshots=(Snapshot(50, True),))
    world.disk.follow(confirmed)
    world.disk.close()
    assert world.disk.poll() == []
    assert "it cannot be marked healthy: No such file or directory" in world.disk.trouble
    aside.rename(path)
    world.ram.take(100, Stats())
    world.disk.offer(world.ram.image(100), Ledger())
    world.wait()
    world.disk.follow(confirmed)
    world.disk.close()
    assert store.inspect_snapshot(path).health is Health.HEALTHY
    assert world.disk.trouble == ""


# ---------------------------------------------------------------- the user's own checkpoints


class Own:
    """A loop that writes checkpoints of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.loaded: list[str] = []
        self.loop = Loop(
            tmp_path,
            run_id="r7",
            # go_wrong() spoils the loss and not the weights: a canary would blame the data.
            policy=Policy.from_dict({**QUICK.to_dict(), "canary": {"mode": "off"}}),
            snapshots=Snapshots(ram=False, adopt=self.load),
            record=False,
        )
        self.where = tmp_path

    def save(self) -> Path:
        path = self.where / f"mine-{self.loop.session.state.step}.pt"
        torch.save([self.loop.model.state_dict(), self.loop.optimizer.state_dict()], path)
        self.loop.session.checkpointed(path)
        return path

    def load(self, path: str) -> None:
        self.loaded.append(path)
        model, optimizer = torch.load(path)
        self.loop.model.load_state_dict(model)
        self.loop.optimizer.load_state_dict(optimizer)

    def go_wrong(self) -> None:
        for _ in range(3):
            self.loop.optimizer.zero_grad()
            (self.loop.loss() * float("nan")).backward()
            self.loop.optimizer.step()

    def listed(self) -> dict[int, Health]:
        self.loop.session._disk.close()
        return {s.step: s.health for s in list_snapshots(self.where / "r7", verify=True)}


def test_the_users_own_checkpoints_serve_as_the_disk_tier(tmp_path: Path) -> None:
    own = Own(tmp_path)
    loop = own.loop
    for step in range(40):
        if step in (10, 20):
            own.save()
            held = loop.held()
        loop.step()
    assert own.listed() == {10: Health.HEALTHY, 20: Health.HEALTHY}
    own.go_wrong()
    loop.optimizer.zero_grad()
    loop.loss().backward()
    assert loop.held() == held
    assert own.loaded == [str(tmp_path / "mine-20.pt")]
    loop.optimizer.step()
    for _ in range(4):
        loop.step()
    own.save()
    assert own.listed() == {10: Health.HEALTHY, 20: Health.HEALTHY, 48: Health.CANDIDATE}
    assert dict(loop.session.status().internal_errors) == {}
    loop.session.detach()
    assert (tmp_path / "mine-10.pt").exists()


def test_an_own_checkpoint_that_is_gone_or_does_not_load_is_passed_over(tmp_path: Path) -> None:
    own = Own(tmp_path)
    loop = own.loop
    for step in range(40):
        if step in (8, 16, 24):
            own.save()
            if step == 8:
                held = loop.held()
        loop.step()
    own.go_wrong()
    own.listed()
    (tmp_path / "mine-24.pt").unlink()
    (tmp_path / "mine-16.pt").write_bytes(b"no checkpoint")
    loop.optimizer.zero_grad()
    loop.loss().backward()
    assert loop.held() == held
    assert own.loaded == [str(tmp_path / "mine-16.pt"), str(tmp_path / "mine-8.pt")]
    loop.session.detach()


def test_a_checkpoint_saved_inside_an_incident_is_listed_as_unhealthy(tmp_path: Path) -> None:
    own = Own(tmp_path)
    for _ in range(30):
        own.loop.step()
    own.loop.step(own.loop.spoil)
    own.save()
    assert own.listed() == {31: Health.UNHEALTHY}
    assert own.loop.session.status().healthy == ()
    own.loop.session.detach()


def test_a_checkpoint_needs_somebody_who_can_load_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(AttachError, match=r"attach\(snapshots=Snapshots\(adopt=load\)\)"):
        loop.session.checkpointed("mine.pt")
    loop.session.detach()
    with pytest.raises(ConfigError, match=r"snapshots\.adopt must be a function"):
        Snapshots(adopt=3)  # type: ignore[arg-type]
