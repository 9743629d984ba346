"""A cluster in virtual time: the router's real queue and placement, before workers that take as long as
measured ones (bench/LOG.md: one H200, an 8B model, bf16).

A prefill worker computes one prompt after the other, or with `by_slack` in the order and steps of the
engine's scheduler; a decode worker gives each of its sequences a token a step. On a worker of role both,
prompts and steps take turns. Workers report load and step costs with heartbeats, which may be old.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from heapq import heappop, heappush
from statistics import median

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.perf_model.messages import to_message
from baton.perf_model.step_costs import StepCosts
from baton.v1.worker_pb2 import DescribeResponse
from services.router.placement.claim import Claim
from services.router.placement.placement import Cached, Placement
from services.router.queue.request_order import RequestOrder
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from services.router.workers.backlog import Backlog
from services.router.workers.decode_load import LoadHistory
from services.router.workers.recent_work import PrefillShare, Turnover
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_prefill import ModelledPrompts
from tests.router.workers.bare_workers import Found, bare_worker

PROMPT, OUTPUT = 1024, 256
# 24.4 ms for a prompt of 1,024 tokens; steps of 5.0 ms with one sequence, 6.2 with 32 and 7.5 with 64 of
# about 1,100 tokens.
COSTS = StepCosts(
    prefill_token_s=23.4e-6,
    prefill_step_s=5e-3,
    prefill_half_context=26_600,
    decode_step_s=4.9e-3,
    decode_sequence_s=1e-5,
    decode_context_token_s=2.7e-8,
)


@dataclass(order=True)
class Decoding:
    """A sequence that is decoded: the number of its machine's step that ends it, the tokens that it has then,
    and the event of its end."""

    last_step: int
    context: int
    ended: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


@dataclass(eq=False)
class Machine:
    """One worker's hardware. `slower`: how many times as long as `costs` it takes; `unreported`: how many
    times as long as it reports a client waits for a token."""

    role: str
    slower: float = 1.0
    _: KW_ONLY
    costs: StepCosts = COSTS
    slots: int = 256
    unreported: float = 1.0
    prompts: asyncio.Lock = field(default_factory=asyncio.Lock)
    exchanges: bool = False
    by_slack: bool = False
    # A heap: the sequence that ends first is its first.
    running: list[Decoding] = field(default_factory=list)
    most_running: int = 0
    # Tokens that these have.
    context: int = 0
    # Of the prompts computed last, how many times as long as `costs` they took.
    _slowness: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    # Held by what runs on a worker of role both.
    _gpu: asyncio.Lock = field(default_factory=asyncio.Lock)
    _stepping: asyncio.Task[None] | None = None
    _stepped: int = 0
    _steps: ModelledPrompts | None = None

    async def prefill(self, tokens: int, left_s: float = math.inf) -> None:
        """Computes a prompt, whose first token is due in `left_s`, once those before it are."""
        if self.by_slack:
            if self._steps is None:
                self._steps = ModelledPrompts(self.costs, self._slower_now, self._turn())
            await self._steps.compute(tokens, left_s)
            return
        async with self.prompts, self._turn() or contextlib.nullcontext():
            await asyncio.sleep(self._slower_now() * self.costs.prompt_s(tokens))

    def _slower_now(self) -> float:
        """The factor by which a prompt or step that begins now is slower than `costs`."""
        self._slowness.append(self.slower)
        return self.slower

    def _turn(self) -> asyncio.Lock | None:
        return self._gpu if self.role == "both" else None

    def step_s(self) -> float:
        return self.unreported * self.slower * self.costs.token_s(len(self.running), self.context)

    async def decode(self, prompt: int, tokens: int) -> None:
        """Decodes `tokens` tokens of a sequence."""
        sequence = Decoding(self._stepped + tokens, prompt + tokens)
        heappush(self.running, sequence)
        self.context += prompt
        self.most_running = max(self.most_running, len(self.running))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        await sequence.ended.wait()

    async def _step(self) -> None:
        while self.running:
            async with self._gpu:
                await asyncio.sleep(self.step_s())
            self._stepped += 1
            self.context += len(self.running)
            while self.running and self.running[0].last_step == self._stepped:
                sequence = heappop(self.running)
                self.context -= sequence.context
                sequence.ended.set()

    def describe(self, worker: Worker) -> DescribeResponse:
        """The description in a worker's next heartbeat."""
        described = DescribeResponse()
        described.CopyFrom(worker.described)
        load = described.load
        load.slots, load.free_slots = self.slots, self.slots - len(self.running)
        load.context_tokens = self.context
        load.step_costs.CopyFrom(to_message(self._reported()))
        return described

    def _reported(self) -> StepCosts:
        """The costs that it has measured."""
        costs, slower = self.costs, self.slower
        return StepCosts(
            prefill_token_s=costs.prefill_token_s * median(self._slowness or [slower]),
            prefill_step_s=costs.prefill_step_s * slower,
            prefill_half_context=costs.prefill_half_context,
            decode_step_s=costs.decode_step_s * slower,
            decode_sequence_s=costs.decode_sequence_s * slower,
            decode_context_token_s=costs.decode_context_token_s * slower,
        )


@dataclass
class Served:
    """One request: its time to first token and per output token, or None where it was refused, and when."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    refused_s: float | None = None
    arrived_s: float = 0.0

    def meets(self, slo: Slo) -> bool:
        if self.ttft_s is None or self.tpot_s is None:
            return False
        return self.ttft_s <= (slo.ttft_s or 1e9) and self.tpot_s <= (slo.tpot_s or 1e9)


Make = Callable[[Found, list[Worker]], Placement]
Machines = Callable[[], list[Machine]]


class Cluster:
    """Machines behind `routers` routers, each of which has its own view of them."""

    def __init__(
        self,
        machines: list[Machine],
        make: Make,
        *,
        routers: int = 1,
        heartbeat_s: float = 0.5,
        max_waiting: int = 10_000,
    ) -> None:
        self.machines = machines
        self._heartbeat_s = heartbeat_s
        loop = asyncio.get_running_loop()
        self.queues: list[WaitingQueue] = []
        self.placements: list[Placement] = []
        self.views: list[list[Worker]] = []
        for _ in range(routers):
            workers = []
            for number, machine in enumerate(self.machines):
                worker = bare_worker(
                    f"{machine.role}-{number}", slots=machine.slots, receives_handoffs=machine.exchanges
                )
                worker.backlog, worker.turnover = Backlog(loop.time), Turnover(loop.time)
                worker.prefill_share, worker.loads = PrefillShare(loop.time), LoadHistory(loop.time)
                workers.append(worker)
            placement = make(Found(workers), workers)
            queue = WaitingQueue(placement, max_waiting, 60.0)
            for worker in workers:
                worker.changed = queue.place_waiting
            self.queues.append(queue)
            self.placements.append(placement)
            self.views.append(workers)
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            for workers in self.views:
                for worker, machine in zip(workers, self.machines, strict=True):
                    worker.update(machine.describe(worker), worker.claimed_slots, 0.0)
            await asyncio.sleep(self._heartbeat_s)

    async def serve(
        self,
        router: int,
        slo: Slo | None,
        prompt: int = PROMPT,
        output: int = OUTPUT,
        call: ClientCall | None = None,
        deadline: float | None = None,
        cached: Cached = lambda worker: 0,
    ) -> Served:
        """One request from its arrival to its end."""
        loop, queue = asyncio.get_running_loop(), self.queues[router]
        arrived = loop.time()
        entry = queue.enter(call or ClientCall(), slo, deadline=deadline)
        try:
            claim = await queue.claim(entry, prompt, output, arrived + 60, cached)
        except BatonError as error:
            if error.kind not in (ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED, ErrorKind.DEADLINE):
                raise
            return Served(refused_s=loop.time() - arrived, arrived_s=arrived)
        queue.ended(entry)
        try:
            due = math.inf if slo is None or slo.ttft_s is None else arrived + slo.ttft_s
            uncached = prompt - cached(claim.prefill)
            return await self._run(router, claim, prompt, uncached, output, arrived, due)
        finally:
            claim.release()

    async def _run(
        self, router: int, claim: Claim, prompt: int, uncached: int, output: int, arrived: float, due: float
    ) -> Served:
        loop, view = asyncio.get_running_loop(), self.views[router]
        prefill, decode = (self.machines[view.index(one)] for one in (claim.prefill, claim.decode))
        await prefill.prefill(uncached, due - loop.time())
        claim.prefill_ended()
        first = loop.time()
        await decode.decode(prompt, output - 1)
        tpot_s = (loop.time() - first) / (output - 1)
        claim.decoded(output, tpot_s)
        return Served(first - arrived, tpot_s, arrived_s=arrived)


@dataclass(frozen=True)
class Traffic:
    """Poisson arrivals: `rate` a second for `seconds`, each with one of the limits and one of the routers in
    turn, or at random; `prompt` and `output`: their tokens. `then`: the rate afterwards, for as long
    again."""

    rate: float
    seconds: float
    slos: tuple[Slo, ...]
    seed: int = 0
    prompt: int = PROMPT
    output: int = OUTPUT
    then: float = 0.0

    def arrivals(self, draw: random.Random) -> Iterator[float]:
        """Draws the times when requests come."""
        for begin, rate in ((0.0, self.rate), (self.seconds, self.then)):
            at = begin
            while rate and (at := at + draw.expovariate(rate)) < begin + self.seconds:
                yield at


def simulate(
    machines: Machines, make: Make, traffic: Traffic, *, routers: int = 1, heartbeat_s: float = 0.5
) -> list[tuple[Slo, Served]]:
    """Serves the traffic to its end: each request's limits and what it got."""

    async def main() -> list[tuple[Slo, Served]]:
        cluster = Cluster(machines(), make, routers=routers, heartbeat_s=heartbeat_s)
        draw, loop = random.Random(traffic.seed), asyncio.get_running_loop()
        requests: list[tuple[Slo, asyncio.Task[Served]]] = []
        for at in traffic.arrivals(draw):
            await asyncio.sleep(at - loop.time())
            slo = draw.choice(traffic.slos)
            served = cluster.serve(draw.randrange(routers), slo, traffic.prompt, traffic.output)
            request = asyncio.create_task(served)
            requests.append((slo, request))
        return [(slo, await request) for slo, request in requests]

    return run_virtual(main())


def attained(served: list[tuple[Slo, Served]]) -> int:
    """The number of requests that met their limits."""
    return sum(one.meets(slo) for slo, one in served)


def keep_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off that late requests wait behind others."""
    monkeypatch.setattr(RequestOrder, "set_late", lambda order, entry, late: None)
