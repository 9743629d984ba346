"""Conversations of several turns on two combined workers, in virtual time: after a burst of requests that
fills the prompt queues of both, conversations stay where their KV is cached."""

from __future__ import annotations

import asyncio
import random

from services.router.request.request import ClientCall
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import Cluster, Machine
from tests.router.placement.test_prefill_division import aware

# Tokens of the system prompt, which all workers have cached, of each message and of each answer.
SYSTEM, MESSAGE, ANSWER, TURNS = 1024, 128, 64, 5
RATE, SECONDS, PAUSE_S = 140, 5, 0.25
BURST, BURST_S = 60, 2.5


class Conversations:
    """Conversations with `RATE` turns a second; `BURST` more of them begin at once, at `BURST_S`."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._draw = random.Random(seed)
        # When each turn was placed, and how many tokens of its prompt the worker has computed.
        self.computed: list[tuple[float, int]] = []

    async def run(self) -> None:
        loop, begun, at, burst = asyncio.get_running_loop(), [], 0.0, BURST
        while (at := at + self._draw.expovariate(RATE / TURNS)) < SECONDS:
            await asyncio.sleep(at - loop.time())
            begun += [asyncio.create_task(self._converse())]
            if at > BURST_S:
                begun += [asyncio.create_task(self._converse()) for _ in range(burst)]
                burst = 0
        await asyncio.gather(*begun)

    async def _converse(self) -> None:
        cached: dict[Worker, int] = {}
        for turn in range(TURNS):
            await self._turn(SYSTEM + MESSAGE + turn * (MESSAGE + ANSWER), cached)
            await asyncio.sleep(self._draw.expovariate(1 / PAUSE_S))

    async def _turn(self, prompt: int, cached: dict[Worker, int]) -> None:
        (queue,), (view,) = self._cluster.queues, self._cluster.views
        now = asyncio.get_running_loop().time
        entry = queue.enter(ClientCall())
        claim = await queue.claim(entry, prompt, ANSWER, now() + 60, lambda at: cached.get(at, SYSTEM))
        queue.ended(entry)
        uncached = prompt - cached.get(claim.decode, SYSTEM)
        self.computed.append((now(), uncached))
        machine = self._cluster.machines[view.index(claim.decode)]
        await machine.prefill(uncached)
        claim.prefill_ended()
        await machine.decode(prompt, ANSWER - 1)
        cached[claim.decode] = prompt + ANSWER
        claim.release()


def test_full_prompt_queues_do_not_move_conversations() -> None:
    """Each turn that is moved computes several times as many tokens, which keeps the queues full, so that
    others are moved: without the rule of `Room.passes_over` that goes on for as long as the load lasts."""

    async def main() -> list[int]:
        conversations = Conversations(Cluster([Machine("both") for _ in range(2)], aware), seed=1)
        await conversations.run()
        return [tokens for at, tokens in conversations.computed if SECONDS - 2 <= at < SECONDS]

    late = run_virtual(main())
    assert sum(late) / len(late) < 1.25 * MESSAGE
