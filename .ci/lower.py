"""Run the fast tests with the lowest versions that pyproject.toml declares: `make lower`.

The environment is .venv-lower, made anew from the bounds themselves, so that a bound that is
raised or lowered is tested as it stands. What the bounds pull in on their own (starlette,
pydantic) is left to the resolver, as for a user.

torch at its lower bound is a CUDA build with its libraries on most machines: 5 GB. Where that is
too much, SENTINEL_LOWER_TORCH=0 leaves it out and the tests that need it too, and says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENV = ROOT / ".venv-lower"
# Warnings of torch 2.6 about itself: SequentialLR calls a deprecated signature, and
# torch.distributed.checkpoint a deprecated storage. Newer ones do not.
TORCHS_OWN = (
    "-Wignore:The epoch parameter in `scheduler.step:UserWarning",
    "-Wignore:TypedStorage is deprecated:UserWarning",
)
RUNNERS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx")


def lowest(requirements: list[str]) -> list[str]:
    """`numpy>=1.26` becomes `numpy==1.26`; a requirement without a bound is an error."""
    pins = []
    for requirement in requirements:
        found = re.match(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9][0-9.]*)", requirement)
        if found is None:
            raise SystemExit(f"pyproject.toml: {requirement!r} declares no lower bound (name>=X)")
        pins.append(f"{found[1]}=={found[2]}")
    return pins


def needing_torch() -> list[Path]:
    """Test files that import torch, ours that does, or a test module that does."""
    torch = re.compile(
        r"^\s*(import|from) (torch|sentinel_hooks|tests\.(acceptance|hooks))", re.MULTILINE
    )
    tests = ROOT / "tests"
    return [
        *(tests / folder for folder in ("acceptance", "hooks", "bench")),
        *(path for path in sorted(tests.rglob("test_*.py")) if torch.search(path.read_text())),
    ]


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pins = lowest([*project["dependencies"], *extras["sidecar"], *extras["grafana"]])
    with_torch = os.environ.get("SENTINEL_LOWER_TORCH", "1") != "0"
    if with_torch:
        pins += lowest(extras["hooks"])

    exact = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    runners = [pin for pin in exact if pin.split("==")[0] in (*RUNNERS, "hatchling", "editables")]

    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", ENV], check=True)
    python = ENV / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet"]
    install = [*pip, "install", "--disable-pip-version-check"]
    print("lowest versions:", *pins)
    subprocess.run([*install, *pins, *runners], check=True)
    subprocess.run([*install, "--no-build-isolation", "--no-deps", "-e", ROOT], check=True)

    marks = "not slow and not e2e and not full and not gpu"
    marks = f"lower or ({marks})"
    contracts = "tests/arch/test_imports.py::test_import_contracts_hold"  # needs the linter
    tests = ["tests", "--deselect", contracts]
    if not with_torch:
        marks = f"({marks}) and not torch"
        tests += [f"--ignore={path}" for path in needing_torch()]
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "2", *TORCHS_OWN, "-m", marks, *tests],
        cwd=ROOT,
    )
    if not with_torch:
        print("torch was left out (SENTINEL_LOWER_TORCH=0): its lower bound was not tested")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
