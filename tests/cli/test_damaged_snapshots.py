"""Whether there is anything whole to go back to, told at 3 a.m. before the order is given."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli import look
from sentinel.cli import main as cli
from tests.sidecar.test_copies import CANDIDATE, HEALTHY, Place
from tests.sidecar.test_verify import flip, snapshot
from tests.support import FakeClock
from tests.support.served import served
from tests.support.waits import until


class Terminal(io.StringIO):
    """Somebody sits there."""

    def isatty(self) -> bool:
        return True


class At:
    """The command line, and the sidecar that it asks."""

    def __init__(self, place: Place, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.place, self._url, self._capsys = place, url, capsys

    def say(self, *arguments: str) -> tuple[int, str]:
        status = cli.main([*arguments, "--sidecar", self._url])
        return status, self._capsys.readouterr().out

    def read(self) -> None:
        verifier = self.place.service.verifier
        assert verifier is not None
        until(lambda: not verifier.busy)  # its job may be at it
        self.place.read()


@pytest.fixture
def at(tmp_path: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> Iterator[At]:
    place = Place(tmp_path, clock)
    with served(place.app, tmp_path / "s.sock") as url:
        place.register(*HEALTHY, CANDIDATE)
        yield At(place, url, capsys)


def test_a_damaged_snapshot_is_seen_in_every_view_and_what_is_known_of_the_others(
    at: At, clock: FakeClock
) -> None:
    for step in (100, 200, 300):
        path = snapshot(at.place.folder, step)
        if step == 300:
            flip(path / "__0_0.distcp")
    at.read()
    clock.advance(7200.0)
    _, out = at.say("status", "r7")
    lines = out.splitlines()
    where = next(n for n, line in enumerate(lines) if line.startswith("  snapshots "))
    assert lines[where] == "  snapshots       100   (verified 2 h ago)"
    assert lines[where + 1] == "                  200   (verified 2 h ago)"
    assert lines[where + 2].startswith(
        "                  300   (DAMAGED on disk: __0_0.distcp is damaged: its CRC32 is "
    )
    assert lines[where + 2].endswith("; read 2 h ago)")
    memory = "(not verified: there is no copy on disk: in the trainer's memory only)"
    assert lines[where + 3] == f"                  400   {memory}"
    assert lines[where + 4] == f"  candidates      450   {memory}"
    said = "  ! the snapshot of step 300 is damaged on disk"
    (alarm,) = [line for line in lines if line.startswith(said)]
    assert alarm.endswith("of step 200 (verified); sentinel snapshots r7 --verify")
    assert "1 damaged snapshot\n" in at.say("runs")[1]
    rows = json.loads(at.say("status", "r7", "--json")[1])["snapshots"]
    assert [row["disk"] for row in rows] == ["none", "none", "damaged", "sound", "sound"]


def test_where_nothing_can_be_seen_it_is_said_once(
    tmp_path: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path, clock, run_dirs=())
    with served(place.app, tmp_path / "s.sock") as url:
        place.register(*HEALTHY)
        out = At(place, url, capsys).say("status", "r7")[1]
    assert "\n  snapshots       100, 200, 300, 400   (not verified: this sidecar sees no " in out
    assert "--run-dir RUN_DIR" in out


@pytest.mark.parametrize("where", [(), ("--to", "400")])
def test_whoever_orders_a_rollback_to_a_damaged_one_is_told_before_it_is_sent(
    at: At, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]
) -> None:
    flip(snapshot(at.place.folder, 400) / "__0_0.distcp")
    snapshot(at.place.folder, 300)
    at.read()
    order = ("command", "r7", "rollback", *where, "--wait", "0")
    said = "! the snapshot of step 400 is damaged on disk (__0_0.distcp"
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    status, out = at.say(*order)
    assert (status, out.startswith(said)) == (1, True)
    assert out.endswith("[y/N] not sent\n")
    assert not at.place.service.runs.get("r7").orders
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    status, out = at.say(*order)
    assert (status, out.count(said)) == (0, 1)
    assert "waiting for the trainer" in out
    # A script is told with the answer.
    status, out = at.say(*order, "--yes")
    assert (status, out.startswith(said)) == (0, True)
    status, out = at.say("command", "r7", "rollback", "--to", "300", "--yes", "--wait", "0")
    assert (status, "damaged" in out) == (0, False)


def test_orders_that_are_not_shown_are_counted(at: At) -> None:
    for n in range(8):
        at.place.order(kind="pause", id=f"p{n}")
    out = at.say("status", "r7")[1]
    assert out.splitlines()[-6:-5] == ["  ... 3 earlier: sentinel audit r7"]
    assert out.count("pause automation: ") == 5


def test_incidents_that_nobody_keeps_are_counted(at: At) -> None:
    ledger: dict[str, Any] = {"next_incident": 41}
    known = [{"number": n} for n in range(9, 41)]
    assert look._lacking({"ledger": ledger}, [*known, *({"number": n} for n in range(9))]) == ""
    assert look._lacking({"ledger": None}, []) == ""
    why = look._lacking({"ledger": ledger, "watched": True}, known)
    assert why.startswith("8 earlier ones are not listed: of a run that is only watched")
    run = at.place.service.runs.get("r7")
    assert run.state is not None
    run.mirror.state = replace(run.state, ledger=replace(run.state.ledger, next_incident=3))
    status, out = at.say("incidents", "r7", "--all")
    assert (status, out.startswith("r7: 2 earlier ones are not listed: ")) == (0, True)
    assert at.say("incidents", "r7")[1].startswith("no open incidents; --all shows")
    told = json.loads(at.say("incidents", "r7", "--all", "--json")[1])
    assert list(told["not_listed"]) == ["r7"]
