"""Tickets that arrive before they can be passed on: kept for a time, in bounded number and size."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from services.common.engine.attempt_key import AttemptKey

# How long a ticket is kept that overtakes its Prefill call.
LIFETIME_S = 5.0
MAX_TICKETS = 4096
# A ticket takes about 200 bytes, plus one number for each cache group.
MAX_TICKET_BYTES = 16 << 10
MAX_BYTES = 4 << 20


class EarlyTickets:
    """Early tickets of one worker's front. Not thread-safe."""

    def __init__(self, lifetime_s: float = LIFETIME_S, clock: Callable[[], float] = time.monotonic) -> None:
        """`lifetime_s`: how long a ticket is kept; infinite where its taker drops those not needed."""
        self._lifetime_s = lifetime_s
        self._clock = clock
        # Each with its size in bytes and when it is dropped; the oldest first.
        self._tickets: OrderedDict[AttemptKey, tuple[Ticket, int, float]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, key: AttemptKey, ticket: Ticket) -> None:
        """Keeps a ticket until it is taken, for `lifetime_s` at most; it replaces an earlier one of the
        attempt.

        Raises BatonError: INVALID for a ticket that is too large, OVERLOADED where too many are kept.
        """
        size = ticket.ByteSize() + len(key.request_id)  # of any length
        if size > MAX_TICKET_BYTES:
            raise BatonError(ErrorKind.INVALID, f"a ticket of {size} bytes, {MAX_TICKET_BYTES} are allowed")
        self._drop_expired()
        self._remove(key)
        if len(self._tickets) >= MAX_TICKETS or self.bytes + size > MAX_BYTES:
            raise BatonError(ErrorKind.OVERLOADED, "too many tickets wait for their prompts")
        self._tickets[key] = ticket, size, self._clock() + self._lifetime_s
        self.bytes += size

    def take(self, key: AttemptKey) -> Ticket | None:
        """Removes and returns the ticket of an attempt; None where there is none."""
        self._drop_expired()
        return self._remove(key)

    def _remove(self, key: AttemptKey) -> Ticket | None:
        if (kept := self._tickets.pop(key, None)) is None:
            return None
        ticket, size, _ = kept
        self.bytes -= size
        return ticket

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._tickets:
            key, (_, _, until) = next(iter(self._tickets.items()))
            if now < until:
                return
            self._remove(key)
