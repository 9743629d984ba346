from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.turned import Turned


@pytest.fixture
def turned(tmp_path: Path) -> Iterator[Turned]:
    made = Turned(tmp_path)
    yield made
    made.close()
