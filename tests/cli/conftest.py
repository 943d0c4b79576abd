"""The terminal of the command line's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever set COLUMNS (a library may, in the middle of a run): lines are not wrapped here."""
    monkeypatch.delenv("COLUMNS", raising=False)
