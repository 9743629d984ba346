"""Fixtures that several modules here compare with."""

from __future__ import annotations

import pytest

from tests.router.placement.modelled_cluster import keep_order_of_arrival


@pytest.fixture
def in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_order_of_arrival(monkeypatch)
