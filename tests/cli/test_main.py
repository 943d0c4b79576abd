"""The command line: what it prints, its exit status, and a server that starts and stops well."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli import main as cli
from sentinel.client import Client
from sentinel.core.errors import ConfigError
from sentinel.core.policy import SHIPPED, Policy
from sentinel.sidecar.serve import bind_tcp, bind_uds
from sentinel.wire import codec
from tests.support.sidecars import serving


def test_a_shown_policy_reads_back_as_the_same_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in SHIPPED:
        assert cli.main(["policy", "show", name]) == 0
        assert Policy.parse(capsys.readouterr().out, "x") == Policy.load(name)


def test_a_shown_policy_as_json_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policy", "show", "default", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(Policy.load("default").to_dict())
    )


def test_check_says_that_a_policy_is_sound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[grad_norm]\nfactor = 5.0\n")
    assert cli.main(["policy", "check", str(mine)]) == 0
    digest = codec.policy_hash(Policy.load(mine)).hex()
    assert capsys.readouterr().out == f"mine: sound, mode act, hash {digest}\n"


def test_check_names_the_setting_the_bound_and_the_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[lr]\ncut = 7.0\n")
    assert cli.main(["policy", "check", str(broken)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "lr.cut must lie between 0.001 and 1, got 7" in said.err


def test_demo_passes_its_arguments_on_to_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []

    def call(command: list[str], **_: Any) -> int:
        seen.append(command)
        return 7

    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert cli.main(["demo", "--json", "--steps", "3"]) == 7
    assert seen == [[sys.executable, "-m", "sentinel_hooks.demo", "--json", "--steps", "3"]]


def test_demo_without_torch_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cli.main(["demo"]) == 1
    assert "pip install 'torch-sentinel[hooks]'" in capsys.readouterr().err


def test_status_of_a_sidecar_that_is_not_there_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert cli.main(["status", "--sidecar", f"http://127.0.0.1:{port}"]) == 1
    said = capsys.readouterr().err
    assert f"sentinel: no sidecar answers at http://127.0.0.1:{port}: " in said
    assert "start one (sentinel serve) or name another (--sidecar URL, $SENTINEL_SIDECAR)" in said


def test_a_port_that_is_none_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--port", "70000"])
    assert caught.value.code == 2
    assert "from 0 to 65535" in capsys.readouterr().err


class TestBinding:
    def test_the_socket_is_0660_from_the_first_moment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = os.umask(0)
        try:
            with bind_uds(str(tmp_path / "s.sock")) as sock:
                mode = stat.S_IMODE(os.stat(sock.getsockname()).st_mode)
                assert oct(mode) == "0o660"
            assert os.umask(0) == 0  # put back
        finally:
            os.umask(before)

    def test_a_dead_socket_is_replaced_and_a_live_one_is_not(self, tmp_path: Path) -> None:
        path = str(tmp_path / "s.sock")
        with bind_uds(path):
            pass
        with bind_uds(path) as sock:
            sock.listen(1)
            with pytest.raises(ConfigError, match=r"listens on .* already"):
                bind_uds(path)

    def test_a_file_that_is_no_socket_is_never_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "data"
        path.write_text("precious")
        with pytest.raises(ConfigError, match="something else"):
            bind_uds(str(path))
        assert path.read_text() == "precious"

    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_others_may_reach_it_only_with_a_token(self, host: str) -> None:
        with pytest.raises(ConfigError, match=r"loopback address while there is no token"):
            bind_tcp(host, 0, guarded=False)
        bind_tcp("0.0.0.0", 0, guarded=True).close()

    def test_a_taken_port_is_named(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                bind_tcp("127.0.0.1", port, guarded=False)


@pytest.mark.e2e
@pytest.mark.slow
def test_serve_says_one_line_answers_and_stops_cleanly_on_sigterm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.sock"
    with serving("--uds", str(path), "--policy", "observe") as process:
        assert process.line.startswith(f"sentinel listening on {process.url} and unix://{path} ")
        assert "policy=observe" in process.line
        assert oct(stat.S_IMODE(path.stat().st_mode)) == "0o660"
        client = Client(process.url)
        assert client.get("/readyz", deadline_s=5.0) == b"ready\n"
        assert cli.main(["status", "--sidecar", f"unix://{path}"]) == 0
        assert capsys.readouterr().out == "no runs\n"
        status, said = process.stop()  # with a connection still open
        client.close()
    assert (status, said) == (0, "")
    assert not path.exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_the_command_imports_neither_torch_nor_the_web_stack_until_it_serves() -> None:
    code = (
        "import sys; from sentinel.cli.main import main; main(['policy', 'check', 'default']);"
        "bad = {'torch', 'fastapi', 'uvicorn', 'apscheduler'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_policy_file_that_begins_with_a_bom_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "notepad.toml"
    path.write_bytes(b"\xef\xbb\xbf[grad_norm]\r\nfactor = 5.0\r\n")
    assert cli.main(["policy", "check", str(path)]) == 0
    assert capsys.readouterr().out.startswith("notepad: sound, mode act")


def test_a_shown_policy_has_no_stray_blank_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policy", "show", "default"]) == 0
    assert "\n\n\n" not in capsys.readouterr().out


def test_python_m_sentinel_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sentinel", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "sentinel")
