"""Random worlds: two engines hand sequences over, each at its own pace, while tickets come late and requests
are cancelled, moved and preempted. Every token is that of one engine alone, no attempt fails that was not
cancelled, and nothing is left.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import ErrorKind
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.decode_pb2 import TicketBody
from baton.v1.engine_pb2 import CancelCommand, EngineEvent, ReservedEvent
from baton.v1.prefill_pb2 import ProvideTicketRequest
from baton.v1.types_pb2 import Attempt
from tests.worker.engine.engine_pair import Pair
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

# Longer than a world takes on slow cores, so that no ticket expires.
_TTL_MS, _WAIT_S = 3_600_000, 200.0
AT_ONCE = 6


@dataclass(eq=False)
class Asked:
    """One attempt of a request. `output`: of the attempts before it; `cancelled`: on purpose, so that it may
    end in any way."""

    name: bytes
    prompt: list[int]
    most: int
    source: SteppedEngine
    target: SteppedEngine
    early: bool
    ticket_in: int
    number: int = 1
    output: list[int] = field(default_factory=list)
    cancelled: bool = False
    reserve_id: int = 0
    prefill_id: int = 0
    reserved: ReservedEvent | None = None
    has_ticket: bool = False

    @property
    def attempt(self) -> Attempt:
        return Attempt(request_id=self.name * 8, number=self.number)

    def start(self, pair: Pair) -> None:
        """Reserves, and where the prompt is sent ahead of its ticket starts its prefill too."""
        command = reserve(tokens=len(self.prompt) + len(self.output), most=self.most, ttl=_TTL_MS)
        command.attempt.CopyFrom(self.attempt)
        command.first_number = len(self.output)
        command.block_hashes[:] = pair.hashes([*self.prompt, *self.output])
        self.reserve_id = self.target.send(reserve=command)
        if self.early:
            self._prefill()

    def _prefill(self) -> None:
        ticket = None if self.reserved is None else self.reserved.ticket
        command = prefill(ticket, most=self.most, ticket_follows=ticket is None)
        command.attempt.CopyFrom(self.attempt)
        command.token_ids[:] = [*self.prompt, *self.output]
        command.prompt_length = len(self.prompt)
        self.prefill_id = self.source.send(prefill=command)
        self.has_ticket = ticket is not None

    def step(self) -> EngineEvent | None:
        """Takes the reservation, and hands the ticket over once it is due. The refusal where there is one."""
        if self.reserved is None:
            answer = [event for event in self.target.events if event.id == self.reserve_id]
            if not answer or answer[0].HasField("failed"):
                return answer[0] if answer else None
            self.reserved = answer[0].reserved
            if not self.early:
                self._prefill()
        if not self.has_ticket:
            self.ticket_in -= 1
            if self.ticket_in < 0:
                ticket = ProvideTicketRequest(attempt=self.attempt, ticket=self.reserved.ticket)
                self.source.send(provide_ticket=ticket)
                self.has_ticket = True
        return None

    def cancel(self, first: SteppedEngine) -> None:
        """Cancels at both engines, in an order that is the caller's."""
        self.cancelled = True
        for engine in (first, self.target if first is self.source else self.source):
            engine.send(cancel=CancelCommand(attempt=self.attempt))

    @property
    def tokens(self) -> list[int]:
        """The output so far, with that of earlier attempts; of this one only what was not lost."""
        drawn = [
            event.prefill.first_token.token_id
            for event in self.source.events
            if event.id == self.prefill_id and event.prefill.HasField("first_token")
        ]
        if self.reserved is None:
            return [*self.output, *drawn]
        key = self.reserved.slot, self.reserved.generation
        decoded = [one.token for one in self.target.records if one.has_token and _key(one) == key]
        return [*self.output, *(decoded or drawn)]  # decode gives the first token out, too

    @property
    def prefilled(self) -> str:
        """The last event of the prefill's call; empty before its end."""
        ended = self.source.of(self.prefill_id)[-1:] if self.prefill_id else [""]
        return ended[0] if ended and ended[0] in ("prefill_ended", "failed") else ""

    @property
    def over(self) -> bool:
        """True once nothing of the attempt is left at either engine."""
        if self.reserved is None or not self.prefilled:
            return False
        transfer = TicketBody.FromString(self.reserved.ticket.body).transfer_id
        return self.target.engine.decode.tickets.find_transfer(transfer) is None

    @property
    def finish(self) -> Finish | None:
        assert self.reserved is not None
        key = self.reserved.slot, self.reserved.generation
        mine = (one.finish for one in self.target.records if _key(one) == key)
        return next((finish for finish in mine if finish is not Finish.NONE), None)


def _key(record: Any) -> tuple[int, int]:
    return record.slot, record.generation


class World:
    """Two engines and the requests that run there. `failures`: of attempts that were not cancelled."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        settings: dict[str, Any] = {
            "slots": 2,
            "kv_blocks": dice.choice((20, 33)),
            "chunk_tokens": dice.choice((4, 8, 16)),
            "speculation": dice.choice(("off", "lookup", "auto")),
            "host_kv_mb": dice.choice((0, 1)),
            "transport": dice.choice(("auto", "grpc")),
        }
        self.combined = dice.random() < 0.5
        self.pair = Pair(folder, combined=self.combined, source=settings, **settings)
        self.engines = (self.pair.source, self.pair.target)
        self.going: list[Asked] = []
        self.done: dict[bytes, tuple[list[int], list[int], int]] = {}
        self.failures: list[tuple[ErrorKind, str]] = []
        self._stands = [0, 0]
        self._names = iter(range(1, 1 << 16))
        self._prompts = [[dice.randrange(3, 30) for _ in range(dice.randint(2, 30))] for _ in range(4)]

    def run(self, requests: int) -> None:
        """Runs until that many requests have ended."""
        until = time.monotonic() + _WAIT_S
        while self.going or requests:
            assert time.monotonic() < until, [vars(one) for one in self.going]
            if requests and len(self.going) < AT_ONCE and self.dice.random() < 0.3:
                requests -= 1
                self._start(self._drawn())
            self._turn()
            for one in list(self.going):
                self._advance(one)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def assert_free(self) -> None:
        for _ in range(50):  # the last frames of both links
            self._turn()
        for engine in self.engines:
            engine.run_out()
            engine.assert_free()
            assert (engine.transfers, engine.receiving) == (0, 0)

    def _drawn(self) -> Asked:
        ends = list(self.engines)
        if self.combined:
            self.dice.shuffle(ends)
        return Asked(
            name=next(self._names).to_bytes(2, "little"),
            prompt=self.dice.choice(self._prompts),
            most=self.dice.choice((3, 8, 20)),
            source=ends[0],
            target=ends[1],
            early=self.dice.random() < 0.5,
            ticket_in=self.dice.randrange(8),
        )

    def _start(self, one: Asked) -> None:
        one.start(self.pair)
        self.going.append(one)

    def _turn(self) -> None:
        """A turn of each engine, unless it stands: as if its process did not run for a while."""
        for number, engine in enumerate(self.engines):
            if self._stands[number]:
                self._stands[number] -= 1
                continue
            engine.play()
            if self.dice.random() < 0.02:
                self._stands[number] = self.dice.randrange(20)
        if self.dice.random() < 0.1:
            time.sleep(self.dice.random() * 0.002)  # threads of the links

    def _advance(self, one: Asked) -> None:
        refusal = one.step()
        if refusal is not None:
            assert refusal.failed.kind == ErrorKind.OVERLOADED.value or one.cancelled, refusal
            self.going.remove(one)
            if one.prefill_id:
                one.source.send(cancel=CancelCommand(attempt=one.attempt))
            if not one.cancelled:
                self._again(one, one.output)
        elif one.over:
            self.going.remove(one)
            if not one.cancelled:
                self._ended(one)
        elif not one.cancelled and len(one.tokens) + 2 < one.most and self.dice.random() < 0.01:
            one.cancel(self.dice.choice((one.source, one.target)))
            self._again(one, one.tokens)

    def _ended(self, one: Asked) -> None:
        if one.prefilled == "failed":
            self.failures.append(one.source.failure(one.prefill_id))
        elif one.finish is Finish.PREEMPTED and len(one.tokens) + 2 < one.most:
            self._again(one, one.tokens)
        else:
            self.done[one.name] = one.prompt, one.tokens, one.most

    def _again(self, one: Asked, output: list[int]) -> None:
        """Starts the next attempt, with the output so far; perhaps the other way round."""
        again = Asked(
            name=one.name,
            prompt=one.prompt,
            most=one.most,
            source=one.source,
            target=one.target,
            early=self.dice.random() < 0.5,
            ticket_in=self.dice.randrange(8),
            number=one.number + 1,
            output=output,
        )
        if self.combined and self.dice.random() < 0.5:
            again.source, again.target = one.target, one.source
        self._start(again)


@pytest.fixture(scope="module")
def outputs() -> dict[tuple[int, ...], list[int]]:
    """Outputs of one engine alone, by prompt."""
    return {}


def alone(truth: SteppedEngine, known: dict[tuple[int, ...], list[int]], prompt: list[int]) -> list[int]:
    """The longest output of a prompt, of an engine that does nothing else."""
    if tuple(prompt) not in known:
        command = reserve(name=b"t", number=len(known) + 1, tokens=len(prompt), most=20)
        reserved = truth.ask(reserve=command).reserved
        one = Asked(b"t", prompt, 20, truth, truth, early=False, ticket_in=0, number=len(known) + 1)
        start = prefill(reserved.ticket, most=20)
        start.attempt.CopyFrom(command.attempt)
        start.token_ids[:] = prompt
        start.prompt_length = len(prompt)
        one.reserved, one.prefill_id = reserved, truth.send(prefill=start)
        truth.run_out()
        known[tuple(prompt)] = one.tokens
        assert len(one.tokens) == 20
    return known[tuple(prompt)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_every_token_is_that_of_one_engine_alone(
    tmp_path: Path, truth: SteppedEngine, outputs: dict[tuple[int, ...], list[int]], seed: int
) -> None:
    world = World(tmp_path, seed)
    try:
        world.run(8)
        assert world.failures == []
        world.assert_free()
    finally:
        world.close()
    assert world.done
    for prompt, tokens, most in world.done.values():
        assert tokens == alone(truth, outputs, prompt)[: len(tokens)]
        assert most - 2 <= len(tokens) <= most
