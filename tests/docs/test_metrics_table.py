"""The table of metrics in docs/operating.md is the catalogue; `--update-golden` writes it."""

from __future__ import annotations

import pytest

from sentinel.core.catalog import CATALOG
from tests.support import ROOT

PAGE = ROOT / "docs" / "operating.md"
HEAD = "| metric | type | labels | meaning |\n|---|---|---|---|\n"


def table() -> str:
    rows = [
        f"| `{m.full_name}` | {m.kind} | {', '.join(m.labels)} | {m.help} |"
        for m in CATALOG
        if not m.reserved
    ]
    names = ", ".join(f"`{m.full_name}`" for m in CATALOG if m.reserved)
    return HEAD + "\n".join(rows) + f"\n\nReserved, fed by nothing yet: {names}.\n"


def test_the_metrics_table_is_the_catalogue(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, head, _ = text.partition(HEAD)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before.replace("METRICS_TABLE\n", "") + table(), encoding="utf-8")
        return
    assert head, "docs/operating.md has no table of metrics"
    assert text == before + table(), "write it anew with: pytest --update-golden tests/docs"
