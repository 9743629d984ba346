"""Event loops of tests that are marked `virtual_time`, whose windows do not depend on the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.loadgen.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    virtual = item.get_closest_marker("virtual_time") is not None
    return {"virtual": VirtualLoop} if virtual else {"real": asyncio.new_event_loop}
