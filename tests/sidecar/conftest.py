"""What several tests of the sidecar start from: an empty database, short segments, a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from sentinel.sidecar.settings import Settings
from sentinel.sidecar.store import record as records
from tests.support.listening import Served, Start
from tests.support.postgres import postgres


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'sentinel.db'}"
    server: str = request.getfixturevalue("server")
    engine = create_engine(server.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen steps a segment."""
    real = records.Record.__init__
    monkeypatch.setattr(
        records.Record,
        "__init__",
        lambda self, *a, **k: real(self, *a, **(k | {"segment_bytes": 5_000})),
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a sidecar on a port of its own; its settings may be given."""
    with ExitStack() as stack:

        def starting(**settings: object) -> Served:
            found = Served(Settings(**settings))  # type: ignore[arg-type]
            stack.callback(found.close)
            return found

        yield starting
