"""Faults of workers that no supervisor watches: `Strikes` injects one, proves that it took effect, and starts
again what it killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from baton.v1.admin_pb2 import WorkerState
from tests.e2e.support.cluster import AGAIN_S
from tests.e2e.support.workers import Loose, Worker

# How long a fault lasts that the router must notice: longer than the 3 s within which it has to.
_LONG_S = (4.5, 6.0)
# And one that it must ride out.
_SHORT_S = (0.2, 0.9)


class Fault(Enum):
    """A fault that happens to one worker."""

    KILL_FRONT = "SIGKILL front"
    KILL_ENGINE = "SIGKILL engine"
    FREEZE_FRONT = "SIGSTOP front"
    FREEZE_ENGINE = "SIGSTOP engine"
    HALF_OPEN_BOTH = "half-open, both ways"
    HALF_OPEN_ANSWERS = "half-open, answers lost"
    STALL_FRONT = "front stalls < 1 s"
    STALL_ENGINE = "engine stalls < 1 s"


_KILLS = (Fault.KILL_FRONT, Fault.KILL_ENGINE)
_HALF_OPEN = (Fault.HALF_OPEN_BOTH, Fault.HALF_OPEN_ANSWERS)
_OF_FRONT = (Fault.KILL_FRONT, Fault.FREEZE_FRONT, Fault.STALL_FRONT)
SHORT = (Fault.STALL_FRONT, Fault.STALL_ENGINE)


@dataclass
class Strikes:
    """Injects faults into `loose`, whose workers are proxied."""

    loose: Loose
    dice: random.Random
    struck: Counter[Fault] = field(default_factory=Counter)
    restarts: int = 0
    false_alarms: list[str] = field(default_factory=list)

    async def strike(self, fault: Fault, name: str) -> None:
        """Injects it, waits until it is over, and returns when all workers are ready again."""
        worker = self.loose.workers[name]
        report = await worker.report()
        pid = report.front_pid if fault in _OF_FRONT else report.engine_pid
        lost_before = self._lost(name)
        lasts_s = self.dice.uniform(*(_SHORT_S if fault in SHORT else _LONG_S))
        if fault in _KILLS:
            os.kill(pid, signal.SIGKILL)
        elif fault in _HALF_OPEN:
            await self._swallow(worker, lasts_s, requests=fault is Fault.HALF_OPEN_BOTH)
        else:
            await self._stop(pid, lasts_s)
        await self._all_ready(fault)
        self.struck[fault] += 1
        if fault in SHORT and self._lost(name) > lost_before:
            self.false_alarms.append(f"{name}: {fault.value}, {lasts_s:.2f} s")

    async def _swallow(self, worker: Worker, lasts_s: float, *, requests: bool) -> None:
        assert worker.proxy is not None
        before = worker.proxy.swallowed
        worker.proxy.swallow(requests=requests, answers=True)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            worker.proxy.swallow(requests=False, answers=False)
        assert worker.proxy.swallowed > before, "no byte was lost"

    async def _stop(self, pid: int, lasts_s: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _all_ready(self, fault: Fault) -> None:
        """Starts again what ended, and waits until the router takes all workers for ready."""
        deadline = time.monotonic() + AGAIN_S
        await asyncio.sleep(1.0)  # a killed process ends, and what is dead is known to be
        while True:
            for name, worker in self.loose.workers.items():
                if worker.front.poll() is not None:
                    await self.loose.restart(name)
                    self.restarts += 1
            status = await self.loose.cluster.status()
            states = {one.worker.identity.name: one.state for one in status.workers}
            ready = [name for name, state in states.items() if state == WorkerState.WORKER_STATE_READY]
            if set(ready) == set(self.loose.workers) and not any(one.worker.error for one in status.workers):
                return
            assert time.monotonic() < deadline, f"{fault.value}: only {ready} are ready after {AGAIN_S} s"
            await asyncio.sleep(0.05)

    def _lost(self, name: str) -> int:
        """The number of times that the router has given this worker up."""
        lines = self.loose.cluster.log.read_text().splitlines()
        return sum("worker_lost" in line and name in line for line in lines)
