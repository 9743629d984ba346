from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.engine.stepped_engine import SteppedEngine


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[SteppedEngine]:
    made = SteppedEngine(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedEngine]:
    """The same model in one engine, without a cache."""
    made = SteppedEngine(tmp_path_factory.mktemp("truth"), prefix_cache=False)
    yield made
    made.close()


@pytest.fixture
def quantised(tmp_path: Path) -> Iterator[SteppedEngine]:
    """One engine with a cache in fp8; to be built before any fake devices are."""
    made = SteppedEngine(tmp_path, prefix_cache=False, kv_dtype="fp8")
    yield made
    made.close()
