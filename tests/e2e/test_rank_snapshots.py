"""Real gloo ranks save and restore: DDP, FSDP2 and HSDP, on as many ranks and on others.

tests/support/crew.py runs the scenarios once; the tests read what every rank has said. The model
has sizes that no number of ranks divides, a tied weight, BatchNorm buffers, and a state of the
user's own that differs from rank to rank. All comparisons are bit by bit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli.main import main
from sentinel.traces import snapshots as store
from sentinel.traces.snapshots import Health, find_damage, list_snapshots
from tests.support import ROOT

torch = pytest.importorskip("torch")

from tests.hooks.worlds import digest
from tests.support import confirm

pytestmark = [pytest.mark.torch, pytest.mark.e2e, pytest.mark.slow]
NAME = store.snapshot_name(3, 0, 0)


class Crew:
    """Where the ranks have worked, and what they said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def said(self, scenario: str) -> list[dict[str, Any]]:
        result = json.loads((self.directory / f"{scenario}.json").read_text())
        assert result["hung"] == 0, scenario
        for rank, one in enumerate(result["said"]):
            assert one is None or "error" not in one, f"{scenario} rank {rank}: {one['error']}"
        answers: list[dict[str, Any]] = result["said"]
        return answers

    def snapshot(self, run: str) -> Path:
        return self.directory / run / "snapshots" / NAME


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    directory = tmp_path_factory.mktemp("crew")
    subprocess.run(
        [sys.executable, "-m", "tests.support.crew", str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "hooks")])},
        check=True,
        timeout=900,
    )
    return Crew(directory)


# ---------------------------------------------------------------- in memory


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_every_rank_puts_its_own_part_back_in_place_and_goes_on_bitwise(
    kind: str, crew: Crew
) -> None:
    for rank, said in enumerate(crew.said(f"ram_{kind}")):
        assert said.pop("gathered") is True, "the evaluation had left gathered parameters behind"
        missing = said.pop("missing")
        assert missing == ("there is no snapshot of step 3; there are ()" if rank == 1 else "")
        assert set(said.values()) == {True}, said


# ---------------------------------------------------------------- on disk


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_parts_are_written_committed_and_read_back_by_the_same_ranks(kind: str, crew: Crew) -> None:
    answers = crew.said(f"write_{kind}")
    assert [a["part"] for a in answers] == ["PartWritten"] * len(answers)
    assert [a["commit"] for a in answers] == ["Saved"] + ["NoneType"] * (len(answers) - 1)
    assert {(a["unmoved"], a["reason"], a["restored"]) for a in answers} == {(True, "", True)}
    assert len({a["token"] for a in answers}) == 1
    # A part is written once: replicas by rank 0, the second copy of a mesh not at all.
    written = [name for name in answers[0]["files"] if name.endswith(".distcp")]
    writers = {"ddp": 1, "fsdp": 4, "hsdp": 2}[kind]
    assert written == [f"__{rank}_0.distcp" for rank in range(writers)]
    [found] = list_snapshots(crew.directory / kind, verify=True)
    assert (found.health, found.ranks) == (Health.HEALTHY, len(answers))


def test_no_rank_needs_another_one_for_its_work(crew: Crew) -> None:
    """Each took, wrote, prepared and restored while the three others did nothing at all."""
    answers = crew.said("alone")
    assert answers[0]["kinds"] == ["PartWritten", "Saved"]
    assert [a["restored"] for a in answers] == [True] * 4


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_torch_alone_reads_the_whole(kind: str, crew: Crew) -> None:
    tensors, rest = confirm.read(crew.snapshot(kind))
    reference = torch.load(crew.directory / f"{kind}.reference.pt")
    if kind == "ddp":  # what may differ between ranks stays with each
        reference.pop("extra_0.average")
    assert tensors.keys() == reference.keys()
    for name, tensor in reference.items():
        assert digest(tensors[name]) == digest(tensor), name
    assert (rest["step"], rest["world"]) == (3, 2 if kind == "ddp" else 4)
    _, other = confirm.read(crew.snapshot(kind), rank=1)
    assert other["extra"][0]["rank"] == 1


def test_torchs_own_converter_reads_it_too(crew: Crew, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(crew.snapshot("fsdp"), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    reference = torch.load(crew.directory / "fsdp.reference.pt")
    for name, tensor in whole["model"].items():
        assert digest(tensor) == digest(reference[f"model.{name}"])


# ---------------------------------------------------------------- on another number of ranks


@pytest.mark.parametrize(
    ("scenario", "saved_by", "sharded"),
    [
        ("fsdp_on_2", 4, True),
        ("fsdp_on_ddp_2", 4, False),
        ("fsdp_on_1", 4, False),
        ("plain_on_4", 1, True),
        ("ddp_on_fsdp_4", 2, True),
        ("hsdp_on_fsdp_4", 4, True),
        ("ddp_on_1", 2, False),
        ("ddp_on_2", 2, False),
    ],
)
def test_any_number_of_ranks_goes_on_from_it(
    scenario: str, saved_by: int, sharded: bool, crew: Crew
) -> None:
    answers = crew.said(scenario)
    world = len(answers)
    for rank, said in enumerate(answers):
        assert said["found"] == [3]
        assert (said["reason"], said["unmoved"], said["same"]) == ("", True, True)
        # Of what cannot be cut anew a rank takes its own, or rank 0's.
        own = rank if rank < saved_by else 0
        assert said["position"] == [own, own]
        assert set(said["sharded"]) == set(said["moments sharded"]) == {sharded}
        assert said["average sharded"] is sharded
        assert said["resumed"] == 3
        if world == saved_by:
            assert said["notes"] == []
        else:
            then, now = ("one rank" if n == 1 else f"{n} ranks" for n in (saved_by, world))
            assert said["notes"][0] == f"it was saved by {then} and is put back on {now}"
            assert (f"rank {rank} was not among them" in said["notes"][-1]) is (rank >= saved_by)


# ---------------------------------------------------------------- trouble


def test_a_flipped_byte_in_one_ranks_file_is_refused_by_name_and_nobody_moves(crew: Crew) -> None:
    answers = crew.said("damaged")
    assert [bool(a["reason"]) for a in answers] == [False, False, True, False]
    assert answers[2]["reason"].startswith(f"{NAME}: __2_0.distcp is damaged: its CRC32 is")
    for said in answers:
        assert said["agreed"] is False
        assert said["unmoved"] is True
        assert (said["steps"], said["after"], said["next"]) == ([3, 4], [4], True)
        assert said["damage"].startswith("__2_0.distcp is damaged")
        assert said["listed"] == [[3, "damaged", 4], [4, "healthy", 4]]


def test_a_full_disk_on_one_rank_abandons_the_save_on_all_and_the_next_one_works(
    crew: Crew,
) -> None:
    answers = crew.said("full")
    assert [a["part"] for a in answers] == ["PartWritten", "Failed", "PartWritten", "PartWritten"]
    assert answers[1]["reason"] == "File too large"
    for rank, said in enumerate(answers):
        assert said["trouble"] == ("File too large" if rank == 1 else "another rank failed")
        assert (said["left"], said["steps"], said["due"], said["readers"]) == ([], [], True, 0)
        assert said["commit"] is True
        assert said["again"] == ["PartWritten", "NoneType" if rank else "Saved"]
        assert (said["steps again"], said["trouble again"]) == ([4], "")
        assert said["listed"] == [4]


def test_a_rank_killed_in_the_middle_of_its_part_leaves_a_torn_save_that_nobody_uses(
    crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = crew.said("killed")
    assert [a and a["part"] for a in answers] == ["PartWritten", "PartWritten", None, "PartWritten"]
    kind, reason = answers[0]["commit"]
    assert kind == "Failed"
    assert "manifest-2.json is missing" in reason
    run = crew.directory / "killed"
    whole, torn = list_snapshots(run, verify=True)
    assert (whole.health, torn.health) == (Health.HEALTHY, Health.TORN)
    assert torn.reason == "no COMMIT: the save was cut off; of its 4 ranks 2 had no part"
    assert find_damage(torn.path) == "no COMMIT: the save was cut off"
    files = os.listdir(torn.path)
    assert "rank-2.pt" in files
    assert "manifest-2.json" not in files
    assert main(["snapshots", str(run), "--verify"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "attempt", "state", "MiB", "ranks", "saved"]
    assert [line[4] for line in lines[1:3]] == ["4", "3/4"]


def test_a_number_used_twice_destroys_nothing(crew: Crew) -> None:
    for rank, said in enumerate(crew.said("twice")):
        assert said["part"] == "Failed"
        assert f"{NAME} holds a part of rank {rank} already" in said["reason"]
        assert said["highest"] == 0
    assert find_damage(crew.snapshot("twice")) == ""


@pytest.mark.parametrize("name", ["manifest-3.json", "__3_0.distcp", "rank-3.pt", ".metadata"])
def test_a_missing_part_is_refused_by_name(
    name: str, crew: Crew, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fsdp" / "snapshots" / NAME
    shutil.copytree(crew.snapshot("fsdp"), path)
    (path / name).unlink()
    assert find_damage(path, contents=False) == f"{name} is missing"
    assert main(["snapshots", str(tmp_path / "fsdp")]) == 1
    assert f"{name} is missing" in capsys.readouterr().out


def test_two_ranks_adopt_the_users_own_checkpoints(crew: Crew) -> None:
    answers = crew.said("own")
    assert [a["said"] for a in answers] == [["Saved", "Saved"], []]
    assert len({a["token"] for a in answers}) == 1
    for said in answers:
        assert (said["unprepared"], said["loaded"]) == (True, True)
        assert said["listed"] == [[10, "healthy"], [20, "unhealthy"]]
        assert said["notes"] == ["own-20.ckpt.unhealthy.json"]
