"""`make lower` really runs with what pyproject.toml declares as the least."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.support import ROOT


def declared() -> dict[str, tuple[int, ...]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["hooks"] + extras["sidecar"] + extras["grafana"]
    bounds = {}
    for line in lines:
        name, bound = re.split(r"\s*>=\s*", line.split(",")[0])
        bounds[name] = numbers(bound)
    return bounds


def numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0]))
    while found and found[-1] == 0:
        found = found[:-1]
    return found


@pytest.mark.lower
def test_installed_are_exactly_the_lower_bounds() -> None:
    found = {}
    for name in declared():
        try:
            found[name] = numbers(version(name))
        except PackageNotFoundError:
            assert name == "torch", f"{name} is not installed here"  # gigabytes: by request only
    assert found == {name: declared()[name] for name in found}


def test_every_dependency_declares_a_lower_bound() -> None:
    assert all(declared().values())
    assert {"numpy", "msgspec", "torch", "fastapi"} <= set(declared())
