"""With SENTINEL_REQUIRE_ALL=1 a skip that hides a missing part is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

CASES = """
import pytest
from tests.support import not_applicable, require

def test_a_part_is_missing():
    require(False, "promtool")

def test_an_import_is_missing():
    pytest.importorskip("no_such_module_anywhere")

@pytest.mark.skipif(True, reason="always")
def test_a_plain_skip():
    pass

def test_a_case_that_cannot_exist():
    not_applicable("LBFGS with a scaler raises in torch itself")

@pytest.mark.gpu
def test_on_a_gpu():
    pytest.skip("no CUDA device")

@pytest.mark.xfail(reason="known", strict=True)
def test_known_to_fail():
    assert False

def test_that_passes():
    require(True, "anything")
"""
MODULE = 'import pytest\npytest.importorskip("no_such_module_anywhere")\n'


def outcome(folder: Path, require_all: str | None) -> dict[str, int]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PYTEST_"))}
    env["PYTHONPATH"] = str(ROOT)
    if require_all is not None:
        env["SENTINEL_REQUIRE_ALL"] = require_all
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", folder, "-W", "ignore", folder),
        ],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
    )
    last = done.stdout.strip().splitlines()[-1]
    return {kind: int(n) for n, kind in re.findall(r"(\d+) (\w+)", last.split(" in ")[0])}


@pytest.mark.slow
def test_only_skips_that_hide_a_missing_part_become_failures(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    assert outcome(tmp_path, "0") == {"passed": 1, "skipped": 5, "xfailed": 1}
    strict = {"passed": 1, "skipped": 2, "xfailed": 1, "failed": 2, "error": 1}
    assert outcome(tmp_path, "1") == strict


@pytest.mark.slow
def test_a_module_that_skips_itself_is_a_failure_too(tmp_path: Path) -> None:
    (tmp_path / "test_module.py").write_text(MODULE)
    assert outcome(tmp_path, None) == {"skipped": 1}
    assert outcome(tmp_path, "1") == {"error": 1}
