"""A worker's engine and front by themselves, no supervisor, no router: the front is stopped under load.

What is injected: SIGSTOP to the front for seconds, while slots run. The ring fills up; the engine, which
goes on, may write nothing more. Let go, the front reads what stands there: every token comes, exact, in its
order.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from baton.base.process_stat import process_stat
from baton.device.shared_memory import SharedMemory
from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import RingReader
from baton.v1.decode_pb2 import ReserveRequest, SubscribeRequest
from baton.v1.decode_pb2_grpc import DecodeServiceStub
from baton.v1.prefill_pb2 import PrefillRequest
from baton.v1.prefill_pb2_grpc import PrefillServiceStub
from baton.v1.types_pb2 import Attempt, FinishReason, Limits, Sampling
from baton.v1.worker_pb2 import DescribeRequest
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from tests.e2e.support.cluster import worker_channel
from tests.e2e.support.workers import Worker, lone_worker
from tests.engine.local_engine import CONFIG, WEIGHTS_SEED, LocalEngine
from tests.support.waiting import until

ROUTER = b"r" * 16
WITHIN_S = 120.0


@dataclass(frozen=True)
class Size:
    device: str
    slots: int
    requests: int
    stopped_s: float
    longest: int = 400


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float


@dataclass
class Received:
    """The answer to one request. A message's tokens have to begin where the last message ended."""

    tokens: list[int] = field(default_factory=list)
    messages: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Client:
    """The calls that a router makes to a worker of role both, and no others."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._decode: Any = DecodeServiceStub(channel)
        self._prefill: Any = PrefillServiceStub(channel)
        self._worker: Any = WorkerServiceStub(channel)
        self.received: dict[bytes, Received] = {}

    async def follow(self) -> None:
        incarnation = (await self._worker.Describe(DescribeRequest())).identity.incarnation
        async for message in self._decode.Subscribe(
            SubscribeRequest(router_id=ROUTER, incarnation=incarnation)
        ):
            for output in message.outputs:
                received = self.received[output.attempt.request_id]
                assert output.first_number == len(received.tokens), "a token is missing or comes again"
                received.tokens += output.token_ids
                received.messages += 1
                if output.finish_reason != FinishReason.FINISH_REASON_UNSPECIFIED:
                    assert output.finish_reason == FinishReason.FINISH_REASON_LENGTH
                    received.ended.set()

    async def ask(self, number: int, ask: Ask) -> list[int]:
        attempt = Attempt(request_id=number.to_bytes(16, "big"), number=1)
        received = self.received[attempt.request_id] = Received()
        wanted = ReserveRequest(
            attempt=attempt,
            router_id=ROUTER,
            token_count=len(ask.prompt),
            max_tokens=ask.max_tokens,
            ttl_ms=600_000,
        )
        reserved = await self._decode.Reserve(wanted)
        request = PrefillRequest(
            attempt=attempt,
            token_ids=ask.prompt,
            prompt_length=len(ask.prompt),
            sampling=Sampling(temperature=ask.temperature, top_p=1, seed=ask.seed),
            limits=Limits(max_tokens=ask.max_tokens),
            ticket=reserved.ticket,
        )
        async for _ in self._prefill.Prefill(request):
            pass
        await received.ended.wait()
        return received.tokens


def asks_of(count: int, longest: int) -> list[Ask]:
    draw = random.Random(count)
    return [
        Ask(
            prompt=tuple(draw.choices(range(int(CONFIG["vocab_size"])), k=draw.randint(1, 20))),
            seed=draw.getrandbits(64),
            max_tokens=draw.randint(longest * 3 // 4, longest),
            temperature=draw.choice((0.0, 1.0)),
        )
        for _ in range(count)
    ]


def alone(folder: Path, asks: list[Ask], size: Size) -> list[list[int]]:
    longest, graph = size.longest + 40, size.device == "cuda"
    engine = LocalEngine(
        folder, slots=1, blocks=longest // 4, device=size.device, graph=graph, longest=longest
    )
    outputs = []
    for ask in asks:
        sampling = SamplingParams(ask.temperature, seed=ask.seed)
        key = engine.start(ask.prompt, max_tokens=ask.max_tokens, sampling=sampling)
        outputs += engine.run(key)
        engine.slots.release(*key)
        engine.pools.release(engine.tables.pop(key))
    return outputs


def ring_of(worker: Worker, slots: int) -> RingReader:
    """The worker's own ring, mapped a third time, to look at its counters alone."""
    for path in Path(f"/proc/{worker.front.pid}/fd").iterdir():
        if f"memfd:baton-{worker.name}" in str(path.readlink()):
            memory = SharedMemory.attach(os.open(path, os.O_RDWR))
            return SharedRings(slots).reader(memory)
    raise AssertionError("the front has no ring")


def is_stopped(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat.state == "T"


async def stop_and_let_go(worker: Worker, ring: RingReader, seconds: float) -> tuple[int, int]:
    """Returns the number of words in the ring, and of steps without room that the engine has counted
    meanwhile."""
    full = ring.full_steps
    os.kill(worker.front.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        await until(lambda: is_stopped(worker.front.pid), WITHIN_S)
        await until(lambda: ring.full_steps > full, WITHIN_S)
        await asyncio.sleep(0.2)
        steps, tail = ring.steps, ring.tail
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        assert is_stopped(worker.front.pid)
        assert (ring.steps, ring.tail) == (steps, tail), "a step advanced with no room for its words"
        standing = sum(
            int(ring.words[n % ring.capacity]) >> 56 == n // ring.capacity % 255 + 1
            for n in range(tail, tail + ring.capacity)
        )
        return standing, ring.full_steps - full
    finally:
        os.kill(worker.front.pid, signal.SIGCONT)


async def prove(folder: Path, size: Size) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    asks = asks_of(size.requests, size.longest)
    engine = {
        "device": size.device,
        "dtype": "float32",
        "numerics": "exact",
        "weights": "random",
        "weights_seed": WEIGHTS_SEED,
        "slots": size.slots,
        "kv_blocks": 1 + (size.longest // 16 + 3) * size.slots,
    }
    with lone_worker(folder, "both", engine=engine) as worker:
        async with worker_channel(worker.address) as channel:
            client, ring = Client(channel), ring_of(worker, size.slots)
            turn = asyncio.Semaphore(size.slots)

            async def one(number: int, ask: Ask) -> list[int]:
                async with turn:
                    return await client.ask(number, ask)

            following = asyncio.create_task(client.follow())
            work = asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))
            await until(
                lambda: sum(len(received.tokens) for received in client.received.values()) > 100 * size.slots,
                WITHIN_S,
            )
            standing, full = await stop_and_let_go(worker, ring, size.stopped_s)
            outputs = await _unless(following, work)
            report = await worker.until(lambda report: report.load.free_slots == size.slots)
            following.cancel()
    assert standing > ring.capacity - 3 * size.slots, "the ring was not full"
    assert report.ring_full_steps >= full > 0
    assert (report.load.free_blocks, report.live_tickets) == (report.load.blocks, 0)
    assert report.integrity_error == ""
    assert report.tokens_decoded == sum(len(output) - 1 for output in outputs)
    assert outputs == alone(folder, asks, size)
    return (
        f"stopped {size.stopped_s} s, {standing} of {ring.capacity} words stood, {full} full steps, "
        f"{len(outputs)} requests, {sum(map(len, outputs))} tokens exact"
    )


async def _unless(following: asyncio.Task[None], work: Awaitable[list[list[int]]]) -> list[list[int]]:
    """Returns the work's result, unless following fails before."""
    working = asyncio.ensure_future(work)
    async with asyncio.timeout(WITHIN_S):
        await asyncio.wait({following, working}, return_when=asyncio.FIRST_COMPLETED)
    if following.done():
        following.result()
    return await working


@pytest.mark.slow
async def test_a_front_that_stands_still_for_two_seconds(tmp_path: Path) -> None:
    print(await prove(tmp_path, Size("cpu", 4, 6, 2.0)))


@pytest.mark.slow
async def test_a_front_that_stands_still_for_half_a_minute(tmp_path: Path) -> None:
    print(f"\nPROOF front stopped: {await prove(tmp_path, Size('cpu', 8, 24, 30.0))}")


@pytest.mark.gpu
@pytest.mark.slow
async def test_a_front_that_stands_still_beside_a_gpu(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    print(f"\nPROOF front stopped, GPU: {await prove(tmp_path, Size('cuda', 32, 36, 30.0, 1500))}")
