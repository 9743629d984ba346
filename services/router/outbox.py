"""What one request has for its client and the client has not taken yet.

A slow client finds more in one delta and delays nobody: the outbox holds at most the request's
own max_tokens ids, so writing never waits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from services.router.request import Delta, Finish

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from baton.state import Receipt
    from baton.v1.router_pb2 import RequestTrace, Usage
    from baton.v1.types_pb2 import Logprobs


class Outbox:
    """Written by the request's task, iterated by one door until the last delta or an error."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._delta = Delta(first_number=0, opening=True)
        self._error: BatonError | None = None
        # The journal's, where there is one: each delta says whether it has come.
        self.receipt: Receipt | None = None

    def put_prompt(self, logprobs: Sequence[Logprobs]) -> None:
        """Adds the prompt's logprobs, before anything else; they go out with what comes next."""
        self._delta.prompt_logprobs += logprobs

    def put(self, token_id: int, text: str, offset: int = 0, logprobs: Logprobs | None = None) -> None:
        """Adds one token, the text it made certain and, where asked for, its logprobs and its place."""
        self._delta.token_ids.append(token_id)
        self._delta.text += text
        if logprobs is not None:
            self._delta.logprobs.append(logprobs)
            self._delta.offsets.append(offset)
        self._ready.set()

    def end(self, text: str, finish: Finish, usage: Usage, trace: RequestTrace) -> None:
        """Adds the rest of the text and closes."""
        self._delta.text += text
        self._delta.finish, self._delta.usage, self._delta.trace = finish, usage, trace
        self._ready.set()

    def fail(self, error: BatonError) -> None:
        """Closes with an error; what was put before still goes out."""
        self._error = error
        self._ready.set()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Everything put, in order, as much at a time as there is; raises what `fail` was told."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            delta = self._delta
            if delta.token_ids or delta.finish is not None:
                delta.resumable = self.receipt is not None and self.receipt.acknowledged
                self._delta = Delta(delta.first_number + len(delta.token_ids))
                yield delta
            if delta.finish is not None:
                return
            if self._error is not None:
                raise self._error

    async def whole(self) -> Delta:
        """Waits for the end and gives everything as one delta."""
        whole = Delta(first_number=0, opening=True)
        async for delta in self.deltas():
            whole.token_ids += delta.token_ids
            whole.text += delta.text
            whole.logprobs += delta.logprobs
            whole.offsets += delta.offsets
            whole.prompt_logprobs += delta.prompt_logprobs
            whole.finish, whole.usage, whole.trace = delta.finish, delta.usage, delta.trace
        if whole.finish is None:
            raise BatonError(ErrorKind.INTERNAL, "the output ended without a reason")
        return whole
