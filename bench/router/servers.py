"""The processes of a measurement: the router under test, its fake workers and its clients."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.base.python_module import python_module
from bench.processes import JsonLinesProcess, put_on
from services.common.config.router import ConnectionLimits, RouterConfig
from services.common.processes.process_tree import descendants

_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Router:
    """A running router. `pids`: its processes; `cores`: what they run on."""

    pids: tuple[int, ...]
    cores: Sequence[int]
    addresses: dict[str, str]


@dataclass(frozen=True, slots=True)
class Workers:
    """Both fake workers. `addresses`: prefill, decode."""

    pid: int
    addresses: tuple[str, str]


@contextlib.contextmanager
def fake_workers(folder: Path, step_ms: float, slots: int, cores: Sequence[int]) -> Iterator[Workers]:
    """Runs a prefill and a decode worker."""
    process = JsonLinesProcess("bench.router.fake_workers", str(folder), str(step_ms), str(slots))
    try:
        put_on(cores, process.process.pid)
        yield Workers(process.process.pid, (process.ready_line["prefill"], process.ready_line["decode"]))
    finally:
        process.end()


@contextlib.contextmanager
def router(
    folder: Path, workers: Workers, processes: int, streams: int, cores: Sequence[int]
) -> Iterator[Router]:
    """Runs a router of `processes` processes on `cores`, with room for `streams` connections and
    requests."""
    config = RouterConfig(
        model=str(folder),
        served_model_name="fake",
        workers=workers.addresses,
        grpc_port=0,
        http_port=0,
        max_waiting=max(1024, streams),
        processes=processes,
        tokenizer_threads=1,
        connections=ConnectionLimits(max_connections=streams + 64, max_connections_per_address=streams + 64),
        log_level="error",
    )
    process = subprocess.Popen(
        python_module("services.router"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        ready = json.loads(process.stdout.readline() or b"{}")
        if "ready" not in ready:
            raise RuntimeError(f"the router did not start: {ready}")
        pids = (process.pid, *descendants(process.pid))
        for pid in pids:
            put_on(cores, pid)
        yield Router(pids, cores, ready["ready"])
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Clients:
    """Processes of clients that share the streams."""

    def __init__(self, count: int, cores: Sequence[int]) -> None:
        self._processes = [JsonLinesProcess("bench.router.clients") for _ in range(count)]
        for index, one in enumerate(self._processes):
            put_on([cores[index % len(cores)]], one.process.pid)

    @property
    def pids(self) -> list[int]:
        return [one.process.pid for one in self._processes]

    def start(self, streams: int, connections: int, **asked: Any) -> None:
        """Opens the streams of all clients."""
        count = len(self._processes)
        for index, one in enumerate(self._processes):
            share = streams // count + (index < streams % count)
            one.call({"start": {**asked, "streams": share, "connections": max(1, connections // count)}})

    def reset(self) -> None:
        """Sets all counts to zero."""
        for one in self._processes:
            one.call({"reset": True})

    def read(self) -> dict[str, Any]:
        """The sum of all counts."""
        counts = [one.call({"read": True}) for one in self._processes]
        return {name: sum((one[name] for one in counts), start=type(counts[0][name])()) for name in counts[0]}

    def end(self) -> None:
        """Ends the processes, and with them the streams."""
        for one in self._processes:
            one.end()


def resident_mb(pids: Sequence[int]) -> float:
    """Memory of processes, what they share counted once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def yardstick_us(core: int) -> float:
    """Processor time of a loop in Python on this core, in µs: the best of many."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (core,))
    try:
        return min(timeit.repeat(_loop, timer=time.thread_time, number=20, repeat=50)) / 20 * 1e6
    finally:
        os.sched_setaffinity(0, cores)


def _loop() -> int:
    return sum(range(1000))


def split_cores(processes: int) -> tuple[list[int], list[int]]:
    """Cores of the router's processes, and those of everything else; the same ones if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    count = min(processes, max(1, len(cores) - 1))
    return cores[:count], cores[count:] or cores
