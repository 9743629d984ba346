"""Messages of the parent are handled by a router process each by itself, whatever becomes of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from services.router import process
from services.router.app import Router


class Applied:
    """A router that notes what it is told; the admin ports can be opened the third time."""

    def __init__(self) -> None:
        self.workers: list[object] = []
        self.processes: list[tuple[str | None, str | None]] = []
        self.opened = 0
        self.discovery = SimpleNamespace(set_parent_workers=self._set_workers)
        self.updates = 0
        self.readiness = SimpleNamespace(
            set_processes=lambda *said: self.processes.append(said), update=self._update
        )
        self.operator_state = SimpleNamespace(receive=lambda message: None)
        self.store = SimpleNamespace(restarts=0)

    def _set_workers(self, workers: list[str]) -> None:
        if not workers:
            raise ValueError("no workers")
        self.workers.append(workers)

    def _update(self) -> None:
        self.updates += 1

    async def serve_admin(self) -> None:
        self.opened += 1
        if self.opened < 3:
            raise BatonError(ErrorKind.INVALID, "address already in use")


async def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = [
        {"workers": ["a:1"]},
        {"serve_admin": True},
        {"workers": []},
        {"silent_processes": [1], "failed_processes": []},
        {"silent_processes": [], "failed_processes": [], "store_restarts": 2},
        {"workers": ["b:1"]},
    ]

    async def messages() -> AsyncIterator[Mapping[str, Any]]:
        for one in sent:
            yield one
            await asyncio.sleep(0)

    monkeypatch.setattr(process, "messages_from_parent", messages)
    router = Applied()
    with capture_logs() as logs:
        await asyncio.wait_for(process.follow_parent(cast(Router, router), admin_pause_s=0.01), 5)
    assert router.workers == [["a:1"], ["b:1"]]
    assert router.processes == [("router process 1 does not answer", None), (None, None)]
    assert router.store.restarts == 2
    assert router.opened == 3
    events = sorted(log["event"] for log in logs)
    assert events == ["admin_ports_not_opened", "admin_ports_not_opened", "parent_updates_failed"]
