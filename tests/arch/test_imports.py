"""Who may import whom: the contracts, and what really gets loaded.

The oracle is the interpreter itself: a package is made unimportable and everything is imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, require

WEB = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "apscheduler")
WALK = """
import sys
for name in {banned!r}:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
import importlib, pkgutil, {package}
names = [m.name for m in pkgutil.walk_packages({package}.__path__, "{package}.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
assert not [n for n in {banned!r} if sys.modules.get(n) is not None]
print(len(names))
"""


def import_all(package: str, banned: tuple[str, ...]) -> int:
    code = WALK.format(package=package, banned=banned)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_every_sentinel_module_imports_without_torch() -> None:
    assert import_all("sentinel", ("torch", "sentinel_hooks")) > 5


@pytest.mark.slow
@pytest.mark.torch
def test_every_sentinel_hooks_module_imports_without_the_web_stack() -> None:
    # adapters import their framework lazily: none is installed here
    assert import_all("sentinel_hooks", (*WEB, "grafana_api", "httpx", "sentinel.sidecar")) > 3


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    require(lint.is_file(), "import-linter (it comes with the dev dependencies)")
    done = subprocess.run([lint], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def imported_names(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def allowed(folder: str, extra: set[str]) -> list[str]:
    """Imports under `folder` beyond the standard library, ourselves and `extra`."""
    bad = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in sorted(imported_names(path)):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in extra:
                bad.append(f"{path.relative_to(ROOT)} imports {name}")
    return bad


def test_the_core_imports_numpy_and_the_standard_library_only() -> None:
    assert allowed("sentinel/core", {"sentinel", "numpy"}) == []


def test_wire_adds_msgspec_and_nothing_else() -> None:
    assert allowed("sentinel/wire", {"sentinel", "numpy", "msgspec"}) == []


def test_client_and_traces_add_nothing_to_wire() -> None:
    assert allowed("sentinel/traces", {"sentinel", "numpy", "msgspec"}) == []
    extra = imported_names(ROOT / "sentinel/client.py")
    assert {n.split(".")[0] for n in extra} <= sys.stdlib_module_names | {"sentinel", "msgspec"}


def test_hooks_import_torch_numpy_msgspec_and_the_lower_layers_only() -> None:
    frameworks = {"transformers", "lightning", "accelerate"}  # adapters, lazily
    ours = {"sentinel", "sentinel_hooks", "torch", "numpy", "msgspec"}
    assert allowed("hooks/sentinel_hooks", ours | frameworks) == []


CLOCKS_AND_CHANCE = {
    "time",
    "random",
    "secrets",
    "logging",
    "socket",
    "http",
    "asyncio",
    "datetime",
}
INPUT_OUTPUT = {"threading", "subprocess", "tempfile", "shutil", "urllib", "selectors"}


def test_the_core_has_no_clock_no_chance_no_log_and_no_sockets() -> None:
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "sentinel/core").rglob("*.py"))
        for name in sorted(imported_names(path))
        if name.split(".")[0] in CLOCKS_AND_CHANCE | INPUT_OUTPUT or name.startswith("numpy.random")
    ]
    assert bad == []
