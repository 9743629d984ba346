"""Which tests run in one process, where several share the work (`pytest -n`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

E2E = "tests/e2e/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """All of e2e in one, so that no two clusters meet on the cores; elsewhere the tests of a file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return E2E if nodeid.startswith(E2E) else nodeid.partition("::")[0]

    return ByFile(config, log)
