"""Canary generations: short ones of the worker's own while no request finishes, as a readiness probe.

The engine's heartbeat shows that its loop runs; a canary shows that prompts are computed and tokens come
out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.v1.engine_pb2 import CanaryCommand, EngineCommand
from baton.v1.types_pb2 import WorkerRole
from baton.v1.worker_pb2 import IntegrityReport
from services.common.config.types import Role
from services.common.engine.client import EngineClient
from services.common.observability.logs import get_log
from services.decode.servicer import DecodeServicer

INTERVAL_S = 10.0
# How long a generation may take: `_FIRST_S` before any was measured, then a multiple of the longest so far,
# but at least `_LEAST_S`.
_FIRST_S, _LEAST_S, _MULTIPLE = 60.0, 5.0, 10.0

log = get_log(__name__)


class Canary:
    """Runs canary generations; `failure` is why the latest one failed, None where it or a request
    succeeded, and `failures` counts those that failed."""

    def __init__(
        self,
        role: Role,
        engine: EngineClient,
        decode: DecodeServicer,
        interval_s: float,
        least_s: float = _LEAST_S,
        multiple: float = _MULTIPLE,
    ) -> None:
        """`least_s`, `multiple`: how long a generation may take: at least so long, and so many times the
        longest so far."""
        self.failure: str | None = "no canary generation has succeeded yet"
        self.failures = 0
        self._sides = _sides(role)
        self._engine = engine
        self._decode = decode
        self._interval_s = interval_s
        self._least_s = least_s
        self._multiple = multiple
        self._longest_s = 0.0

    async def run(self) -> None:
        """Runs until cancelled. At each interval, and at once: a generation, unless a request has finished
        since the one before."""
        seen = self.finished()
        while True:
            if seen == self.finished():
                await self._generate()
            else:
                self._record(None)
            seen = self.finished()
            await asyncio.sleep(self._interval_s)

    def finished(self) -> int:
        """Returns how many requests this worker has finished."""
        return self._engine.prefills_finished + self._decode.sequences_finished

    async def _generate(self) -> None:
        began = asyncio.get_running_loop().time()
        deadline_s = max(self._least_s, self._multiple * self._longest_s) if self._longest_s else _FIRST_S
        tokens = await self._tokens()
        for side in self._sides:
            try:
                async with asyncio.timeout(deadline_s):
                    await self._run_on(side)
            except TimeoutError:
                await self._cancel(side)
                if await self._tokens() == tokens:  # else the engine is busy with requests
                    self._record(f"a canary generation did not end within {deadline_s:.0f} s")
                return
            except BatonError as error:
                if error.kind is not ErrorKind.OVERLOADED:  # full of requests, which may still finish
                    self._record(f"a canary generation failed: {error.message}")
                return
        self._longest_s = max(self._longest_s, asyncio.get_running_loop().time() - began)
        self._record(None)

    async def _run_on(self, side: WorkerRole.ValueType) -> None:
        """Raises BatonError where the engine refuses it or it ends otherwise than it should."""
        if side == WorkerRole.WORKER_ROLE_DECODE:
            await self._decode.run_canary()
        else:
            await self._engine.call(EngineCommand(canary=CanaryCommand(side=side)), _FIRST_S)

    async def _cancel(self, side: WorkerRole.ValueType) -> None:
        try:
            await self._engine.call(
                EngineCommand(canary=CanaryCommand(side=side, cancel=True)), self._least_s
            )
        except BatonError as error:
            log.warning("canary_not_cancelled", reason=error.message)

    async def _tokens(self) -> int | None:
        """Tokens of requests that the engine has computed so far; None where it does not answer."""
        try:
            report = await report_of(self._engine, self._least_s)
        except BatonError:
            return None
        return report.prompt_tokens_run + report.tokens_decoded

    def _record(self, failure: str | None) -> None:
        self.failures += failure is not None
        if failure != self.failure:
            if failure is None:
                log.info("canary_succeeded")
            else:
                log.warning("canary_failed", reason=failure)
        self.failure = failure


async def report_of(engine: EngineClient, timeout_s: float = 10.0) -> IntegrityReport:
    """The engine's counts, without the check of its block pools. Raises BatonError."""
    command = EngineCommand()
    command.report.skip_integrity = True
    return (await engine.call(command, timeout_s)).report


def _sides(role: Role) -> Sequence[WorkerRole.ValueType]:
    sides = {"prefill": WorkerRole.WORKER_ROLE_PREFILL, "decode": WorkerRole.WORKER_ROLE_DECODE}
    return [side for name, side in sides.items() if role in (name, "both")]
