"""Modelled workers behind a router's real queue and placement, whose number an autoscaler sets.

A prefill worker computes one prompt after the other; a decode worker holds a slot and KV blocks for each
sequence until it ends. New workers take `start_s` until they serve.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.base.errors import BatonError
from baton.v1.worker_pb2 import DescribeResponse
from services.router.placement.placement import Placement
from services.router.queue.counted_queue import CountedQueue
from services.router.queue.demand import Demand
from services.router.request.request import ClientCall
from services.router.workers.backlog import Backlog
from services.router.workers.decode_load import LoadHistory
from services.router.workers.recent_work import PrefillShare, Turnover
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.workers.bare_workers import Found, bare_worker, pools_of
from tests.scaling.autoscaler import SCRAPE_S, SYNC_S, Autoscaler, Sample, Scrapes

_QUEUE_S, _MAX_WAITING, _AHEAD_TOKENS = 30.0, 128, 2048
_BEAT_S = 1.0
_NEVER_FULL = 100_000


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of `rate(t)` requests a second, each with a prompt that takes `prefill_s` on one
    worker, and an output that takes `decode_s`."""

    rate: Callable[[float], float]
    most: float
    seconds: float
    prefill_s: float = 1.0
    decode_s: float = 10.0
    prompt: int = 4096
    seed: int = 1


@dataclass(frozen=True)
class Shape:
    """`scaled`: the role whose workers are scaled; of the other one there is one that is never full.
    `sequences`: that a decode worker has KV blocks for; `slots`: that it has slots for."""

    scaled: str
    start_s: float
    sequences: int = 16
    slots: int = 16


@dataclass
class Machine:
    """The machine behind one worker."""

    role: str
    worker: Worker
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: int = 0
    queued_s: float = 0.0


@dataclass
class Run:
    """Results of a run. `changes`: time and number of pods; `hours`: of pods, those that start included;
    `unsafe`: how often a pod was taken away while requests were refused or had waited for half a minute."""

    changes: list[tuple[float, int]]
    hours: float
    served: int
    unserved: int
    unsafe: int

    @property
    def reversals(self) -> int:
        """The number of times that the number of pods changed its direction."""
        numbers = [number for _, number in self.changes]
        signs = [b > a for a, b in itertools.pairwise(numbers)]
        return sum(a != b for a, b in itertools.pairwise(signs))

    def most(self, begin: float, end: float) -> int:
        """The highest number of pods in a time."""
        before = [number for at, number in self.changes if at <= begin][-1:]
        return max([*before, *(number for at, number in self.changes if begin <= at <= end)])


class ScaledCluster:
    """One router, its workers, and their autoscaler."""

    def __init__(self, load: Load, shape: Shape, autoscaler: Autoscaler) -> None:
        self._load, self._shape, self._autoscaler = load, shape, autoscaler
        self._loop = asyncio.get_running_loop()
        self._machines: list[Machine] = []
        self._found: list[Worker] = []
        self._made = 0
        self._running = False
        self._starting: list[asyncio.Task[None]] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._waiting_since: set[float] = set()
        self._scrapes = Scrapes()
        self.served = self.unserved = self.unsafe = 0
        self.hours = self._lasted = 0.0
        other = "decode" if shape.scaled == "prefill" else "prefill"
        for role, number in ((shape.scaled, autoscaler.replicas), (other, 1)):
            for _ in range(number):
                self._add(role)
        tokens_per_s = load.prompt / load.prefill_s
        self.demand = Demand(tokens_per_s)
        self._pools = pools_of(self._found)
        placement = Placement(Found(self._found), self._pools, _AHEAD_TOKENS)
        self._running = True
        self.queue = CountedQueue(placement, _MAX_WAITING, _QUEUE_S, 1.0, self.demand)

    async def run(self) -> None:
        """Serves the load to its end."""
        beating = [asyncio.create_task(self._beat()), asyncio.create_task(self._scale())]
        draw = random.Random(self._load.seed)
        at = 0.0
        while (at := at + draw.expovariate(self._load.most)) < self._load.seconds:
            if draw.random() * self._load.most > self._load.rate(at):
                continue
            await asyncio.sleep(at - self._loop.time())
            task = asyncio.create_task(self._serve())
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        await asyncio.sleep(max(0.0, self._load.seconds - self._loop.time()))
        for task in (*beating, *self._starting, *self._requests):
            task.cancel()

    async def _serve(self) -> None:
        now = self._loop.time()
        entry = self.queue.enter(ClientCall())
        self._waiting_since.add(now)
        try:
            claim = await self.queue.claim(entry, self._load.prompt, 64, now + _QUEUE_S, lambda worker: 0)
        except BatonError:
            self.unserved += 1
            return
        finally:
            self._waiting_since.discard(now)
        self.queue.ended(entry)
        placed = self._loop.time()
        prefill, decode = (self._machine(one) for one in (claim.prefill, claim.decode))
        decode.running += 1
        try:
            prefill.queued_s += self._load.prefill_s
            async with prefill.lock:
                await asyncio.sleep(self._load.prefill_s)
            prefill.queued_s -= self._load.prefill_s
            claim.prefill_ended()
            self.queue.place_waiting()
            await asyncio.sleep(self._load.decode_s)
            self.served += 1
            self._lasted += self._loop.time() - placed
        finally:
            decode.running -= 1
            claim.release()
            self.queue.place_waiting()

    def _machine(self, worker: Worker) -> Machine:
        return next(one for one in self._machines if one.worker is worker)

    def _add(self, role: str) -> None:
        self._made += 1
        room = min(self._shape.slots, self._shape.sequences) if role == self._shape.scaled else _NEVER_FULL
        worker = bare_worker(f"{role}-{self._made}", slots=room)
        loop = self._loop
        worker.backlog, worker.turnover = Backlog(loop.time), Turnover(loop.time)
        worker.prefill_share, worker.loads = PrefillShare(loop.time), LoadHistory(loop.time)
        self._machines.append(Machine(role, worker))
        self._found.append(worker)
        if self._running:
            self._pools.review()
            self.queue.place_waiting()

    async def _start(self) -> None:
        await asyncio.sleep(self._shape.start_s)
        self._add(self._shape.scaled)

    def _take_away(self) -> None:
        """A pod that starts goes first, then the newest."""
        starting = [task for task in self._starting if not task.done()]
        if starting:
            starting[-1].cancel()
            return
        self._found.remove(
            [one for one in self._found if one.described.identity.name.startswith(self._shape.scaled)][-1]
        )

    async def _beat(self) -> None:
        while True:
            for machine in self._machines:
                described = DescribeResponse()
                described.CopyFrom(machine.worker.described)
                described.load.free_slots = described.load.slots - machine.running
                described.load.step_costs.prefill_token_s = self._load.prefill_s / self._load.prompt
                machine.worker.update(described, machine.worker.claimed_slots, 0.0)
            self.queue.place_waiting()
            present = set(map(id, self._found))
            self._machines = [
                one for one in self._machines if id(one.worker) in present or one.running or one.queued_s
            ]
            await asyncio.sleep(_BEAT_S)

    async def _scale(self) -> None:
        while True:
            now = self._loop.time()
            self._scrapes.add(now, self._sample())
            before = self._autoscaler.replicas
            after = self._autoscaler.sync(now, self._scrapes)
            self.hours += before * SYNC_S / 3600
            self.unsafe += after < before and self._overloaded(now)
            self._starting = [task for task in self._starting if not task.done()]
            for _ in range(after - before):
                self._starting.append(asyncio.create_task(self._start()))
            for _ in range(before - after):
                self._take_away()
            await asyncio.sleep(SCRAPE_S)

    def _overloaded(self, now: float) -> bool:
        refused = sum(requests for requests, _ in self.demand.unserved().values())
        return refused > 0 or any(now - since > SYNC_S + SCRAPE_S for since in self._waiting_since)

    def _sample(self) -> Sample:
        """The sample that Prometheus scrapes: the router's own metrics of demand, and those of workers."""
        shape, present = self._shape, set(map(id, self._found))
        machines = [one for one in self._machines if id(one.worker) in present]
        decodes = [one for one in machines if one.role == "decode"]
        return {
            "demand_requests": self.demand.requests(),
            "decode_lasts": self._lasted / max(1, self.served),
            "demand_prefill_seconds": self.demand.prefill_seconds(),
            "unserved_requests": sum(requests for requests, _ in self.demand.unserved().values()),
            "waiting_requests": self.queue.waiting,
            "prefill_workers": sum(one.role == "prefill" for one in machines),
            "decode_workers": len(decodes),
            "prefill_queued_seconds": sum(min(one.queued_s, 0.2) for one in machines),
            "decode_slots_each": shape.slots,
            "decode_blocks_each": shape.sequences,
            **{f"decode_running_{id(one)}": one.running for one in decodes},
        }


def simulate(load: Load, shape: Shape, autoscaler: Autoscaler) -> Run:
    """Runs the load in virtual time."""

    async def main() -> Run:
        autoscaler.changes.append((0.0, autoscaler.replicas))
        cluster = ScaledCluster(load, shape, autoscaler)
        await cluster.run()
        return Run(autoscaler.changes, cluster.hours, cluster.served, cluster.unserved, cluster.unsafe)

    return run_virtual(main())
