"""One front for the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .served import Served, serve


@pytest.fixture(scope="module")
def front() -> Iterator[Served]:
    with serve() as served:
        yield served
