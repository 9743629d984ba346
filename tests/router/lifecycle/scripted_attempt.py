"""An attempt between a pair of scripted workers."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from baton.base.errors import ErrorKind
from baton.v1.decode_pb2 import Ticket
from baton.v1.prefill_pb2 import FirstToken
from baton.v1.types_pb2 import Attempt
from services.router.lifecycle.attempt_calls import AttemptCalls
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.outbox import Outbox, UnreadBudget
from services.router.lifecycle.output_state import OutputState
from services.router.lifecycle.timeline import RequestTimeline
from services.router.request.request import Request
from services.router.text.detokenizer import Detokenizer
from services.router.text.output_text import OutputText
from tests.router.conftest import byte_tokenizer
from tests.router.lifecycle.scripted_workers import REQUEST_ID, Pair, a_request, quiesced

TICKET = Ticket(body=b"a promise")
# The third attempt of a request of which two tokens are there.
ATTEMPT = Attempt(request_id=REQUEST_ID, number=3)
EMITTED = [10, 11]
NEXT = FirstToken(number=2, token_id=12)
FREE = (0, 0, 0)
CLAIMED = (1, 11, 3)


def an_output(request: Request) -> tuple[OutputState, Outbox]:
    """The output of a request before its first attempt, and where it is delivered."""
    outbox = Outbox(asyncio.Event(), UnreadBudget(10**6))
    text = OutputText(request, Detokenizer(byte_tokenizer()))
    return OutputState(request, text, outbox, RequestTimeline(request), Observations()), outbox


class Scene:
    """An attempt between two workers, `left_s` before its deadline, on a clock that stands still until
    `thaw`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        names: tuple[bytes, ...] = (),
        left_s: float = 60,
        **fields: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        # A fraction in binary: sums with whole seconds are not rounded, and neither are their differences.
        self._now = math.floor(loop.time() * 1024) / 1024
        monkeypatch.setattr(loop, "time", lambda: self._now)
        self.thaw = monkeypatch.undo
        self.pair = Pair()
        self.request = a_request(deadline=self._now + left_s, **fields)
        self.output, self.outbox = an_output(self.request)
        self.output.begin(ATTEMPT.number)
        self.output.emitted += EMITTED
        self.claim = self.pair.claim()
        self.calls = AttemptCalls(self.request, self.output, self.claim, Cancels(), names)

    async def prefilling(self) -> Any:
        """Prefill's call, begun and read from."""
        self.calls.prefill.start(TICKET)
        await quiesced()
        return self.pair.prefill_peer.calls["Prefill"][-1]

    @property
    def error(self) -> tuple[ErrorKind, str] | None:
        """The error that prefill's call ended with; None: it has not ended with one."""
        error = self.calls.prefill.error
        return None if error is None else (error.kind, error.message)
