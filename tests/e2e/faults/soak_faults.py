"""Faults of the soak's workers: SIGKILL of a front or an engine at intervals, and short stops in between.

A kill counts once both of the worker's processes are gone and another incarnation of it serves. A stop is
shorter than what the supervisor takes for a hang: it only stretches the stage that its worker is in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from baton.base.process_stat import is_running
from baton.v1.admin_pb2 import WorkerState, WorkerStatus
from tests.e2e.support.cluster import AGAIN_S, Cluster, eventually

_GONE_S = 10.0
_POLL_S = 0.05
_STOP_S = (0.1, 0.5)


@dataclass
class Faults:
    """A kill after every `every` requests that spares one worker of each role; in between, stops."""

    cluster: Cluster
    dice: random.Random
    every: int
    requests: int = 0
    # By role and process.
    kills: Counter[str] = field(default_factory=Counter)
    stops: int = 0
    # Monotonic seconds: from each kill until another incarnation served.
    away: list[tuple[float, float]] = field(default_factory=list)
    _over: bool = False

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Injects faults while the block runs. Afterwards all workers serve, and each kill is proven."""
        async with asyncio.TaskGroup() as striking:
            striking.create_task(self._kill_now_and_then(striking))
            striking.create_task(self._stop_again_and_again())
            yield
            self._over = True

    def request_ended(self, _: object) -> None:
        """Counts a request; to be called after each."""
        self.requests += 1

    def explains(self, began: float, ended: float) -> bool:
        """True if a worker was away at some time in this span."""
        return any(since <= ended and began <= until for since, until in self.away)

    async def _kill_now_and_then(self, striking: asyncio.TaskGroup) -> None:
        due = self.every
        while not self._over:
            await asyncio.sleep(_POLL_S)
            if self.requests >= due and (victims := _spare_one(await self._serving())):
                victim = self.dice.choice(victims)
                part = self.dice.choice(["front", "engine"])
                os.kill(_pids(victim)[part], signal.SIGKILL)
                self.kills[f"{_role(victim)} {part}"] += 1
                self.away.append((time.monotonic(), float("inf")))
                striking.create_task(self._replaced(victim, len(self.away) - 1))
                due += self.every

    async def _replaced(self, victim: WorkerStatus, number: int) -> None:
        """Waits until both processes are gone and another incarnation serves."""
        await eventually(lambda: not any(is_running(pid) for pid in _pids(victim).values()), _GONE_S)
        since, _ = self.away[number]
        old = victim.worker.identity
        while True:
            now = {one.worker.identity.name: one.worker.identity for one in await self._serving()}
            if old.name in now and now[old.name].incarnation != old.incarnation:
                break
            assert time.monotonic() < since + AGAIN_S, f"{old.name} was not started again in {AGAIN_S} s"
            await asyncio.sleep(_POLL_S)
        self.away[number] = (since, time.monotonic())

    async def _serving(self) -> list[WorkerStatus]:
        """The workers that are ready and answer."""
        status = await self.cluster.status()
        ready = WorkerState.WORKER_STATE_READY
        return [one for one in status.workers if one.state == ready and not one.worker.error]

    async def _stop_again_and_again(self) -> None:
        while not self._over:
            await asyncio.sleep(self.dice.uniform(*_STOP_S))
            if serving := await self._serving():
                await self._stop(self.dice.choice(list(_pids(self.dice.choice(serving)).values())))

    async def _stop(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.stops += 1
            try:
                await asyncio.sleep(self.dice.uniform(*_STOP_S))
            finally:
                os.kill(pid, signal.SIGCONT)


def _pids(status: WorkerStatus) -> dict[str, int]:
    return {"front": status.worker.report.front_pid, "engine": status.worker.report.engine_pid}


def _role(status: WorkerStatus) -> str:
    return status.worker.identity.name.rpartition("-")[0]


def _spare_one(serving: list[WorkerStatus]) -> list[WorkerStatus]:
    """The workers whose role has another one."""
    roles = Counter(map(_role, serving))
    return [one for one in serving if roles[_role(one)] > 1]
