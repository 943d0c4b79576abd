"""The wheel: what is in it, and what each extra brings, installed alone in a fresh environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT, require

pytestmark = [pytest.mark.slow]
SHIPPED = {".py", ".typed", ".toml", ".html", ".js", ".css", ".json"}
PINS = ROOT / ".ci" / "constraints.txt"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_exactly_the_two_packages_and_their_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = [n for n in names if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in files} == {"sentinel", "sentinel_hooks"}
    assert {"sentinel/py.typed", "sentinel_hooks/py.typed"} <= set(files)
    tracked = run("git", "ls-files", "sentinel", "hooks/sentinel_hooks", cwd=ROOT).split()
    missing = {n.removeprefix("hooks/") for n in tracked} - set(files)
    assert not missing, f"in the repository but not in the wheel: {sorted(missing)}"
    odd = [n for n in files if Path(n).suffix not in SHIPPED]
    assert not odd, f"not meant to be shipped: {odd}"


def test_the_wheel_carries_the_policies(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    policies = {f"sentinel/core/policies/{p}.toml" for p in ("default", "observe", "rl")}
    assert policies <= names


def test_the_wheel_carries_the_dashboards_that_are_pushed(wheel: Path) -> None:
    pushed = zipfile.ZipFile(wheel).read("sentinel/dashboards/generated/run.json")
    assert pushed == (ROOT / "grafana/dashboards/run.json").read_bytes()


def test_check_wheel_contents_is_content(wheel: Path) -> None:
    tool = Path(sys.executable).with_name("check-wheel-contents")
    require(tool.is_file(), "check-wheel-contents (it comes with the dev dependencies)")
    run(tool, "--config", ROOT / "pyproject.toml", wheel)


class Env:
    """A virtual environment with nothing in it but what the test installs."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.folder = folder
        self.python = folder / "bin" / "python"

    def install(self, wheel: Path, extra: str = "") -> None:
        what = f"{wheel}[{extra}]" if extra else str(wheel)
        pip = (sys.executable, "-m", "pip", "--python", self.python, "--quiet")
        run(*pip, "install", "--disable-pip-version-check", "-c", PINS, what)

    def check(self, code: str) -> str:
        return run(self.python, "-I", "-c", code, cwd=self.folder)

    def lacks(self, *modules: str) -> None:
        found = self.check(
            f"from importlib.util import find_spec\nprint([m for m in {modules!r} if find_spec(m)])"
        )
        assert found.strip() == "[]", f"not wanted in this image: {found}"


WEB = ("fastapi", "starlette", "uvicorn", "prometheus_client", "apscheduler", "pydantic")


@pytest.mark.e2e
def test_the_base_install_imports_the_core_and_brings_neither_torch_nor_web(
    wheel: Path, tmp_path: Path
) -> None:
    env = Env(tmp_path / "env")
    env.install(wheel)
    env.check("import sentinel.core.types, sentinel.wire, sentinel.traces, sentinel.client")
    env.lacks("torch", *WEB, "grafana_api")
    refused = env.check(
        "import sentinel\n"
        "try:\n    sentinel.attach(object())\n"
        "except ImportError as error:\n    print(error)"
    )
    assert "pip install 'torch-sentinel[hooks]'" in refused


@pytest.mark.e2e
def test_the_sidecar_extra_serves_and_brings_no_torch(wheel: Path, tmp_path: Path) -> None:
    env = Env(tmp_path / "env")
    env.install(wheel, "sidecar")
    assert "--port" in run(env.folder / "bin" / "sentinel", "serve", "--help")
    env.check("import sentinel.sidecar.app")
    env.lacks("torch", "grafana_api")


@pytest.mark.e2e
def test_the_grafana_extra_brings_its_client_only(wheel: Path, tmp_path: Path) -> None:
    env = Env(tmp_path / "env")
    env.install(wheel, "grafana")
    env.check("import grafana_api, sentinel.dashboards.push as p; assert p.dashboards()")
    env.lacks("torch", *WEB)


@pytest.mark.e2e
@pytest.mark.timeout(900)  # torch is large, and on some machines a CUDA build
def test_the_hooks_extra_attaches_and_brings_no_web_stack_and_then_all_fits_beside_it(
    wheel: Path, tmp_path: Path
) -> None:
    env = Env(tmp_path / "env")
    env.install(wheel, "hooks")
    env.check("import sentinel_hooks, sentinel; assert sentinel_hooks.attach")
    env.lacks(*WEB, "grafana_api")
    env.install(wheel, "all")  # in the same environment: a second torch would prove no more
    env.check("import sentinel_hooks, sentinel.sidecar.app, sentinel.dashboards, grafana_api")
    assert "torch-sentinel" in run(sys.executable, "-m", "pip", "--python", env.python, "list")
