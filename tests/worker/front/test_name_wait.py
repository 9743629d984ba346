"""A worker whose name another one keeps waits, with pauses that double, and says who has it and where."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from structlog.testing import capture_logs

from baton.base.errors import NameTakenError
from services.common.processes.child_protocol import RestartNeededError, StopSignal
from services.worker.front.name_wait import wait_for_name
from services.worker.front.registration import Registration
from tests.loadgen.virtual_time import run_virtual

TAKEN = NameTakenError("d2", "host-b", "10.0.0.2:50060", kept=True)


class Registry:
    """The name is free from the `free_at`-th look on."""

    def __init__(self, free_at: int | None = None) -> None:
        self.looked: list[float] = []
        self.closed = False
        self._free_at = free_at

    async def may_have_name(self) -> bool:
        self.looked.append(asyncio.get_running_loop().time())
        return len(self.looked) == self._free_at

    async def close(self) -> None:
        self.closed = True


async def wait(registry: Registry, stop: StopSignal, timeout_s: float = 1000.0) -> float:
    """The time at which the wait was over without an error."""
    await wait_for_name(cast(Registration, registry), TAKEN, stop, timeout_s)
    return asyncio.get_running_loop().time()


def test_pauses_double_up_to_30_s_and_each_says_who_has_the_name() -> None:
    registry = Registry(free_at=7)
    with capture_logs() as logged, pytest.raises(RestartNeededError, match="d2 is free again"):
        run_virtual(wait(registry, StopSignal()))
    assert registry.looked == [2, 6, 14, 30, 60, 90, 120]
    assert [line["retry_in_s"] for line in logged] == [2, 4, 8, 16, 30, 30, 30]
    assert {(line["event"], line["member"], line["host"], line["address"]) for line in logged} == {
        ("name_taken", "d2", "host-b", "10.0.0.2:50060")
    }
    assert registry.closed


def test_the_wait_ends_at_its_deadline_with_who_has_the_name() -> None:
    registry = Registry()
    with pytest.raises(NameTakenError, match=r"d2 is taken: it is on host-b at 10\.0\.0\.2:50060"):
        run_virtual(wait(registry, StopSignal(), timeout_s=20.0))
    assert registry.looked == [2, 6, 14, 20]
    assert registry.closed


def test_a_stop_ends_the_wait_at_once() -> None:
    registry = Registry()

    async def stopped() -> float:
        stop = StopSignal()
        asyncio.get_running_loop().call_later(9.0, stop.request)
        return await wait(registry, stop)

    assert run_virtual(stopped()) == 9.0
    assert registry.closed
