"""Streams through a cluster whose workers freeze or are cut off, and the faults that do it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton.v1.admin_pb2 import WorkerState
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.faults.test_stopped_front import is_stopped
from tests.e2e.support.cluster import MODEL, Cluster, eventually
from tests.e2e.support.workers import Loose, Worker
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

TOKENS = 1900


@dataclass
class Stream:
    """One request as its client sees it: tokens, and when each message came."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    attempts: int = 0
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        """Between two messages, or the last one and now."""
        ends = self.at if self.error or self.attempts else [*self.at, time.monotonic()]
        return max((after - before for before, after in pairwise(ends)), default=0.0)

    async def run(self, stub: RouterServiceAsyncStub, max_tokens: int = TOKENS, **fields: Any) -> None:
        """Reads until the end or an error, which it keeps. `fields`: the request's others."""
        request = GenerateRequest(
            model=MODEL,
            token_ids=TokenIds(ids=self.prompt),
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            **fields,
        )
        self.at.append(time.monotonic())
        try:
            async for message in stub.Generate(request, timeout=120):
                assert not message.token_ids or message.first_number == len(self.tokens), "a gap or a repeat"
                self.tokens += message.token_ids
                self.at.append(time.monotonic())
                if message.finish_reason:
                    self.attempts = message.trace.attempts
        except grpc.aio.AioRpcError as error:
            self.error = f"{error.code().name}: {error.details()}"


def asked(count: int, length: int = 40, *, seed: str) -> list[Stream]:
    """Streams, not begun yet, of `count` prompts that nothing has cached: another seed has other prompts."""
    draw = random.Random(seed)
    return [Stream(draw.choices(range(VOCAB_SIZE), k=length)) for _ in range(count)]


@contextlib.asynccontextmanager
async def streaming(
    stub: RouterServiceAsyncStub, count: int, tokens: int = 30, *, seed: str, **fields: Any
) -> AsyncIterator[list[Stream]]:
    """Yields `count` streams with `tokens` tokens each; those that still run at the end are cancelled."""
    streams = asked(count, seed=seed)
    runs = [asyncio.create_task(stream.run(stub, **fields)) for stream in streams]
    try:
        await eventually(lambda: all(len(stream.tokens) > tokens for stream in streams), 60)
        yield streams
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def all_go_on(streams: list[Stream], since: float, within_s: float = 20.0) -> None:
    """Waits until each stream has had twenty messages after `since`, or its end."""

    def goes_on(stream: Stream) -> bool:
        return bool(stream.error or stream.attempts) or sum(at > since for at in stream.at) > 20

    try:
        await eventually(lambda: all(goes_on(stream) for stream in streams), within_s)
    except AssertionError:
        gap = max(stream.longest_gap_s for stream in streams)
        raise AssertionError(f"a stream was silent for {gap:.1f} s") from None


def right(model: Path, streams: list[Stream], rounding: float = 0.0) -> None:
    """Checks every token against the reference, and that none of the streams failed. `rounding`: see
    `greedy_matches`."""
    reference = load_reference(model)
    assert [stream.error for stream in streams] == [""] * len(streams)
    for stream in streams:
        greedy_matches(reference, stream.prompt, stream.tokens, rounding)


@dataclass(frozen=True)
class Fault:
    """A fault done to a worker, and the way to undo it."""

    name: str
    begin: Callable[[Worker], None]
    end: Callable[[Worker], None]

    def __str__(self) -> str:
        return self.name


def freeze(pid: int) -> None:
    """Stops a process, and shows that it stands."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 1
    while not is_stopped(pid):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _swallow(*, requests: bool, answers: bool) -> Callable[[Worker], None]:
    def begin(worker: Worker) -> None:
        assert worker.proxy is not None
        worker.proxy.swallow(requests=requests, answers=answers)

    return begin


_PASS = _swallow(requests=False, answers=False)
FRONT_FROZEN = Fault(
    "front frozen",
    lambda worker: freeze(worker.front.pid),
    lambda worker: os.kill(worker.front.pid, signal.SIGCONT),
)
ANSWERS_SWALLOWED = Fault("answers swallowed", _swallow(requests=False, answers=True), _PASS)
REQUESTS_SWALLOWED = Fault("requests swallowed", _swallow(requests=True, answers=False), _PASS)
BOTH_SWALLOWED = Fault("both swallowed", _swallow(requests=True, answers=True), _PASS)


def losses(loose: Loose) -> list[str]:
    """Workers that the router has given up, by its log, in order."""
    found = re.findall(r"worker_lost.* worker='?([\w-]+)", loose.cluster.log.read_text())
    return [str(name) for name in found]


async def noticed_after_s(loose: Loose, victim: Worker, began: datetime, event: str = "worker_lost") -> float:
    """Waits until the router logs this event about the worker; how many seconds after the fault that was."""

    def since() -> list[float]:
        found = []
        for line in loose.cluster.log.read_text().splitlines():
            if event in line and victim.name in line:
                at = re.search(r"\d{4}-\d\d-\d\dT[\d:.]+", line)
                assert at is not None, line
                found.append((datetime.fromisoformat(at[0]).replace(tzinfo=UTC) - began).total_seconds())
        return [seconds for seconds in found if seconds > 0]

    await eventually(lambda: bool(since()), 20)
    return since()[0]


async def state_of(cluster: Cluster, worker: Worker) -> str:
    """The state of a worker as the router's status names it."""
    status = await cluster.status()
    (state,) = [one.state for one in status.workers if one.worker.identity.name == worker.name]
    return WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
