"""A fake server in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.loadgen.processes import Serve, served

# Nothing here asserts on speed.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Runs a server while its context lasts."""
    return lambda behaviour: served(behaviour, tmp_path)
