"""Break one thing in a copy of the package, and see whether a test of tests/core turns red.

    result = try_mutant(name, folder)       Result(name, killed_by, seconds)

The working tree is never touched: package and tests are copied to `folder`, and the tests run
there, in a process of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutants.catalog import MUTANTS, Mutant
from tests.support import ROOT

CORE = Path("sentinel") / "core"
# Examples first: they are quick, and most breaks are seen there.
FIRST = (
    "tests/core/test_engine.py",
    "tests/core/test_ledger.py",
    "tests/core/detectors",
    "tests/core/test_judge.py",
    "tests/core/test_incidents.py",
    "tests/core/test_policy.py",
    "tests/core/test_windows.py",
    "tests/core/test_generated_policies.py",
)
LIMIT_S = 300


class Result(NamedTuple):
    """What became of one mutant; `killed_by` is the test that turned red, "" for none."""

    name: str
    killed_by: str
    seconds: float


def places(mutant: Mutant) -> int:
    """How often the text to replace stands in its file; it must be once."""
    return (ROOT / CORE / mutant.file).read_text(encoding="utf-8").count(mutant.old)


def _tests() -> list[str]:
    """All of tests/core; pytest sorts arguments that overlap, so each file is named once."""
    every = (str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests/core").glob("test_*.py")))
    return [*FIRST, *(path for path in every if path not in FIRST)]


def try_mutant(name: str, folder: Path) -> Result:
    """Apply one mutant to a fresh copy in `folder` and run the core tests until one fails.

    Raises:
        RuntimeError: the tests could not be run at all.
    """
    began = time.perf_counter()
    mutant = MUTANTS[name]
    for part in ("sentinel", "tests"):
        shutil.copytree(
            ROOT / part,
            folder / part,
            ignore=shutil.ignore_patterns("__pycache__", "golden"),
            dirs_exist_ok=True,
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / CORE / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{name}: {mutant.old!r} must stand once in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--tb=no",
            "-rf",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.mutants.no_shrink",
            *_tests(),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode == 0:
        return Result(name, "", seconds)
    killed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or killed is None:
        raise RuntimeError(f"{name}: the tests did not run:\n{done.stdout}{done.stderr}")
    return Result(name, killed[1], seconds)
