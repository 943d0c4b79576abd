"""Embedded runs, seen in their folders."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import jsonschema
import pytest
from fastapi.testclient import TestClient

from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.sidecar.app import create_app
from sentinel.sidecar.embedded import executed
from sentinel.sidecar.openapi import document
from sentinel.sidecar.runs import details, summary
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.traces import ledger as ledgers
from sentinel.traces.recorder import Recorder
from tests.support import FakeClock
from tests.support.simulated import Damage, NanGradient, SimulatedTrainer, actions

TOKEN = "watcher-0123456789"


def embedded(folder: Path, name: str, steps: int = 300) -> tuple[SimulatedTrainer, Recorder]:
    recorder = Recorder(
        folder / name,
        run=name,
        policy=Policy.load("default"),
        state=State(),
        incarnation="life",
        layers=[{"name": "a"}, {"name": "b"}],
        segment_bytes=40_000,
    )
    trainer = SimulatedTrainer(
        seed=1, faults=[NanGradient(100), Damage(200, 3.0)], layers=2, recorder=recorder
    )
    trainer.run(steps)
    return trainer, recorder


def save_ledger(folder: Path, name: str, trainer: SimulatedTrainer) -> None:
    state = trainer.state
    ledgers.write(
        folder / name,
        ledgers.Saved(run=name, incarnation="life", step=state.step, ledger=state.ledger),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def watching(folder: Path, clock: FakeClock) -> Service:
    return Service(Settings(watch=(folder,)), clock=clock, timer=lambda: 0.0)


def look(service: Service) -> None:
    anyio.run(service.watched.look, service.now())


def touch(folder: Path, at: float) -> None:
    for path in folder.rglob("*.seg"):
        os.utime(path, (at, at))


def test_running_finished_halted_and_lost_runs_are_told_apart(
    folder: Path, clock: FakeClock
) -> None:
    for name in ("running", "finished", "halted", "lost"):
        _, recorder = embedded(folder, name, steps=20)
        if name in ("finished", "halted"):
            recorder.close()
    ledgers.write_halted(folder / "halted", step=20, reason="spent")
    touch(folder, clock.now - 5.0)
    touch(folder / "lost", clock.now - 500.0)
    service = watching(folder, clock)
    look(service)
    shown = {run.name: summary(run, clock.now)["state"] for run in service.all_runs()}
    assert shown == {name: name for name in ("running", "finished", "halted", "lost")}
    service.close()


def test_a_watched_run_is_shown_like_one_that_reports(folder: Path, clock: FakeClock) -> None:
    trainer, recorder = embedded(folder, "r7")
    save_ledger(folder, "r7", trainer)
    service = watching(folder, clock)
    look(service)
    about = details(service.run("r7"), clock.now)
    assert about["watched"]
    assert not about["decides"]
    assert about["step"] == 299
    assert about["loss"] == trainer.steps[-1].observation.loss
    assert about["layers"] == ["a", "b"]
    assert about["ledger"] == trainer.state.ledger
    found = service.store.series.curves(
        service.series_directory("r7"), ("loss",), None, None, 20_000
    )
    assert found["series"]["loss"]["value"] == [s.observation.loss for s in trainer.steps]
    trainer.run(10)
    look(service)
    assert service.run("r7").observation is not None
    assert details(service.run("r7"), clock.now)["step"] == 309
    recorder.close()
    service.close()


def test_a_watched_run_takes_no_orders_and_says_what_to_do_instead(
    folder: Path, clock: FakeClock
) -> None:
    _, recorder = embedded(folder, "r7")
    app = create_app(Settings(watch=(folder,), token=TOKEN), clock=clock, timer=lambda: 0.0)
    look(app.state.service)
    client = TestClient(app, headers={"authorization": f"Bearer {TOKEN}"})
    for path, body in (
        ("/v1/runs/r7/commands", {"kind": "pause"}),
        ("/v1/incidents/r7:1/ack", {}),
        ("/v1/incidents/r7:1/silence", {"for_s": 60}),
    ):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "watched"), path
        assert "touch the file PAUSE" in answer.json()["detail"]
    recorder.close()
    app.state.service.close()


def test_watching_writes_nothing_and_takes_no_lock(folder: Path, clock: FakeClock) -> None:
    trainer, _ = embedded(folder, "r7")
    save_ledger(folder, "r7", trainer)
    before = {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}
    service = watching(folder, clock)
    look(service)
    service.store.series.layers(service.series_directory("r7"), "layer_grad_norm", None, None, 10)
    assert {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")} == before
    assert "ledger.lock" not in Path("/proc/locks").read_text()
    service.close()


def test_a_damaged_run_hides_no_other(folder: Path, clock: FakeClock) -> None:
    embedded(folder, "good", steps=20)
    embedded(folder, "bad", steps=20)
    for path in (folder / "bad").rglob("scalars-*.seg"):
        path.write_bytes(b"SNTLSEG9" + path.read_bytes()[8:])
    (folder / "no run").mkdir()
    service = watching(folder, clock)
    look(service)
    assert [run.name for run in service.all_runs()] == ["good"]
    assert "framing version" in service.watched.trouble["bad"]
    service.close()


def test_one_runs_own_directory_can_be_watched(folder: Path, clock: FakeClock) -> None:
    embedded(folder, "r7", steps=20)
    service = watching(folder / "r7", clock)
    look(service)
    assert [run.name for run in service.all_runs()] == ["r7"]
    service.close()


def test_what_was_done_to_a_watched_run_is_answered_from_its_own_files(
    folder: Path, clock: FakeClock
) -> None:
    trainer, recorder = embedded(folder, "r7")
    save_ledger(folder, "r7", trainer)
    app = create_app(Settings(watch=(folder,), token=TOKEN), clock=clock, timer=lambda: 0.0)
    look(app.state.service)
    client = TestClient(app, headers={"authorization": f"Bearer {TOKEN}"})
    done = client.get("/v1/runs/r7/decisions").json()["decisions"]
    wanted = [(step, action.lower(), rule) for step, action, rule in actions(trainer.steps)]
    assert [(d["step"], d["action"], d["rule"]) for d in done] == wanted[::-1]
    assert "rollback" in {d["action"] for d in done}
    back = next(d for d in done if d["action"] == "rollback")
    assert (back["target"] is not None, back["incarnation"]) == (True, "life")
    found = client.get("/v1/runs/r7/incidents").json()["incidents"]
    kept = trainer.state.ledger.incidents
    assert [i["number"] for i in found] == [i.number for i in reversed(kept)]
    assert found
    assert found[-1]["actions"] == [list(a) for a in kept[0].actions]
    schemas = document("1")["components"]["schemas"]
    for name, rows in (("Executed", done), ("Incident", found)):
        for row in rows:
            jsonschema.validate(row, schemas[name])
    app.state.service.close()
    recorder.close()


def test_of_many_executed_actions_the_newest_are_answered(folder: Path) -> None:
    trainer, recorder = embedded(folder, "r7")
    recorder.close()
    found = executed(folder / "r7", "r7", 2)
    assert [row["step"] for row in found] == [s for s, _, _ in actions(trainer.steps)][-1:-3:-1]


def test_a_run_that_cannot_be_shown_is_said_once_in_the_log_and_in_the_list(
    folder: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    _, recorder = embedded(folder, "ä b", steps=20)
    recorder.close()
    (folder / "no run").mkdir()
    app = create_app(Settings(watch=(folder,), token=TOKEN), clock=clock, timer=lambda: 0.0)
    look(app.state.service)
    look(app.state.service)
    said = [r.getMessage() for r in caplog.records if "is not shown" in r.getMessage()]
    assert len(said) == 1, said
    client = TestClient(app, headers={"authorization": f"Bearer {TOKEN}"})
    listed = client.get("/v1/runs").json()
    assert listed["runs"] == []
    assert list(listed["not_shown"]) == ["ä b"]
    assert "its id cannot be shown here" in listed["not_shown"]["ä b"]
    app.state.service.close()


@pytest.mark.parametrize("what", ["of something else", "of zero bytes", "cut off in the header"])
def test_a_run_of_which_nothing_can_be_read_is_said(
    folder: Path, clock: FakeClock, what: str
) -> None:
    embedded(folder, "good", steps=20)
    embedded(folder, "bad", steps=20)
    for path in (folder / "bad").rglob("*.seg"):
        whole = path.read_bytes()
        path.write_bytes(
            {
                "of something else": bytes(range(1, 200)),
                "of zero bytes": b"",
                "cut off in the header": whole[:30],
            }[what]
        )
        os.utime(path, (clock.now - 60.0, clock.now - 60.0))
    service = watching(folder, clock)
    look(service)
    assert [run.name for run in service.all_runs()] == ["good"]
    assert "no file of its trace can be read" in service.watched.trouble["bad"]
    service.close()


def test_a_run_that_begins_just_now_is_no_trouble_yet(folder: Path, clock: FakeClock) -> None:
    place = folder / "new" / "0000-life"
    place.mkdir(parents=True)
    (place / "scalars-00000.seg").write_bytes(b"")
    os.utime(place / "scalars-00000.seg", (clock.now, clock.now))
    service = watching(folder, clock)
    look(service)
    assert service.watched.trouble == {}
    clock.advance(60.0)
    look(service)
    assert "new" in service.watched.trouble
    service.close()


def test_a_folder_that_cannot_be_listed_is_said_and_hides_no_other(
    folder: Path, clock: FakeClock
) -> None:
    embedded(folder, "good", steps=20)
    (folder.parent / "file").write_text("no folder")
    settings = Settings(watch=(folder.parent / "file", folder.parent / "none yet", folder))
    service = Service(settings, clock=clock, timer=lambda: 0.0)
    look(service)
    assert [run.name for run in service.all_runs()] == ["good"]
    (told,) = service.watched.trouble.items()
    assert told[0] == str(folder.parent / "file")
    assert "cannot be read" in told[1]
    service.close()


def test_an_entry_that_cannot_be_looked_at_hides_no_other(folder: Path, clock: FakeClock) -> None:
    embedded(folder, "good", steps=20)
    (folder / "loop").symlink_to("loop")
    service = watching(folder, clock)
    look(service)
    assert [run.name for run in service.all_runs()] == ["good"]
    (told,) = service.watched.trouble.items()
    assert told[0] == "loop"
    assert "Too many levels of symbolic links" in told[1]
    service.close()


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_folder_whose_runs_have_vanished_says_so_until_they_are_back(
    folder: Path, clock: FakeClock, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("r1", "r2"):
        embedded(folder, name, steps=20)
    service = watching(folder, clock)
    look(service)
    assert service.watched.trouble == {}
    folder.rename(folder.parent / "elsewhere")
    if how == "empty":
        folder.mkdir()
    for _ in range(2):
        look(service)
        why = f"this folder is {how}, 2 runs were in it: is its volume mounted?"
        assert service.watched.trouble == {str(folder): why}
    assert caplog.text.count("is its volume mounted?") == 1
    if how == "empty":
        folder.rmdir()
    (folder.parent / "elsewhere").rename(folder)
    look(service)
    assert service.watched.trouble == {}
    assert len(service.all_runs()) == 2
    service.close()


def test_a_run_of_long_steps_is_lost_after_ten_of_them_only(folder: Path, clock: FakeClock) -> None:
    trainer, _ = embedded(folder, "slow", steps=20)
    segment = max((folder / "slow").rglob("scalars-*"))
    service = Service(Settings(watch=(folder,), lost_after_s=5.0), clock=clock, timer=lambda: 0.0)
    for _ in range(3):
        trainer.run(1)
        os.utime(segment, (clock.now, clock.now))
        look(service)
        clock.advance(8.0)
    look(service)
    assert service.all_runs()[0].run_state == "running", "after 8 s of silence, as ever"
    clock.advance(60.0)
    look(service)
    assert service.all_runs()[0].run_state == "running"
    clock.advance(30.0)
    look(service)
    assert service.all_runs()[0].run_state == "lost"
    service.close()


def test_a_first_look_knows_long_steps_by_the_age_of_the_trace(
    folder: Path, clock: FakeClock
) -> None:
    embedded(folder, "slow", steps=20)
    segments = sorted((folder / "slow").rglob("scalars-*"))
    (segments[-1].parent / "config.json").write_text("{}")
    start = clock.now - 20 * 8.0
    os.utime(segments[-1].parent / "config.json", (start, start))
    os.utime(segments[-1], (clock.now, clock.now))
    clock.advance(70.0)
    service = Service(Settings(watch=(folder,), lost_after_s=5.0), clock=clock, timer=lambda: 0.0)
    look(service)
    assert service.all_runs()[0].run_state == "running"
    service.close()
