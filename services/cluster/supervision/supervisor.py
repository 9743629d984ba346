"""The supervisor's loop: poll every worker, decide by `plan`, act. Independent of Ray.

    supervision = Supervision(config, processes)
    task = asyncio.create_task(supervision.run())
    supervision.status()
    await supervision.stop(within_s)

It keeps no state that it cannot learn from the workers' reports, so that a restarted supervisor adopts
running workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton.base.errors import ErrorKind
from services.cluster.supervision.reconcile import (
    MAX_STARTS,
    Action,
    Kill,
    Observed,
    Remove,
    Start,
    plan,
    refused_until,
)
from services.cluster.supervision.report import ClusterStatus, Failure, Phase, Report
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log

POLL_S = 0.25
# While a worker starts. A call of an actor takes milliseconds of processor time at both ends.
STARTING_POLL_S = 0.1
# The most that the time between two iterations counts as a worker's silence: an iteration waits two seconds
# for answers, and a supervisor that did not run itself has asked no worker.
_LONGEST_TURN_S = 3.0

_log = get_log("supervisor")


class UnresponsiveError(Exception):
    """A worker's actor, or Ray, did not answer in time; it may still be alive."""


class NoRoomError(Exception):
    """No host has room for a worker now; it is tried again."""


class HostLostError(Exception):
    """The host on which a worker was to start has ended or does not answer; it is tried again, on another
    one where there is room."""


class WorkerProcesses(Protocol):
    """Starts and ends workers' processes, by worker name. Every call has a deadline of its own."""

    async def report(self, name: str) -> Report | None:
        """The worker's state; None where it has no process host. Raises UnresponsiveError."""

    async def start(self, config: WorkerConfig, number: int) -> None:
        """Starts a process, the `number`-th of this worker. Raises UnresponsiveError, NoRoomError,
        HostLostError."""

    async def kill(self, name: str, *, actor: bool) -> None:
        """Kills the process; with `actor`, the actor that runs it too."""

    async def stop(self, name: str, within_s: float) -> None:
        """Drains the process and removes what runs it."""


class Supervision:
    """Reconciles the wanted workers with those that live."""

    def __init__(
        self, config: ClusterConfig, processes: WorkerProcesses, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._processes = processes
        self._clock = clock
        self._wanted = {worker.name: worker for worker in config.workers}
        # The last report of each worker, and the seconds since its last answer.
        self._reports: dict[str, Report] = {}
        self._silent_s: dict[str, float] = {}
        self._turned_at = clock()
        self._starts: dict[str, deque[float]] = {}
        # Per worker: consecutive refused starts, and the time of the last one.
        self._refusals: dict[str, tuple[int, float]] = {}
        # Those that hang, until they have ended: a kill is repeated, its log line is not.
        self._hung: set[str] = set()
        # Those that no host has room for.
        self._waiting: set[str] = set()
        # Those whose last action was not answered, until one is or they answer themselves.
        self._unanswered: set[str] = set()
        # The running action of each worker: at most one at a time.
        self._acting: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Supervises, one iteration after the other, until cancelled."""
        while True:
            await self.turn()
            starting = any(report.phase is Phase.STARTING for report in self._reports.values())
            await asyncio.sleep(STARTING_POLL_S if starting else POLL_S)

    async def turn(self) -> None:
        """Polls all workers once and begins the actions that are due, without waiting for them."""
        now = self._clock()
        since, self._turned_at = min(now - self._turned_at, _LONGEST_TURN_S), now
        names = [name for name in {*self._wanted, *self._reports} if name not in self._acting]
        await asyncio.gather(*(self._poll(name, since) for name in names))
        observed = {name: self._observed(name) for name in {*self._wanted, *self._reports}}
        actions = plan(self._wanted, observed, self._clock(), self._config.hang_timeout_s)
        self._hung &= {action.name for action in actions if isinstance(action, Kill)}
        for action in actions:
            if action.name not in self._acting:
                self._begin(action)

    def status(self) -> ClusterStatus:
        """All wanted workers as last reported."""
        return ClusterStatus(
            complete=all(name in self._reports for name in self._wanted),
            reports={name: self._reports.get(name, Report(phase=Phase.MISSING)) for name in self._wanted},
        )

    async def stop(self, within_s: float) -> None:
        """Drains all workers at the same time; `run` must have been cancelled. Raises UnresponsiveError where
        one of them did not answer, once the others have ended."""
        await asyncio.gather(*self._acting.values(), return_exceptions=True)
        stops = (self._processes.stop(name, within_s) for name in self._reports)
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if error is not None:
                raise error

    async def _poll(self, name: str, since: float) -> None:
        """Asks for a worker's report. `since`: seconds since the last iteration."""
        known = self._reports.get(name)
        self._silent_s[name] = self._silent_s.get(name, 0.0) + since
        try:
            report = await self._processes.report(name)
        except UnresponsiveError:
            if known is not None:
                self._update(name, phase=Phase.UNKNOWN, silent_s=self._silent_s[name])
            return
        self._silent_s[name] = 0.0
        self._unanswered.discard(name)
        if report is None:
            report = Report(phase=Phase.MISSING)
        # A lost actor has lost its count of starts too.
        report = report.model_copy(update={"starts": max(report.starts, known.starts if known else 0)})
        if known is not None and _stopped_serving(known, report, any_start=self._config.restart_always):
            reason = report.failure.message if report.failure else "its actor was lost"
            _log.warning("worker_exited", worker=name, starts=report.starts, reason=reason)
        if known is None and report.phase is Phase.SERVING:
            _log.info("worker_adopted", worker=name, address=report.address)
        self._count_refusals(name, known, report)
        self._reports[name] = report

    def _count_refusals(self, name: str, known: Report | None, report: Report) -> None:
        """Counts a start that has just been refused; one that serves, or fails otherwise, ends the series."""
        failure = report.failure
        if report.phase is Phase.SERVING or (failure is not None and not self._waits_longer(failure)):
            self._refusals.pop(name, None)
        elif failure is not None and (known is None or known.failure != failure):
            self._refused_again(name, report.starts, failure.message)

    def _refused_again(self, name: str, starts: int, reason: str) -> None:
        now = self._clock()
        count = self._refusals.get(name, (0, 0.0))[0] + 1
        self._refusals[name] = count, now
        wait_s = refused_until(count, now) - now
        if starts > 1 or self._config.restart_always:  # else `baton up` reports a first start's refusal
            _log.error("worker_start_failed", worker=name, starts=starts, reason=reason, retry_in_s=wait_s)

    def _waits_longer(self, failure: Failure) -> bool:
        """True if the next start comes after the longer pauses: an immediate one would fail again, or take
        the name back from a newer start."""
        return failure.refused or (failure.replaced and self._config.restart_always)

    def _update(self, name: str, **fields: object) -> None:
        self._reports[name] = self._reports[name].model_copy(update=fields)

    def _observed(self, name: str) -> Observed:
        report = self._reports.get(name)
        if report is None:
            # No report yet, but it may be running: give it time to answer.
            return Observed(Phase.UNKNOWN, self._silent_s.get(name, 0.0))
        gives_way = not self._config.restart_always
        replaced = gives_way and report.failure is not None and report.failure.replaced
        starts = tuple(self._starts.get(name, ()))
        refusals, refused_at = self._refusals.get(name, (0, 0.0))
        return Observed(report.phase, report.silent_s, report.ran_s, replaced, refusals, refused_at, starts)

    def _begin(self, action: Action) -> None:
        task = asyncio.create_task(self._act(action))
        self._acting[action.name] = task
        task.add_done_callback(lambda _: self._acting.pop(action.name))

    async def _act(self, action: Action) -> None:
        try:
            match action:
                case Start(name):
                    await self._start(self._wanted[name])
                case Kill(name, actor, reason):
                    if name not in self._hung:
                        self._hung.add(name)
                        _log.error("worker_hung", worker=name, reason=reason)
                    await self._processes.kill(name, actor=actor)
                case Remove(name):
                    await self._processes.stop(name, self._config.drain_s)
                    del self._reports[name]
                    self._refusals.pop(name, None)
        except UnresponsiveError as error:
            if action.name not in self._unanswered:
                self._unanswered.add(action.name)
                _log.warning(
                    "action_unanswered", worker=action.name, action=type(action).__name__, reason=str(error)
                )
        except Exception as error:
            _log.exception("action_failed", worker=action.name, action=type(action).__name__)
            message = f"{action.name}: {type(error).__name__}: {error}"
            self._update(action.name, failure=Failure(kind=ErrorKind.INTERNAL.name, message=message))

    async def _start(self, config: WorkerConfig) -> None:
        report = self._reports[config.name]
        starts = self._starts.setdefault(config.name, deque(maxlen=MAX_STARTS))
        starts.append(self._clock())
        number = report.starts + 1
        self._reports[config.name] = Report(phase=Phase.STARTING, starts=number)
        if number > 1 and config.name not in self._waiting:
            _log.warning("worker_restarted", worker=config.name, start=number)
        try:
            await self._processes.start(config, number)
        except HostLostError as error:
            starts.pop()
            self._reports[config.name] = report
            _log.warning("worker_host_lost", worker=config.name, reason=str(error))
        except NoRoomError as error:
            starts.pop()
            self._reports[config.name] = report
            if config.name not in self._waiting:
                self._waiting.add(config.name)
                _log.warning("worker_waits_for_room", worker=config.name, reason=str(error))
        else:
            self._waiting.discard(config.name)


def _stopped_serving(before: Report, after: Report, *, any_start: bool) -> bool:
    """True if a worker that was running has ended. Unless `any_start`, a first start that fails does not
    count: it is reported by `baton up` instead."""
    ran = before.phase in (Phase.SERVING, Phase.UNKNOWN) or (
        before.phase is Phase.STARTING and (any_start or before.starts > 1)
    )
    return ran and after.phase in (Phase.ENDED, Phase.MISSING)
