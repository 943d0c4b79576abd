"""Killed and started again: in an incident, in a rollback, after a halt; nothing done is forgotten.

Real processes die by SIGKILL. What they leave is read here with json and hashlib alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.traces.replay import replay
from tests.support import ROOT
from tests.support.ledgers import read_ledger

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.e2e]
KILLED = -9


def lives(run_dir: Path, *plans: str) -> list[dict[str, Any]]:
    """Live them one after another; how each ended, with the ledger it left."""
    run_dir.mkdir(exist_ok=True)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.mortals", str(run_dir), *plans],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(said) == len(plans), ended.stderr
    for one in said:
        one["file"] = read_ledger(run_dir / one["ledger"])
        one["ledger"] = one["file"]["ledger"]
    return said


KEPT = ("attempt", "rollbacks", "last_rollback", "last_target", "stopped", "rules")


def test_killed_in_an_incident_it_goes_on_with_the_same_incident(tmp_path: Path) -> None:
    """Two losses that are no numbers, a kill, and the third: that one rolls back."""
    first, second = lives(
        tmp_path,
        "steps=23,nan=20-22,die=step,save=mine@20",
        "load=mine,steps=2,nan=0-0",
    )
    assert first["status"] == KILLED
    assert (first["ledger"]["nonfinite_run"], first["ledger"]["rollbacks"]) == (2, [])
    assert second["status"] == 0
    assert second["file"]["step"] == 24
    assert second["ledger"]["rollbacks"] == [22]
    assert [i["number"] for i in second["ledger"]["incidents"]] == [1]


def test_killed_while_the_cut_holds_the_rate_comes_back_where_it_was(tmp_path: Path) -> None:
    first, second = lives(
        tmp_path,
        "steps=27,nan=20-22,die=step,save=mine@26",
        "load=mine,steps=3",
    )
    assert first["status"] == KILLED
    assert first["ledger"]["lr"] == {"factor": 0.5, "hold": 3, "rewarm": 10, "rewarm_total": 10}
    assert second["ledger"]["lr"] == {"factor": 0.5, "hold": 0, "rewarm": 10, "rewarm_total": 10}
    for name in KEPT:
        assert second["ledger"][name] == first["ledger"][name], name
    assert second["ledger"]["attempt"] == 1


@pytest.mark.parametrize("moment", ["decided", "restoring"])
def test_killed_in_a_rollback_budget_and_cooldown_count_it_and_the_rate_is_cut(
    moment: str, tmp_path: Path
) -> None:
    first, second = lives(
        tmp_path,
        f"steps=30,nan=20-22,die={moment},save=mine@13",
        "load=mine,steps=1",
    )
    assert first["status"] == KILLED
    assert first["ledger"]["pending_restore"] == first["ledger"]["last_target"] == 16
    assert (first["ledger"]["rollbacks"], first["ledger"]["attempt"]) == ([22], 0)
    ledger = second["ledger"]
    assert (ledger["pending_restore"], ledger["rollbacks"], ledger["attempt"]) == (None, [22], 0)
    assert ledger["last_rollback"] == 22
    assert ledger["lr"] == {"factor": 0.5, "hold": 5, "rewarm": 10, "rewarm_total": 10}
    assert ledger["counters"]["rollbacks"] == [["nonfinite_loss/failed", 1]]
    [incident] = ledger["incidents"]
    assert (incident["number"], incident["state"]) == (1, "firing")
    assert "the process ended before it was restored" in incident["summary"]
    status = (tmp_path / "status.txt").read_text()
    assert "these weights are none that this run has seen" in status  # mine is of no snapshot
    assert replay(tmp_path / "r7").identical


def test_a_crash_loop_cannot_refill_a_budget_and_the_halt_holds(tmp_path: Path) -> None:
    """Each life is killed after its rollback; the third wants one more, and is halted."""
    loop = "load=mine,steps=22,nan=16-18,die=step"
    ended = lives(tmp_path, "steps=22,nan=16-18,die=step,save=mine@8", loop, loop, loop)
    assert [one["status"] for one in ended] == [KILLED, KILLED, 86, 1]
    assert [len(one["ledger"]["rollbacks"]) for one in ended] == [1, 2, 2, 2]
    assert [one["ledger"]["stopped"] for one in ended] == [False, False, True, True]
    assert "StillHalted: run r7 was halted at step" in ended[3]["error"]
    assert ended[3]["ledger"] == ended[2]["ledger"]
    marker = tmp_path / "r7" / "HALTED"
    assert json.loads(marker.read_text())["exit_code"] == 86
    cleared = subprocess.run(
        [sys.executable, "-m", "sentinel.cli.main", "resume", str(tmp_path / "r7")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "halted at step" in cleared.stdout
    [after] = lives(tmp_path, "load=mine,steps=3")
    assert after["status"] == 0
    assert after["ledger"]["stopped"]
    assert len(after["ledger"]["rollbacks"]) == 2


def test_killed_in_a_halt_the_marker_is_there_already(tmp_path: Path) -> None:
    once = "load=mine,steps=22,nan=16-18"
    ended = lives(tmp_path, "steps=22,nan=16-18,save=mine@8", once, f"{once},die=halted", once)
    assert [one["status"] for one in ended] == [0, 0, KILLED, 1]
    assert ended[2]["ledger"]["stopped"]
    assert "was halted" in ended[3]["error"]


def test_the_wrong_lineage_is_noticed(tmp_path: Path) -> None:
    _, older, other = lives(
        tmp_path,
        "steps=30,save=mine@13",
        "load=mine,steps=1",
        "norm=no,steps=1",
    )
    assert older["status"] == other["status"] == 0
    ways = [(life["step"], life["from_step"]) for life in other["file"]["lives"]]
    assert ways == [(0, None), (30, None), (31, None)]
    assert "this is another model than the run had" in (tmp_path / "status.txt").read_text()
    ids = [life["incarnation"] for life in other["file"]["lives"]]
    assert [life["parent"] for life in other["file"]["lives"]] == ["", *ids[:-1]]
    prints = [life["fingerprint"].split("-")[0] for life in other["file"]["lives"]]
    assert prints[0] == prints[1] != prints[2]


def test_killed_at_any_step_the_way_goes_on_from_disk(tmp_path: Path) -> None:
    """Copies on disk outlive their process: the next one rolls back to them."""
    first, second = lives(
        tmp_path,
        "disk=yes,steps=30,die=step,save=mine@29",
        "disk=yes,load=mine,steps=8,nan=3-5",
    )
    assert first["status"] == KILLED
    assert second["ledger"]["counters"]["rollbacks"] == [["nonfinite_loss/restored", 1]]
    assert second["ledger"]["last_target"] in {s.step for s in _copies(tmp_path)}
    assert replay(tmp_path / "r7").identical


def test_killed_in_a_save_the_torn_copy_is_refused_and_the_ledger_is_as_it_was(
    tmp_path: Path,
) -> None:
    """The rate is cut after a rollback when the process dies with a snapshot half on disk."""
    first, second = lives(
        tmp_path,
        "disk=yes,steps=60,nan=20-22,die=saving,save=mine@22",
        "disk=yes,load=mine,steps=1",
    )
    assert first["status"] == KILLED
    assert first["ledger"]["attempt"] == 1
    assert first["ledger"]["lr"]["factor"] == 0.5
    assert second["status"] == 0
    for name in KEPT:
        assert second["ledger"][name] == first["ledger"][name], name
    assert second["ledger"]["lr"]["factor"] == 0.5
    copies = _copies(tmp_path)
    assert [str(s.health) for s in copies].count("torn") == 1, copies
    assert replay(tmp_path / "r7").identical


def _copies(run_dir: Path) -> list[Any]:
    from sentinel.traces.snapshots import list_snapshots

    return list_snapshots(run_dir / "r7", verify=True)
