"""The network, and the release that a module runs."""

from __future__ import annotations

import pytest

from tests.manifests import network


@pytest.fixture(scope="session", autouse=True)
def bridge() -> None:
    network.make_bridge()
