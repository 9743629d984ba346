"""The front's client of guided decoding: of the compile process, through which each grammar goes first, and
of the mask processes, which share the guided sequences among them.

The masks of all slots are due within one decode step, and one process computes one at a time, so there are
several where the worker has the cores. All are started with the first guided request. A sequence stays with
the process that it was given to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from baton.base.errors import BatonError
from baton.engine.shared_memory.mask_board import MOST_PROCESSES
from baton.v1.types_pb2 import Grammar, Limits
from services.grammar.compiler import COMPILE_PROGRAM, WAIT_S, GrammarCompiler
from services.grammar.launch import SlotKey
from services.grammar.process_client import PROGRAM, MaskProcessClient, MaskSetup

# A mask of a JSON schema takes 0.1 to 0.3 ms of a core and a decode step about 5 ms, so that one process is
# enough for about `_SLOTS_A_PROCESS`. The other cores are for router, engine and front.
_SLOTS_A_PROCESS = 8
_CORES_A_PROCESS = 4


def mask_processes(slots: int) -> int:
    """Number of mask processes that a worker of `slots` slots has on this machine."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(-(-slots // _SLOTS_A_PROCESS), cores // _CORES_A_PROCESS, MOST_PROCESSES))


class MaskClient:
    """Calls of one front. To be used within its event loop."""

    def __init__(
        self,
        setup: MaskSetup,
        on_failed: Callable[[int, int, BatonError], None],
        program: Sequence[str] = PROGRAM,
        compile_program: Sequence[str] = COMPILE_PROGRAM,
        compile_wait_s: float = WAIT_S,
    ) -> None:
        """`on_failed` is called where a sequence that is followed cannot continue: slot, generation, why."""
        self.compiler = GrammarCompiler(setup.folder, compile_program, wait_s=compile_wait_s)
        self.processes = [
            MaskProcessClient(setup, number, on_failed, program, self.compiler.refuse)
            for number in range(setup.processes)
        ]
        self._starts: dict[MaskProcessClient, asyncio.Task[None]] = {}

    @property
    def pids(self) -> list[int]:
        """Ids of the mask processes that run."""
        return [process.pid for process in self.processes if process.pid is not None]

    @property
    def followed(self) -> int:
        """Sequences whose masks are computed."""
        return sum(process.followed for process in self.processes)

    @property
    def opened(self) -> int:
        """Sequences that grammars were opened for."""
        return sum(process.opened for process in self.processes)

    @property
    def failed(self) -> int:
        """Grammars that were refused or failed."""
        return self.compiler.refused + sum(process.failed for process in self.processes)

    @property
    def restarts(self) -> int:
        """Number of processes that ended and were replaced."""
        return self.compiler.restarts + sum(process.restarts for process in self.processes)

    async def started(self) -> None:
        """Returns once no start of a process is under way."""
        await asyncio.gather(*self._starts.values())

    async def source(self, tenant: str, grammar: Grammar) -> str:
        """The grammar as the other calls take it, once it is known to compile within its limits. Raises
        BatonError: INVALID where it does not, CONFLICT where that could not be found out."""
        self._start_all()
        return await self.compiler.source(tenant, grammar)

    async def next_mask(self, source: str, limits: Limits, output_ids: Sequence[int]) -> bytes:
        """Returns the mask of the tokens that may follow `output_ids`, as `EngineCommand.first_token_mask`
        has it. Raises BatonError: INVALID if the grammar cannot be used, CONFLICT if its process ended."""
        try:
            return await self._least_loaded().next_mask(source, limits, output_ids)
        except BatonError as error:
            raise self.compiler.refusal(source) or error from None

    async def follow(
        self, key: SlotKey, position: int, source: str, limits: Limits, output_ids: Sequence[int]
    ) -> None:
        """Has the masks of a slot's tokens computed, from the one behind `position` on, until `close` or its
        end. `output_ids`: of earlier attempts. Raises BatonError as `next_mask` does."""
        if any(process.follows(key) for process in self.processes):
            return
        try:
            await self._least_loaded().follow(key, position, source, limits, output_ids)
        except BatonError as error:
            raise self.compiler.refusal(source) or error from None

    def close(self, key: SlotKey) -> None:
        """Ends following; does nothing if the slot is not followed."""
        for process in self.processes:
            process.close(key)

    def ended(self, key: SlotKey) -> None:
        """The slot's last token was read from the ring; its process has seen it too."""
        for process in self.processes:
            process.ended(key)

    async def stop(self) -> None:
        """Ends the mask processes and the compiler."""
        for start in self._starts.values():
            start.cancel()
        await asyncio.gather(self.compiler.stop(), *(process.stop() for process in self.processes))

    def _least_loaded(self) -> MaskProcessClient:
        """The process with the fewest sequences and calls, of those that have started if there are any."""
        self._start_all()
        ready = [process for process in self.processes if process.ready]
        return min(ready or self.processes, key=lambda process: process.load)

    def _start_all(self) -> None:
        """Starts the processes that do not run."""
        for process in self.processes:
            if not process.ready and (process not in self._starts or self._starts[process].done()):
                self._starts[process] = asyncio.create_task(_start(process))


async def _start(process: MaskProcessClient) -> None:
    """Starts a process ahead of its first call, which raises what this does not."""
    with contextlib.suppress(BatonError):
        await process.start()
