"""Many requests on one local engine, as a worker runs them: each joins when it finds a slot and blocks, its
blocks grow with it, and who finds none is set aside in the host's memory; some are cancelled on the way."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from baton.engine.decode.slots import Grant
from baton.engine.memory.blocks import OutOfBlocksError
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.mask_board import Mask
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.decode_pb2 import Ticket
from baton.v1.types_pb2 import Attempt
from services.worker.engine.decode.block_allocation import BlockAllocation
from services.worker.engine.decode.reservation import Reservation, SlotKey
from tests.engine.local_engine import LocalEngine, Start

RUN_S = 250.0
# Requests that are prefilled together.
_AT_ONCE = 64


@dataclass(frozen=True)
class Request:
    """`cancel_after`: tokens of output after which it is cancelled. All behind it: see `Start`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    limits: Limits
    cancel_after: int | None = None
    forced: int | None = None
    emitted: tuple[int, ...] = ()
    masked: bool = False
    first_mask: Mask | None = None
    prediction: tuple[int, ...] = ()
    most_drafts: int | None = None
    tenant: str | None = None

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt, and what an earlier attempt emitted."""
        return self.prompt + self.emitted


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[Logprobs | None]
    finish: Finish


@dataclass(frozen=True)
class Counts:
    """Counts of what happened to the requests of a run."""

    allocations: int
    swapped_out: int
    preempted: int
    cancelled: int
    at_once: int


class Crowd:
    """Requests that compete for slots and blocks. `reserve`: output tokens that a request has blocks for
    at first; None: all of them, and no growth. `host_blocks`: room for blocks of sequences that are
    swapped out."""

    def __init__(self, engine: LocalEngine, *, reserve: int | None = None, host_blocks: int = 0) -> None:
        self.engine = engine
        self._reserve = reserve
        block_bytes = sum(group.block_bytes for group in engine.cache.layout.groups)
        self._host = HostBlocks(engine.cache, host_blocks * block_bytes)
        self._host_total = self._host.free
        self._allocation = BlockAllocation(engine.pools, engine.decode, self._host)
        self._running: dict[SlotKey, tuple[int, Reservation]] = {}
        self._most = 0

    def run(
        self,
        requests: Sequence[Request],
        draw: random.Random,
        *,
        join: float = 0.6,
        each_turn: Callable[[], None] = lambda: None,
        within_s: float = RUN_S,
    ) -> list[Answer]:
        """Runs all of them; answers in their order. `join`: how likely a turn admits one more."""
        answers: dict[int, Answer] = {}
        waiting = deque(enumerate(requests))
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            joining = 0
            while draw.random() < join and joining < _AT_ONCE:
                joining += 1
            for _ in range(self._admit(list(islice(waiting, joining)))):
                waiting.popleft()
            for number, reservation in self._running.values():
                self._cancel_in_time(requests[number], reservation)
            self._allocation.step()
            self.engine.step()
            each_turn()
            answers |= dict(self._ended())
            if not waiting and not self._running:
                return [answers[number] for number in range(len(requests))]
        raise AssertionError(f"{len(self._running)} requests did not end")

    def counts(self, answers: Sequence[Answer]) -> Counts:
        allocation = self._allocation
        cancelled = sum(answer.finish is Finish.CANCELLED for answer in answers)
        return Counts(
            allocation.allocations, allocation.swapped_out, allocation.preempted, cancelled, self._most
        )

    def assert_all_free(self) -> None:
        """Every slot, every block here and in the host's memory."""
        engine = self.engine
        engine.pools.check_integrity([])
        assert engine.slots.free == engine.slots.total
        assert engine.pools.free == engine.pools.total
        assert self._host.free == self._host_total
        assert not self._allocation.waiting

    def began(self, key: SlotKey, number: int) -> None:
        """Called when a request, by its place among those of `run`, has got a slot; no step has run since."""

    def numbers(self) -> dict[SlotKey, int]:
        """The requests that run, by their place among those of `run`."""
        return {key: number for key, (number, _) in self._running.items()}

    def _admit(self, joining: list[tuple[int, Request]]) -> int:
        """Starts them; how many of the first found slots and blocks."""
        if not joining or not self.engine.slots.free or self._allocation.waiting:
            return 0
        starts = [self._start(request) for _, request in joining]
        try:
            keys = self.engine.start_many(starts)
        except OutOfBlocksError:
            return 0
        for key, start, (number, request) in zip(keys, starts, joining, strict=False):
            grant = Grant(*key, self.engine.tables.pop(key), start.first_capacity)
            end = len(start.prompt) + start.max_tokens
            reservation = Reservation(Attempt(), Ticket(), grant, len(request.text), end)
            self._running[key] = number, reservation
            self._allocation.add(reservation)
            self.began(key, number)
        self._most = max(self._most, len(self._running))
        return len(keys)

    def _start(self, request: Request) -> Start:
        length, most = len(request.text), len(request.prompt) + request.limits.max_tokens - 1
        return Start(
            request.prompt,
            max_tokens=request.limits.max_tokens,
            sampling=request.params,
            stop=request.limits.stop_token_ids,
            min_tokens=request.limits.min_tokens,
            capacity=most if self._reserve is None else min(most, length + self._reserve),
            grows=True,
            forced=request.forced,
            emitted=request.emitted,
            masked=request.masked,
            first_mask=request.first_mask,
            prediction=request.prediction,
            most_drafts=request.most_drafts,
            tenant=request.tenant,
        )

    def _cancel_in_time(self, request: Request, reservation: Reservation) -> None:
        if request.cancel_after is None or reservation.ending:
            return
        if len(self.engine.output[reservation.key]) >= request.cancel_after:
            reservation.ending = True
            self.engine.decode.cancel(*reservation.key)

    def _ended(self) -> list[tuple[int, Answer]]:
        """Frees what the ring says has ended."""
        engine, ended = self.engine, []
        for key in [key for key in self._running if key in engine.finish]:
            number, reservation = self._running.pop(key)
            answer = Answer(engine.output.pop(key), engine.logprobs.pop(key), engine.finish.pop(key))
            ended.append((number, answer))
            self._allocation.remove(key)
            engine.pools.release(reservation.blocks)
            engine.decode.learn(*key)
            engine.slots.release(*key)
        return ended
