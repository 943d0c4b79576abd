"""`sentinel snapshots`: what is listed, in words and for programs. No torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli.main import main
from sentinel.traces import snapshots as store


def save(run: Path, step: int, marker: str = "", **more: str) -> Path:
    path = run / store.DIRECTORY / store.snapshot_name(step, 0, 0)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(bytes(2 << 20))
    values = {"run": run.name, "step": step, "attempt": 0}
    manifest = {**values, "parameters": "p", "weights": f"w{step}", "saved_at": "then", **more}
    store.write_manifest(path, 0, ["__0_0.distcp"], manifest)
    store.commit(path, 1, values)
    if marker:
        store.mark(path, marker, {"reason": "because"} if marker == store.UNHEALTHY else {})
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "r7"
    save(run, 0, store.HEALTHY)
    save(run, 50, store.UNHEALTHY)
    (save(run, 100) / store.COMMIT).unlink()
    save(run, 200, adopted=str(tmp_path))
    return run


def test_states_sizes_and_reasons_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in lines[1:5]] == [
        ["0", "0", "healthy", "2.0"],
        ["50", "0", "unhealthy", "2.0"],
        ["100", "0", "torn", "2.0"],
        ["200", "0", "candidate", "2.0"],
    ]
    assert lines[2][-1] == "because"
    assert " ".join(lines[3][5:]) == "no COMMIT: the save was cut off"
    assert lines[4][-2:] == ["adopted", str(run.parent)]


def test_a_flipped_byte_is_found_with_verify_only_and_told_by_the_exit_status(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / store.DIRECTORY / "00000000-0-0" / "__0_0.distcp"
    file.write_bytes(bytes(1000) + b"1" + bytes((2 << 20) - 1001))
    assert main(["snapshots", "r7", "--run-dir", str(run.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["snapshots"][0]["health"] == "healthy"
    assert main(["snapshots", "r7", "--run-dir", str(run.parent), "--json", "--verify"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["verified"]) == (1, True)
    first = data["snapshots"][0]
    assert (first["health"], first["weights"]) == ("damaged", "")
    assert first["reason"].startswith("__0_0.distcp is damaged: its CRC32 is")


def test_an_adopted_checkpoint_that_is_gone_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path / "r7", 10, store.HEALTHY, adopted=str(tmp_path / "mine.pt"))
    assert store.find_damage(path) == f"the adopted checkpoint {tmp_path / 'mine.pt'} is gone"


def test_a_run_without_snapshots_says_where_it_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r9").mkdir()
    assert main(["snapshots", str(tmp_path / "r9")]) == 2
    assert "none in" in capsys.readouterr().err
    assert main(["snapshots", "r8", "--run-dir", str(tmp_path)]) == 2
    assert "there is no run 'r8'" in capsys.readouterr().err


def test_a_snapshot_of_a_later_format_is_refused_with_both_versions(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FORMAT", 9)
    path = save(run, 500)
    monkeypatch.undo()
    assert store.find_damage(path) == "COMMIT is of format 9, this sentinel reads 1"
