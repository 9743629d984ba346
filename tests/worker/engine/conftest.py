from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.engine.stepped_engine import Turned


@pytest.fixture
def turned(tmp_path: Path) -> Iterator[Turned]:
    made = Turned(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turned]:
    """The same model in one engine, without a cache."""
    made = Turned(tmp_path_factory.mktemp("truth"), prefix_cache=False)
    yield made
    made.close()
