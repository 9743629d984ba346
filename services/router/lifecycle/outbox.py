"""Output of one request that its client has not taken yet.

Writing never waits: a slow client gets more in one delta and delays no other. `UnreadBudget` bounds what all
outboxes hold together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.state import Receipt
from baton.v1.router_pb2 import RequestTrace, Usage
from services.router.request.request import Delta, Finish

# Tokens of one delta: it is parsed and formatted at once, while other streams wait.
MOST_TAKEN = 256
# Estimated size of a Python object and the reference to it.
_OBJECT_BYTES = 40


class Outbox:
    """Deltas of one output: written as the request's tokens arrive, and emptied by an API handler until the
    last delta or an error.

    `available` is set whenever something is put; the outboxes of one call share it.
    """

    def __init__(self, available: asyncio.Event, unread: UnreadBudget, *, offsets: bool = False) -> None:
        """`offsets`: of tokens without logprobs, too, it is reported where their text begins."""
        self._offsets = offsets
        self._available = available
        self._budget = unread
        # Approximate bytes that are not taken. Written by `UnreadBudget`.
        self.unread_bytes = 0
        self._closed = False
        self._delta = Delta(first_number=0, opening=True)
        # Deltas before it that have `MOST_TAKEN` tokens, each with its unread bytes, and the sum of those.
        self._full: deque[tuple[Delta, int]] = deque()
        self._full_bytes = 0
        self._error: BatonError | None = None
        # The journal's, if there is one: each delta reports whether the request is recorded.
        self.receipt: Receipt | None = None

    def put_prompt(self, logprobs: Sequence[bytes]) -> None:
        """Adds the prompt's logprobs, before anything else; they go out with what comes next."""
        if not self._closed:
            self._delta.prompt_logprobs += logprobs
            self._budget.add(self, sum(map(len, logprobs)) + _OBJECT_BYTES * len(logprobs))

    def put(self, token_id: int, text: str, offset: int = 0, logprobs: bytes | None = None) -> None:
        """Adds one token, the text that it completed, and where its text begins."""
        if self._closed:
            return
        if len(self._delta.token_ids) == MOST_TAKEN:
            self._begin_delta()
        size = _OBJECT_BYTES + len(text)
        self._delta.token_ids.append(token_id)
        self._delta.text += text
        if logprobs is not None:
            self._delta.logprobs.append(logprobs)
            self._delta.offsets.append(offset)
            size += len(logprobs) + 2 * _OBJECT_BYTES
        elif self._offsets:
            self._delta.offsets.append(offset)
            size += _OBJECT_BYTES
        self._budget.add(self, size)
        self._available.set()

    def end(self, text: str, finish: Finish, usage: Usage, trace: RequestTrace) -> None:
        """Adds the rest of the text and ends the output."""
        if self._closed:
            return
        self._delta.text += text
        self._delta.finish, self._delta.usage, self._delta.trace = finish, usage, trace
        self._available.set()

    def fail(self, error: BatonError) -> None:
        """Ends the output with an error, which is raised once everything put before it was taken."""
        self._error = self._error or error
        self._available.set()

    def overflow(self) -> None:
        """Drops what was not taken and fails: the client reads too slowly."""
        self._delta = Delta(self._delta.first_number)
        self._full.clear()
        self._closed = True
        self.fail(BatonError(ErrorKind.OVERLOADED, "the client does not read its output"))

    def close(self) -> None:
        """Releases what was not taken: the client is gone, or has all of it."""
        self._closed = True
        self._budget.release(self)

    def take(self) -> Delta | None:
        """Returns what was put since the last call, up to `MOST_TAKEN` tokens, or None; raises the error of
        `fail` once all is taken."""
        if self._full:
            delta, size = self._full.popleft()
            self._full_bytes -= size
            self._budget.subtract(self, size)
        elif (delta := self._delta).token_ids or delta.finish is not None:
            self._delta = Delta(delta.first_number + len(delta.token_ids))
            self._budget.release(self)
        elif self._error is not None:
            raise self._error
        else:
            return None
        delta.resumable = self.receipt is not None and self.receipt.acknowledged
        return delta

    def _begin_delta(self) -> None:
        """The delta is full: what comes next is another."""
        size = self.unread_bytes - self._full_bytes
        self._full.append((self._delta, size))
        self._full_bytes += size
        self._delta = Delta(self._delta.first_number + MOST_TAKEN)


class UnreadBudget:
    """Bounds the output that all clients together have not read. Above the limit, the outbox with the most
    overflows."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._outboxes: set[Outbox] = set()
        self.total_bytes = 0

    def add(self, outbox: Outbox, size: int) -> None:
        """Counts output that was put into an outbox."""
        self._outboxes.add(outbox)
        outbox.unread_bytes += size
        self.total_bytes += size
        while self.total_bytes > self._max_bytes:
            largest = max(self._outboxes, key=lambda one: one.unread_bytes)
            self.release(largest)
            largest.overflow()

    def subtract(self, outbox: Outbox, size: int) -> None:
        """Counts output that was taken, while there is more."""
        outbox.unread_bytes -= size
        self.total_bytes -= size

    def release(self, outbox: Outbox) -> None:
        """Takes off all that was in an outbox: it was read, or dropped."""
        self._outboxes.discard(outbox)
        self.total_bytes -= outbox.unread_bytes
        outbox.unread_bytes = 0
