"""What one request has for its client and the client has not taken yet.

A slow client finds more in one delta and delays nobody else: writing never waits. `Unread` bounds what all
outboxes hold together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from services.router.request.request import Delta, Finish

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from baton.state import Receipt
    from baton.v1.router_pb2 import RequestTrace, Usage
    from services.router.lifecycle.unread import Unread


# Of a Python object and the reference to it.
_OBJECT_BYTES = 40


class Outbox:
    """Written where the request's tokens come in, emptied by one door until the last delta or an error.

    `news` is set by whatever is put; outboxes of one call share it.
    """

    def __init__(self, news: asyncio.Event, unread: Unread) -> None:
        self._news = news
        self._budget = unread
        # Bytes, about. `Unread` writes it.
        self.unread = 0
        self._overflowed = False
        self._delta = Delta(first_number=0, opening=True)
        self._error: BatonError | None = None
        # The journal's, where there is one: each delta says whether it has come.
        self.receipt: Receipt | None = None

    def put_prompt(self, logprobs: Sequence[bytes]) -> None:
        """Adds the prompt's logprobs, before anything else; they go out with what comes next."""
        if not self._overflowed:
            self._delta.prompt_logprobs += logprobs
            self._budget.add(self, sum(map(len, logprobs)) + _OBJECT_BYTES * len(logprobs))

    def put(self, token_id: int, text: str, offset: int = 0, logprobs: bytes | None = None) -> None:
        """Adds one token, the text it made certain and, where asked for, its logprobs and its place."""
        if self._overflowed:
            return
        size = _OBJECT_BYTES + len(text)
        self._delta.token_ids.append(token_id)
        self._delta.text += text
        if logprobs is not None:
            self._delta.logprobs.append(logprobs)
            self._delta.offsets.append(offset)
            size += len(logprobs) + 2 * _OBJECT_BYTES
        self._budget.add(self, size)
        self._news.set()

    def end(self, text: str, finish: Finish, usage: Usage, trace: RequestTrace) -> None:
        """Adds the rest of the text and closes."""
        if self._overflowed:
            return
        self._delta.text += text
        self._delta.finish, self._delta.usage, self._delta.trace = finish, usage, trace
        self._news.set()

    def fail(self, error: BatonError) -> None:
        """Closes with an error; what was put before still goes out."""
        self._error = self._error or error
        self._news.set()

    def overflow(self) -> None:
        """Drops what was not taken and closes with an error: the client reads too slowly."""
        self._delta = Delta(self._delta.first_number)
        self._overflowed = True
        self.fail(BatonError(ErrorKind.OVERLOADED, "the client does not read its output"))

    def close(self) -> None:
        """The client is gone, or has all of it."""
        self._overflowed = True
        self._budget.release(self)

    def take(self) -> Delta | None:
        """Everything put since the last time, or None; raises what `fail` was told once all is taken."""
        delta = self._delta
        if delta.token_ids or delta.finish is not None:
            delta.resumable = self.receipt is not None and self.receipt.acknowledged
            self._delta = Delta(delta.first_number + len(delta.token_ids))
            self._budget.release(self)
            return delta
        if self._error is not None:
            raise self._error
        return None
