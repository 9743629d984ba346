"""A prefill engine and a decode engine over a real link, stepped by the test, which simulates the router."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.base.errors import ErrorKind
from baton.engine.shared_memory.output_ring import Finish
from baton.model_spec.block_hash import BlockHasher
from baton.v1.decode_pb2 import TicketBody
from baton.v1.engine_pb2 import ReservedEvent
from baton.v1.prefill_pb2 import ProvideTicketRequest
from baton.v1.types_pb2 import Attempt
from baton.v1.worker_pb2 import GetAuditRequest, IntegrityReport
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

BLOCK = 4
SECRET = "theirs"
_WAIT_S = 20.0


@dataclass(eq=False)
class PairRequest:
    """A request of an `EnginePair`. `number`: the id of its prefill command."""

    prompt: list[int]
    attempt: Attempt
    reserved: ReservedEvent
    number: int = 0

    @property
    def resident(self) -> int:
        """Blocks of the prompt that were in decode's prefix cache, by its ticket."""
        counts = TicketBody.FromString(self.reserved.ticket.body).resident_counts
        return counts[0] if counts else 0


class Pair:
    """`source` computes prompts, `target` generates; both have the secret that keys block hashes."""

    def __init__(
        self, folder: Path, *, source: dict[str, Any] | None = None, combined: bool = False, **target: Any
    ) -> None:
        """`combined`: both are of role both, and exchange sequences."""
        if combined:
            target |= {"both_receives": True, "incarnation": "cd" * 16}
            source = {"both_receives": True, **(source or {})}
        roles: tuple[Literal["prefill", "both"], Literal["decode", "both"]]
        roles = ("both", "both") if combined else ("prefill", "decode")
        self.source = SteppedEngine(folder, roles[0], **{"prefix_secret": SECRET, **(source or {})})
        self.target = SteppedEngine(folder, roles[1], prefix_secret=SECRET, **target)
        self.each_turn: Callable[[], None] = lambda: None  # called once a turn
        self._numbers = itertools.count(1)
        self._model = self.target.model

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self._model.layout.groups)

    def hashes(self, tokens: Sequence[int], tenant: str = "") -> tuple[bytes, ...]:
        """The block hashes of a prompt, as a router computes them."""
        model = self._model
        return BlockHasher(
            SECRET.encode(),
            tenant=tenant,
            fingerprint=model.fingerprint,
            cache_dtype=model.layout.cache_dtype,
            block_tokens=BLOCK,
        ).hashes(tokens)

    def reserve(
        self, prompt: list[int], most: int = 4, tenant: str = "", names: Sequence[bytes] | None = None
    ) -> PairRequest:
        """Reserves at decode, with the hashes of the prompt or with `names`."""
        name = next(self._numbers).to_bytes(2, "little")
        command = reserve(name=name, tokens=len(prompt), most=most)
        command.block_hashes[:] = self.hashes(prompt, tenant) if names is None else names
        command.tenant = tenant
        event = self.target.ask(reserve=command)
        assert event.HasField("reserved"), event
        return PairRequest(prompt, command.attempt, event.reserved)

    def begin(
        self, request: PairRequest, most: int = 4, tenant: str = "", *, follows_in: int | None = None
    ) -> PairRequest:
        """Starts the prefill. `follows_in`: after how many turns it is given its ticket; None: at once."""
        ahead = follows_in is not None
        command = prefill(
            None if ahead else request.reserved.ticket,
            tokens=1,
            most=most,
            ticket_follows=ahead,
            tenant=tenant,
        )
        command.attempt.CopyFrom(request.attempt)
        command.token_ids[:] = request.prompt
        command.prompt_length = len(request.prompt)
        request.number = self.source.send(prefill=command)
        if follows_in is not None:
            self.source.turn(follows_in)
            ticket = ProvideTicketRequest(attempt=request.attempt, ticket=request.reserved.ticket)
            self.source.send(provide_ticket=ticket)
        return request

    def generate(
        self, prompt: list[int], most: int = 4, tenant: str = "", **how: Any
    ) -> tuple[list[int], PairRequest]:
        """Runs a request to its end; its tokens."""
        request = self.begin(self.reserve(prompt, most, tenant), most, tenant, **how)
        self.run_until(lambda: self.ended(request))
        return self.tokens(request), request

    def run_until(self, until: Callable[[], bool]) -> None:
        """Turns both engines until `until`; links have threads of their own."""
        deadline = time.monotonic() + _WAIT_S
        while not until():
            assert time.monotonic() < deadline, self.source.events[-3:]
            busy = [self.source.play(), self.target.play()]
            self.each_turn()
            if not any(busy):
                time.sleep(0.0005)

    def ended(self, request: PairRequest) -> bool:
        """True if the prefill's call and decode's slot have ended."""
        live = self.target.engine.decode.tickets.find_transfer(
            TicketBody.FromString(request.reserved.ticket.body).transfer_id
        )
        return self.source.of(request.number)[-1:] in (["prefill_ended"], ["failed"]) and live is None

    def tokens(self, request: PairRequest) -> list[int]:
        """The output of decode's slot."""
        key = (request.reserved.slot, request.reserved.generation)
        return [r.token for r in self.target.records if r.has_token and (r.slot, r.generation) == key]

    def finish(self, request: PairRequest) -> Finish:
        key = (request.reserved.slot, request.reserved.generation)
        return next(
            r.finish
            for r in self.target.records
            if r.finish is not Finish.NONE and (r.slot, r.generation) == key
        )

    def failure(self, request: PairRequest) -> tuple[ErrorKind, str]:
        return self.source.failure(request.number)

    def report(self) -> IntegrityReport:
        """The integrity report of the decode engine."""
        return self.target.ask(report=GetAuditRequest()).report

    def assert_free(self) -> None:
        self.source.assert_free()
        self.target.assert_free()

    def close(self) -> None:
        self.source.close()
        self.target.close()
