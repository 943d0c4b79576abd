"""What the Dockerfiles copy exists, and what the sidecar's image holds works without torch.

A real image is built where there is a container tool, by hand: see docs/kubernetes.md. Here the
same installation is made in an empty environment, and the same command started in it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support import ROOT

DOCKERFILES = ("Dockerfile", "Dockerfile.trainer")
START_S = 30.0


def instructions(name: str) -> list[str]:
    """The instructions of a Dockerfile, each on one line."""
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    plain = "\n".join(x for x in text.splitlines() if not x.startswith("#"))
    return [x for x in plain.replace("\\\n", " ").splitlines() if x.strip()]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_in_the_repository_and_passes_the_ignore_file(name: str) -> None:
    ignored = (ROOT / "deploy" / f"{name}.dockerignore").read_text().splitlines()
    let_in = [x.removeprefix("!") for x in ignored if x.startswith("!")]
    copied = 0
    for line in instructions(name):
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                copied += 1
                assert (ROOT / source).exists(), source
                assert any(source == x or source.startswith(x + "/") for x in let_in), source
    assert copied >= 4


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_does_not_run_as_root(name: str) -> None:
    users = [line.split()[1] for line in instructions(name) if line.startswith("USER ")]
    assert users == ["10001:10001"]


def test_the_sidecar_installs_no_torch_and_the_trainer_no_web_stack() -> None:
    def extras(name: str) -> set[str]:
        (line,) = [x for x in instructions(name) if "pip install" in x]
        found = re.search(r"'\.\[([\w,]+)\]'", line)
        assert found
        return set(found[1].split(","))

    assert extras("Dockerfile") == {"sidecar", "grafana"}
    assert extras("Dockerfile.trainer") == {"hooks"}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sidecars_installation_has_no_torch_and_serves(
    tmp_path: Path,
) -> None:
    from tests.arch.test_wheel import Env, run

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    env = Env(tmp_path / "env")
    env.install(wheel, "sidecar,grafana")
    env.lacks("torch", "grafana_foundation_sdk")
    (command,) = [x for x in instructions("Dockerfile") if x.startswith("CMD ")]
    arguments = json.loads(command.removeprefix("CMD "))
    path = tmp_path / "s.sock"
    arguments[arguments.index("--uds") + 1] = str(path)
    program = env.folder / "bin" / "sentinel"
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PYTHON"))}
    run(program, "--version")  # the files are in the page cache: what starts here is no cold disk
    before = time.monotonic()
    process = subprocess.Popen([str(program), *arguments], env=quiet, cwd=tmp_path)
    try:
        while not answers(path, "/readyz"):
            assert process.poll() is None, shlex.join(arguments)
            assert time.monotonic() < before + START_S
            time.sleep(0.02)
        took = time.monotonic() - before
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        print(f"ready after {took:.2f} s, {cpu:.2f} s of CPU")
        assert answers(path, "/metrics")
    finally:
        process.terminate()
        process.wait(20)
    assert process.returncode == 0


def answers(path: Path, target: str) -> bool:
    """Whether GET over that socket gives 200."""

    class Connection(HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(5)
            self.sock.connect(str(path))

    connection = Connection("sidecar")
    try:
        connection.request("GET", target)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
