"""Canary generations: when one runs, and what its outcome is for readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.engine_pb2 import EngineCommand, EngineEvent
from baton.v1.worker_pb2 import IntegrityReport
from services.common.config.types import Role
from services.worker.front.canary import Canary
from tests.e2e.support.cluster import eventually


class Engine:
    """Answers canaries with `outcome`: nothing, an error, or never."""

    def __init__(self) -> None:
        self.prefills_finished = 0
        self.ran = 0
        self.cancelled = 0
        self.outcome: BatonError | None = None
        self.stuck = False
        self.tokens = 0
        # Tokens of requests that are computed while a canary waits.
        self.busy = False

    async def call(self, command: EngineCommand, timeout_s: float = 10.0) -> EngineEvent:
        if command.WhichOneof("command") == "report":
            self.tokens += self.busy
            return EngineEvent(report=IntegrityReport(prompt_tokens_run=self.tokens))
        if command.canary.cancel:
            self.cancelled += 1
            return EngineEvent()
        self.ran += 1
        if self.stuck:
            await asyncio.Event().wait()
        if self.outcome is not None:
            raise self.outcome
        return EngineEvent()


class Decode:
    """A decode engine's sequences; canaries of both roles end in the same `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self.sequences_finished = 0
        self.ran = 0
        self._engine = engine

    async def run_canary(self) -> None:
        self.ran += 1
        command = EngineCommand()
        command.canary.SetInParent()
        await self._engine.call(command)


class Run:
    def __init__(self, role: Role, limits: dict[str, float]) -> None:
        self.engine = Engine()
        self.decode = Decode(self.engine)
        self.canary = Canary(role, self.engine, self.decode, 0.02, **limits)  # type: ignore[arg-type]

    async def generations(self, count: int) -> None:
        await eventually(lambda: self.engine.ran >= count, 5)

    async def passes(self) -> None:
        """Long enough for several generations."""
        await asyncio.sleep(0.1)


@asynccontextmanager
async def running(
    role: Role = "prefill", limits: dict[str, float] | None = None, **state: object
) -> AsyncIterator[Run]:
    run = Run(role, limits or {})
    vars(run.engine).update(state)
    task = asyncio.create_task(run.canary.run())
    try:
        yield run
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_not_ready_before_the_first_one() -> None:
    async with running(stuck=True) as run:
        await run.generations(1)
        assert run.canary.failure == "no canary generation has succeeded yet"


@pytest.mark.parametrize(("role", "decoded"), [("prefill", 0), ("decode", 1), ("both", 1)])
async def test_each_role_runs_its_own_sides(role: Role, decoded: int) -> None:
    async with running(role) as run:
        await eventually(lambda: run.canary.failure is None, 5)
        assert run.engine.ran >= (2 if role == "both" else 1)
        assert bool(run.decode.ran) == bool(decoded)


async def test_none_runs_where_requests_finish() -> None:
    async with running() as run:
        await run.generations(1)
        for _ in range(10):
            run.engine.prefills_finished += 1
            await asyncio.sleep(0.02)
        assert run.engine.ran <= 3, "at most where a request finished late"
        ran = run.engine.ran
        await run.generations(ran + 2)


async def test_a_failure_stays_until_a_success() -> None:
    async with running(outcome=BatonError(ErrorKind.INTERNAL, "no")) as run:
        await run.generations(2)
        assert run.canary.failure == "a canary generation failed: no"
        assert run.canary.failures >= 1
        run.engine.outcome = None
        await eventually(lambda: run.canary.failure is None, 5)


async def test_a_full_engine_changes_nothing() -> None:
    async with running() as run:
        await eventually(lambda: run.canary.failure is None, 5)
        run.engine.outcome = BatonError(ErrorKind.OVERLOADED, "all slots are taken")
        await run.generations(run.engine.ran + 2)
        assert run.canary.failure is None


@pytest.mark.parametrize("busy", [False, True])
async def test_one_that_does_not_end_is_cancelled(busy: bool) -> None:
    """The canary counts as failed, unless the engine computes requests meanwhile."""
    async with running(limits={"least_s": 0.05, "multiple": 0.0}) as run:
        await eventually(lambda: run.canary.failure is None, 5)
        run.engine.stuck, run.engine.busy = True, busy
        await eventually(lambda: run.engine.cancelled >= 2, 5)
        failed = "a canary generation did not end within 0 s"
        assert run.canary.failure == (None if busy else failed)
