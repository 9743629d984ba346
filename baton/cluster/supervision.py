"""The supervisor's loop: hear every home, decide by `plan`, act. Without Ray, and the same within its actor.

    supervision = Supervision(config, homes)
    task = asyncio.create_task(supervision.run())
    supervision.status()
    await supervision.stop(within_s)

All it knows beyond its configuration it learns from the homes, so that another one in its place takes over
what runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton.cluster.reconcile import MAX_STARTS, Action, Kill, Remove, Seen, Start, plan, refused_until
from baton.cluster.report import ClusterStatus, Failure, Phase, Report, WorkerStatus
from baton.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log

POLL_S = 0.25
# While a worker starts, which its clients wait for.
STARTING_POLL_S = 0.05

_log = get_log("supervisor")


class HomeSilentError(Exception):
    """A home did not answer in time; it may be there all the same."""


class Homes(Protocol):
    """The homes of workers, by name. Every call ends within a deadline of its own."""

    async def report(self, name: str) -> Report | None:
        """What the home says; None where there is none. Raises HomeSilentError."""

    async def start(self, config: WorkerConfig, number: int) -> None:
        """Starts a process there, and makes the home first if need be. Raises HomeSilentError."""

    async def kill(self, name: str, *, home: bool) -> None:
        """Kills the process, and with `home` its home."""

    async def stop(self, name: str, within_s: float) -> None:
        """Lets the process drain and removes the home."""


class Supervision:
    """Reconciles the wanted workers with those that live."""

    def __init__(
        self, config: ClusterConfig, homes: Homes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._homes = homes
        self._clock = clock
        self._wanted = {worker.name: worker for worker in config.workers}
        # The last report of each worker that was heard of, and when that was.
        self._reports: dict[str, Report] = {}
        self._heard: dict[str, float] = {}
        self._starts: dict[str, deque[float]] = {}
        # Of each worker: consecutive starts that were refused, and when the last of them was.
        self._refusals: dict[str, tuple[int, float]] = {}
        # What is being done to a worker: at most one thing at a time.
        self._acting: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Turns until cancelled."""
        while True:
            await self.turn()
            starting = any(report.phase is Phase.STARTING for report in self._reports.values())
            await asyncio.sleep(STARTING_POLL_S if starting else POLL_S)

    async def turn(self) -> None:
        """Hears all homes once and begins what is due. Starts take seconds, so nothing waits for them."""
        names = [name for name in {*self._wanted, *self._reports} if name not in self._acting]
        await asyncio.gather(*(self._hear(name) for name in names))
        seen = {name: self._seen(name) for name in {*self._wanted, *self._reports}}
        for action in plan(self._wanted, seen, self._clock(), self._config.hang_timeout_s):
            if action.name not in self._acting:
                self._begin(action)

    def status(self) -> ClusterStatus:
        """All wanted workers as last heard of."""
        return ClusterStatus(
            settled=all(name in self._reports for name in self._wanted),
            workers=tuple(
                WorkerStatus(
                    name=name,
                    role=config.role,
                    report=self._reports.get(name, Report(phase=Phase.MISSING)),
                )
                for name, config in self._wanted.items()
            ),
        )

    async def stop(self, within_s: float) -> None:
        """Has all workers drain at once; `run` must have been cancelled."""
        await asyncio.gather(*self._acting.values(), return_exceptions=True)
        await asyncio.gather(*(self._homes.stop(name, within_s) for name in self._reports))

    async def _hear(self, name: str) -> None:
        known = self._reports.get(name)
        self._heard.setdefault(name, self._clock())
        try:
            report = await self._homes.report(name)
        except HomeSilentError:
            if known is not None:
                self._learn(name, phase=Phase.UNKNOWN, silent_s=self._clock() - self._heard[name])
            return
        self._heard[name] = self._clock()
        if report is None:
            report = Report(phase=Phase.MISSING)
        # A home that was lost has taken its count along.
        report = report.model_copy(update={"starts": max(report.starts, known.starts if known else 0)})
        if known is not None and _fell(known, report):
            why = report.failure.message if report.failure else "its home was lost"
            _log.warning("worker_ended", worker=name, starts=report.starts, why=why)
        if known is None and report.phase is Phase.SERVING:
            _log.info("worker_adopted", worker=name, address=report.address)
        self._count_refusals(name, known, report)
        self._reports[name] = report

    def _count_refusals(self, name: str, known: Report | None, report: Report) -> None:
        """Counts a start that has just been refused; one that serves, or fails otherwise, ends the series."""
        failure = report.failure
        if report.phase is Phase.SERVING or (failure is not None and not failure.refused):
            self._refusals.pop(name, None)
        elif failure is not None and (known is None or known.failure != failure):
            self._refused_again(name, report.starts, failure.message)

    def _refused_again(self, name: str, starts: int, why: str) -> None:
        now = self._clock()
        count = self._refusals.get(name, (0, 0.0))[0] + 1
        self._refusals[name] = count, now
        wait_s = refused_until(count, now) - now
        if starts > 1:  # the first start's refusal is reported by the process that waits for it
            _log.error("worker_refused", worker=name, starts=starts, why=why, retry_in_s=wait_s)

    def _learn(self, name: str, **news: object) -> None:
        self._reports[name] = self._reports[name].model_copy(update=news)

    def _seen(self, name: str) -> Seen:
        report = self._reports.get(name)
        if report is None:
            # Its home was never heard, but it may run: give it time to speak.
            return Seen(Phase.UNKNOWN, self._clock() - self._heard[name])
        replaced = report.failure is not None and report.failure.replaced
        starts = tuple(self._starts.get(name, ()))
        return Seen(report.phase, report.silent_s, replaced, *self._refusals.get(name, (0, 0.0)), starts)

    def _begin(self, action: Action) -> None:
        task = asyncio.create_task(self._act(action))
        self._acting[action.name] = task
        task.add_done_callback(lambda _: self._acting.pop(action.name))

    async def _act(self, action: Action) -> None:
        try:
            match action:
                case Start(name):
                    await self._start(self._wanted[name])
                case Kill(name, home, reason):
                    _log.error("worker_hangs", worker=name, why=reason)
                    await self._homes.kill(name, home=home)
                case Remove(name):
                    await self._homes.stop(name, self._config.drain_s)
                    del self._reports[name]
                    self._refusals.pop(name, None)
        except HomeSilentError as error:
            _log.warning(
                "action_unanswered", worker=action.name, action=type(action).__name__, why=str(error)
            )
        except Exception as error:
            _log.exception("action_failed", worker=action.name, action=type(action).__name__)
            failure = BatonError(ErrorKind.INTERNAL, f"{action.name}: {type(error).__name__}: {error}")
            self._learn(action.name, failure=Failure(kind=failure.kind.name, message=failure.message))

    async def _start(self, config: WorkerConfig) -> None:
        report = self._reports[config.name]
        self._starts.setdefault(config.name, deque(maxlen=MAX_STARTS)).append(self._clock())
        number = report.starts + 1
        self._reports[config.name] = Report(phase=Phase.STARTING, starts=number)
        if number > 1:
            _log.warning("worker_started_again", worker=config.name, start=number)
        await self._homes.start(config, number)


def _fell(before: Report, after: Report) -> bool:
    """Whether a worker that ran does so no more. A first start that fails is told by whoever waits for it."""
    ran = before.phase in (Phase.SERVING, Phase.UNKNOWN) or (
        before.phase is Phase.STARTING and before.starts > 1
    )
    return ran and after.phase in (Phase.ENDED, Phase.MISSING)
