"""Which tests run in one process, where several share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

E2E = Path(__file__).parent / "e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of e2e, so that no two clusters meet on the cores; elsewhere those of a file."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("e2e" if E2E in item.path.parents else str(item.path)))
