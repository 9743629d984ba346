"""One process of the generator: `python -m loadgen.generator.worker`, started by `RunProcesses`.

It reads one line with its assignment from stdin and answers in lines of JSON on stdout:

    → {"settings": …, "process": 0, "of": 2, "records": "FILE"}
    ← {"ready": true}                   connected, prompts made
    → {"start": 1234.5}                 a time of the machine's monotonic clock
    ← {"sent": …, "ended": …, …}        four times a second
    → {"stop": true}                    or the end of stdin: ends what runs
    ← {"done": {…}}                     all records are in the file

A mistake ends it with {"error": "…"} instead.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import gc
import io
import json
import os
import sys
import time
from collections.abc import Coroutine
from typing import Any, BinaryIO

import numpy as np

from baton.base.parent_death import die_with_parent
from loadgen.analysis.slo import Judge
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Record
from loadgen.common.settings import Settings, Strict
from loadgen.generator.driver import Driver
from loadgen.generator.own_lag import CpuLimit, CpuWait, LoopLag
from loadgen.generator.plan import Share, numbers_of, open_times
from loadgen.load.sources import recorded_times, workload_of
from loadgen.targets.open_target import open_target
from loadgen.targets.target import RunClock

PROGRESS_S = 0.25
# Conversations of a closed loop of unknown length that are generated before it starts.
_AHEAD = 1000
_BUFFER = 4 * 1024 * 1024


class Assignment(Strict):
    """The assignment of one process."""

    settings: Settings
    process: int
    of: int
    records: str


class Worker:
    """Runs one assignment of requests."""

    def __init__(self, assignment: Assignment, commands: asyncio.StreamReader, records: BinaryIO) -> None:
        self._settings = assignment.settings
        self._share = Share(assignment.process, assignment.of)
        self._commands = commands
        self._records = records
        self._clock = RunClock()
        self._judge = Judge.of(self._settings)
        self._good = 0
        self._times: list[float] = []
        self._lag = LoopLag(self._clock)
        self._wait = CpuWait(self._clock)
        self._limit = CpuLimit(self._clock)

    async def run(self) -> None:
        """Connects, sends the load, and writes all records."""
        target = open_target(self._settings.target, self._clock)
        workload = workload_of(self._settings)
        driver = Driver(
            target, workload, self._settings, self._clock, self._keep, process=self._share.process
        )
        try:
            await target.connect()
            work = self._work(driver)
            gc.collect()
            gc.freeze()
            _report({"ready": True})
            self._clock.start = await self._start_time()
            await self._follow(driver, asyncio.ensure_future(work))
        finally:
            await target.close()

    def _work(self, driver: Driver) -> Coroutine[Any, Any, None]:
        """The whole run, with prompts generated ahead as far as memory allows."""
        load, share = self._settings.load, self._share
        if load.concurrency is not None:
            users = share.concurrency(load.concurrency)
            prepared = driver.prepare(numbers_of(load, share), max(_AHEAD, 4 * users))
            return driver.closed_loop(prepared, users)
        recorded = recorded_times(self._settings)
        mine = [
            (number, time)
            for number, time in enumerate(open_times(load, recorded))
            if number % share.of == share.process
        ]
        self._times = [time for _, time in mine]
        prepared = driver.prepare(number for number, _ in mine)
        return driver.open_loop(prepared, iter(self._times))

    def _keep(self, record: Record) -> None:
        self._good += self._judge.good(record)
        self._records.write(record.to_line())

    async def _start_time(self) -> float:
        line = await self._commands.readline()
        if not line:
            raise LoadgenError("no start message was received")
        return float(json.loads(line)["start"])

    async def _follow(self, driver: Driver, work: asyncio.Future[Any]) -> None:
        """Sends progress reports until the run has ended or is cancelled by the parent."""
        cpu, began = time.process_time(), time.monotonic()
        times, seconds = self._limit.held_back()
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._commands.readline())
        watching = [asyncio.ensure_future(one.run()) for one in (self._lag, self._wait, self._limit)]
        try:
            while not work.done():
                await asyncio.wait((work, stop), timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                if stop.done():
                    work.cancel()
                    await driver.stop()
                    break
                self._records.flush()  # what ended stays, whatever becomes of this process
                _report(self._progress(driver))
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            for task in (stop, *watching):
                task.cancel()
        busy = (time.process_time() - cpu) / max(1e-9, time.monotonic() - began)
        self._records.flush()
        _report(self._progress(driver))
        times_now, seconds_now = self._limit.held_back()
        done = {
            "cpu_share": busy,
            "loop_lag_ms": _spread_ms(self._lag.samples),
            "cpu_wait_ms": _spread_ms(self._wait.samples),
            "throttled_ms": _spread_ms(self._limit.samples),
            "throttled": {"times": times_now - times, "seconds": seconds_now - seconds},
        }
        _report({"done": done})

    def _progress(self, driver: Driver) -> dict[str, Any]:
        counts = driver.counts
        lags, counts.lags = counts.lags, []
        return {
            "due": bisect.bisect_right(self._times, self._clock()),
            "sent": counts.sent,
            "ended": counts.ended,
            "failed": counts.failed,
            "good": self._good,
            "cancelled": counts.cancelled,
            "tokens": counts.tokens,
            "lag_ms": max(lags, default=0.0) * 1e3,
        }


def _spread_ms(samples: list[float]) -> dict[str, float]:
    values = np.asarray(samples or [0.0]) * 1e3
    return {
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def _report(message: dict[str, Any]) -> None:
    # One write that fits into a pipe's buffer; the parent reads all the time.
    os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


async def _main() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    line = await commands.readline()
    if not line:
        return
    assignment = Assignment.model_validate_json(line)
    pin_to_cpu(assignment)
    with io.BufferedWriter(io.FileIO(assignment.records, "wb"), _BUFFER) as records:
        await Worker(assignment, commands, records).run()


def pin_to_cpu(assignment: Assignment) -> None:
    """Pins this process, and threads that start later, to its processor, if one is set. Raises LoadgenError
    where that fails.
    """
    if not (cpus := assignment.settings.generator.cpus):
        return
    cpu = cpus[assignment.process]
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, OverflowError, AttributeError):
        raise LoadgenError(f"--cpus: no process of ours may run on {cpu}") from None


def main() -> int:
    """Exit code: 0 on success, 2 after a reported error."""
    die_with_parent()
    try:
        asyncio.run(_main())
    except LoadgenError as error:
        _report({"error": str(error)})
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
