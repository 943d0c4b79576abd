"""One zygote for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks() as found:
        yield found
