from __future__ import annotations

from collections.abc import Iterator

import pytest

from pairs import Side, pair


@pytest.fixture
def connected() -> Iterator[tuple[Side, Side]]:
    source, destination = pair()
    yield source, destination
    source.engine.close()
    destination.engine.close()
