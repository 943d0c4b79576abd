"""Fixtures shared by all tests, and the rule that a skip may not hide a missing part.

With SENTINEL_REQUIRE_ALL=1 (CI sets it) every skip becomes a failure, except on tests marked
`gpu` and skips made by `tests.support.not_applicable`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

# Before torch is imported by anyone: one thread here and in every process a test starts.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# torch 2.13 keeps what it compiled on disk by a key that does not tell which SDPA kernel was asked
# for: a graph of the math path was answered with that of the fused one, with other last bits.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import pytest
from hypothesis import settings

from tests.support import NOT_APPLICABLE, FakeClock, require, shared_dir

# A shared machine is slow at odd moments; in CI hypothesis picks its own profile (derandomized).
if "CI" not in os.environ:
    settings.register_profile("shared", deadline=None)
    settings.load_profile("shared")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests for another environment or of many minutes run only where `-m` names them."""
    for mark in ("lower", "full"):
        if mark in config.option.markexpr:
            continue
        left_out = [item for item in items if item.get_closest_marker(mark)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]


def _require_all() -> bool:
    return os.environ.get("SENTINEL_REQUIRE_ALL", "") not in ("", "0")


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that hides a missing part into a failure."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if NOT_APPLICABLE in reason:
        return
    report.outcome = "failed"
    report.longrepr = f"SENTINEL_REQUIRE_ALL is set, so this skip is a failure: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _require_all() and item.get_closest_marker("gpu") is None:
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _require_all():
        _forbid_skip(report)
    return report


@pytest.fixture
def clock() -> FakeClock:
    """A clock that moves only when told to."""
    return FakeClock()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Bitwise comparisons need one thread; and the machine's cores are shared."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_session_outlives_its_test() -> Iterator[None]:
    """Hooks are process-wide: what one test leaves attached, the next one would find."""
    yield
    module = sys.modules.get("sentinel_hooks.session")
    for session in list(module.open_sessions()) if module is not None else ():
        session.detach()


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The folder of recorded real loss curves; it lies beside the checkout, not in it."""
    traces = shared_dir() / "traces"
    require(
        (traces / "labels.json").is_file(),
        f"recorded traces at {traces} (set SENTINEL_SHARED to the folder that holds traces/)",
    )
    return traces


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: compare with tests/golden/<name>, or write it (--update-golden)."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.is_file(), f"no golden file {path}; make it with: pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path.name} changed; if that is meant: pytest --update-golden, and show the diff"
        )

    return check
