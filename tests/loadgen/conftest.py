"""A fake server in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loadgen.processes import Serve, served


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Runs a server while its context lasts."""
    return lambda behaviour: served(behaviour, tmp_path)
