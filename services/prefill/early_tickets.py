"""Tickets that came before their prompt's Prefill call: held for a short time, in bounded number and size."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from services.common.attempt_key import AttemptKey

LIFE_S = 5.0
MAX_TICKETS = 4096
# A ticket has about 200 bytes, and its body one number a cache group.
MAX_TICKET_BYTES = 16 << 10
MAX_BYTES = 4 << 20


class EarlyTickets:
    """Of one worker's front. Owned by its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # With its size and the time at which it is dropped; the oldest first.
        self._held: OrderedDict[AttemptKey, tuple[Ticket, int, float]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, key: AttemptKey, ticket: Ticket) -> None:
        """Until it is taken, for `LIFE_S` at most; in place of an earlier one of this attempt.

        `BatonError` INVALID for a ticket that is too large, OVERLOADED where too many are held.
        """
        size = ticket.ByteSize() + len(key.request_id)  # of any length
        if size > MAX_TICKET_BYTES:
            raise BatonError(ErrorKind.INVALID, f"a ticket of {size} bytes, {MAX_TICKET_BYTES} are allowed")
        self._drop_late()
        self._remove(key)
        if len(self._held) >= MAX_TICKETS or self.bytes + size > MAX_BYTES:
            raise BatonError(ErrorKind.OVERLOADED, "too many tickets wait for their prompts")
        self._held[key] = ticket, size, self._clock() + LIFE_S
        self.bytes += size

    def take(self, key: AttemptKey) -> Ticket | None:
        """The ticket of this attempt, which is held no longer."""
        self._drop_late()
        return self._remove(key)

    def _remove(self, key: AttemptKey) -> Ticket | None:
        if (held := self._held.pop(key, None)) is None:
            return None
        ticket, size, _ = held
        self.bytes -= size
        return ticket

    def _drop_late(self) -> None:
        now = self._clock()
        while self._held:
            key, (_, _, until) = next(iter(self._held.items()))
            if now < until:
                return
            self._remove(key)
