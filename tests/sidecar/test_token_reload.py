"""Token files are followed while the sidecar runs: rotation, removal, and files that are broken."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.core.errors import ConfigError
from sentinel.sidecar import exporter
from sentinel.sidecar.jobs import Jobs
from sentinel.sidecar.routes.read import _stream
from sentinel.sidecar.security import Role, TokenFiles
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from tests.support import FakeClock
from tests.support.sidecars import serving

OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"


def names(files: TokenFiles, *tokens: str) -> list[str | None]:
    return [getattr(files.access.who(f"Bearer {token}"), "name", None) for token in tokens]


class TestFiles:
    def test_a_rotation_lets_both_in_and_then_the_new_one_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "control"
        path.write_text(f"ann {OLD}\n")
        files = TokenFiles([(Role.CONTROL, path)])
        held = files.access
        assert names(files, OLD, NEW) == ["ann", None]
        path.write_text(f"ann {OLD}\nann {NEW}\n")
        changed = files.take(files.read())
        assert changed is not None
        assert (changed.added, changed.removed) == (("ann",), ())
        assert names(files, OLD, NEW) == ["ann", "ann"]
        path.write_text(f"ann {NEW}\n")
        changed = files.take(files.read())
        assert changed is not None
        assert (changed.added, changed.removed) == ((), ("ann",))
        assert names(files, OLD, NEW) == [None, "ann"]
        assert files.access is held  # who holds it needs not be told

    def test_a_secret_that_kubernetes_swaps_by_a_link_is_seen(self, tmp_path: Path) -> None:
        for name, token in (("a", OLD), ("b", NEW)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "token").write_text(token)
            os.utime(tmp_path / name / "token", (1.0, 1.0))  # same size, same time
        (tmp_path / "data").symlink_to("a")
        files = TokenFiles([(Role.READ, tmp_path / "data" / "token")])
        (tmp_path / "next").symlink_to("b")
        (tmp_path / "next").rename(tmp_path / "data")
        assert files.take(files.read()) is not None
        assert names(files, OLD, NEW) == [None, "read"]

    def test_what_does_not_change_changes_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "t"
        path.write_text(OLD)
        files = TokenFiles([(Role.READ, path)])
        assert files.take(files.read()) is None
        path.write_text(f"# a comment more\n{OLD}\n")
        assert files.take(files.read()) is None
        assert files.trouble == ""

    @pytest.mark.parametrize(
        ("broken", "says"),
        [
            ("", "holds no token"),
            ("short\n", "16 to 512"),
            (f"ann {NEW}\nbob {NEW}\n", "'ann' and 'bob' are equal"),
            (None, "No such file"),
        ],
    )
    def test_a_broken_file_keeps_all_the_tokens_of_before(
        self, tmp_path: Path, broken: str | None, says: str
    ) -> None:
        path, other = tmp_path / "control", tmp_path / "read"
        path.write_text(OLD)
        other.write_text("reader-0123456789abcdef")
        files = TokenFiles([(Role.CONTROL, path), (Role.READ, other)], shared="secret")
        path.unlink()
        if broken is not None:
            path.write_text(broken)
        other.write_text("nobody-0123456789abcdef")  # sound, and does not count either
        assert files.take(files.read()) is None
        assert says in files.trouble
        assert NEW not in files.trouble
        known = names(files, OLD, "reader-0123456789abcdef", "nobody-0123456789abcdef", "secret")
        assert known == ["control", "read", None, "shared"]
        path.write_text(NEW)
        changed = files.take(files.read())
        assert changed is not None
        assert changed.removed == ("control", "read")
        assert files.trouble == ""
        assert names(files, OLD, NEW, "secret") == [None, "control", "shared"]

    def test_a_broken_file_at_the_start_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            TokenFiles([(Role.READ, tmp_path / "none")])


class TestJob:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "control"
        path.write_text(f"ann {OLD}\n")
        return path

    @pytest.fixture
    def service(self, path: Path, clock: FakeClock) -> Iterator[Service]:
        settings = Settings(token_files=((Role.CONTROL, path),))
        service = Service(settings, clock=clock, timer=lambda: 0.0)
        yield service
        service.close()

    def test_a_change_is_audited_by_name_and_never_with_the_token(
        self, service: Service, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def test() -> None:
            jobs = Jobs(service)
            path.write_text(f"bob {NEW}\n")
            await jobs.tokens()
            await jobs.tokens()

        asyncio.run(test())
        (entry,) = service.people.recent
        assert (entry.action, entry.outcome) == ("tokens", "accepted")
        assert entry.detail == {"added": ["bob"], "removed": ["ann"]}
        assert "removed=['ann']" in caplog.text
        assert OLD not in caplog.text
        assert NEW not in caplog.text
        assert service.door.access.who(f"Bearer {OLD}") is None

    def test_a_broken_file_is_loud_once_and_a_metric_until_it_is_mended(
        self, service: Service, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def metric() -> float:
            text = asyncio.run(exporter.render(service, "1")).decode()
            found = [x for x in text.splitlines() if x.startswith("sentinel_sidecar_token_trouble")]
            return float(found[0].split()[1])

        async def turns() -> None:
            jobs = Jobs(service)
            for _ in range(3):
                await jobs.tokens()

        assert metric() == 0.0
        path.write_text("")
        asyncio.run(turns())
        assert metric() == 1.0
        errors = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "the tokens of before stay in use" in errors[0].getMessage()
        assert service.door.access.who(f"Bearer {OLD}") is not None
        path.write_text(f"ann {OLD}\n")
        asyncio.run(turns())
        assert metric() == 0.0
        assert "sound again" in caplog.text

    def test_a_stream_of_a_removed_token_ends(self, service: Service, path: Path) -> None:
        async def test() -> None:
            service.ready = True
            jobs, stream = Jobs(service), _stream(service, None, "")
            assert await anext(stream) == b"retry: 2000\n\n"
            path.write_text(f"ann {OLD}\nbob {NEW}\n")
            await jobs.tokens()
            service.hub.publish("run", "r", {"state": "lost"})
            assert b"event: run" in await anext(stream)  # one that was added ends none
            path.write_text(f"bob {NEW}\n")
            await jobs.tokens()
            async with asyncio.timeout(10):
                assert [part async for part in stream] == []
            assert not service.hub.listeners

        asyncio.run(test())


@pytest.mark.e2e
@pytest.mark.parametrize("hangup", [False, True])
def test_a_running_sidecar_follows_its_token_files(tmp_path: Path, hangup: bool) -> None:
    path = tmp_path / "control"
    path.write_text(f"ann {OLD}\n")
    with serving("--token-file", f"control={path}") as at:

        def access(token: str) -> str | None:
            asked = urllib.request.Request(
                at.url + "/v1/access", headers={"authorization": f"Bearer {token}"}
            )
            with urllib.request.urlopen(asked, timeout=10) as answer:
                name: str | None = json.load(answer)["name"]
            return name

        assert (access(OLD), access(NEW)) == ("ann", None)
        path.write_text(f"bob {NEW}\n")
        if hangup:
            at.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while access(OLD) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert access(NEW) == "bob"
        status, _ = at.stop()
        assert status == 0
