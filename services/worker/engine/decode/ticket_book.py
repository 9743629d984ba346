"""The receiver's book of tickets: what state each attempt's promise is in. Torch-free, grpc-free.

              reserve           receiving          commit           activate
    (nothing) ───────▶ RESERVED ─────────▶ RECEIVING ──────▶ COMMITTED ────────▶ ACTIVE
        │                 │  └──────────── commit ────────────▶ │                    │
        │                 └──────────────────┴── end, cancel ───┴────────────────────┘
        │                                             ▼
        └─────────────── cancel ─────────────────▶ ENDED: a tombstone for 30 s, then forgotten

There is one live entry an attempt at most, and one commit an entry. A tombstone refuses a late reserve
of its attempt; so does any higher attempt of the same request, live or tombstoned. A ticket lives until
its request's deadline. One that is reserved or receiving then takes no commit; its owner finds it in
`expired` and ends it when its sender is quiet. One whose sequence still runs a moment later is in there
too. What was granted (blocks, slot) is the caller's to free, once, when `end` or `cancel` hands the entry
out. Time is the injected clock's, never the wire's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import TicketState

if TYPE_CHECKING:
    from baton.v1.types_pb2 import Attempt

Grant = TypeVar("Grant")

TOMBSTONE_S = 30.0
# 30 s of two thousand endings a second; beyond it the oldest tombstone goes early.
MAX_TOMBSTONES = 65536
# How long after its deadline a sequence that runs is in `expired`: the router, which cancels it at the
# deadline itself, comes first.
RUNNING_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One dispatch of one request."""

    request_id: bytes
    number: int

    @classmethod
    def of(cls, attempt: Attempt) -> AttemptKey:
        """The wire's message as a key."""
        return cls(attempt.request_id, attempt.number)


@dataclass(slots=True)
class TicketEntry(Generic[Grant]):
    """A live promise. The book changes `state`; all else is fixed."""

    key: AttemptKey
    transfer_id: int
    grant: Grant
    deadline: float
    state: TicketState.ValueType = TicketState.TICKET_STATE_RESERVED

    @property
    def awaited(self) -> bool:
        """Whether its commit may still come."""
        return self.state in (TicketState.TICKET_STATE_RESERVED, TicketState.TICKET_STATE_RECEIVING)


class CommitOutcome(Enum):
    ACCEPTED = 1
    REPEATED = 2  # committed before: nothing changed
    EXPIRED = 3  # its life is over: nothing changed
    UNKNOWN = 4  # never given out, or ended


class TicketBook(Generic[Grant]):
    """All tickets of one receiver's incarnation. Owned by one thread."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        tombstone_s: float = TOMBSTONE_S,
        max_tombstones: int = MAX_TOMBSTONES,
    ) -> None:
        self._clock = clock
        self._tombstone_s = tombstone_s
        self._max_tombstones = max_tombstones
        self._live: dict[AttemptKey, TicketEntry[Grant]] = {}
        self._by_transfer: dict[int, TicketEntry[Grant]] = {}
        # Until when each refuses, the oldest first.
        self._tombstones: OrderedDict[AttemptKey, float] = OrderedDict()
        # Numbers of each request, live or tombstoned.
        self._numbers: dict[bytes, set[int]] = {}

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def tombstones(self) -> int:
        self._purge()
        return len(self._tombstones)

    def find(self, key: AttemptKey) -> TicketEntry[Grant] | None:
        """The live entry of this attempt."""
        return self._live.get(key)

    def find_transfer(self, transfer_id: int) -> TicketEntry[Grant] | None:
        """The live entry of this transfer."""
        return self._by_transfer.get(transfer_id)

    def state(self, key: AttemptKey) -> TicketState.ValueType:
        """ENDED for a tombstone, UNSPECIFIED for an attempt never seen or long forgotten."""
        entry = self._live.get(key)
        if entry is not None:
            return entry.state
        self._purge()
        ended = key in self._tombstones
        return TicketState.TICKET_STATE_ENDED if ended else TicketState.TICKET_STATE_UNSPECIFIED

    def check(self, key: AttemptKey) -> TicketEntry[Grant] | None:
        """The live entry, so that reserving twice is one promise; None where `reserve` may go on.

        `BatonError` CONFLICT for an attempt that has ended, or is lower than one seen.
        """
        self._purge()
        if key in self._tombstones:
            raise BatonError(ErrorKind.CONFLICT, f"attempt {key.number} has ended already")
        highest = max(self._numbers.get(key.request_id, ()), default=0)
        if key.number < highest:
            raise BatonError(ErrorKind.CONFLICT, f"attempt {key.number} is superseded by attempt {highest}")
        return self._live.get(key)

    def superseded(self, key: AttemptKey) -> list[TicketEntry[Grant]]:
        """Live entries of lower attempts of this request, for the caller to end."""
        numbers = sorted(self._numbers.get(key.request_id, ()))
        lower = (AttemptKey(key.request_id, number) for number in numbers if number < key.number)
        return [self._live[other] for other in lower if other in self._live]

    def reserve(self, key: AttemptKey, transfer_id: int, grant: Grant, ttl_s: float) -> TicketEntry[Grant]:
        """A new entry. Ask `check` first: CONFLICT as there, or where the attempt or transfer id is live."""
        if self.check(key) is not None or transfer_id in self._by_transfer:
            raise BatonError(ErrorKind.CONFLICT, f"attempt {key.number} or its transfer id is live already")
        entry = TicketEntry(key, transfer_id, grant, self._clock() + ttl_s)
        self._live[key] = entry
        self._by_transfer[transfer_id] = entry
        self._numbers.setdefault(key.request_id, set()).add(key.number)
        return entry

    def receiving(self, transfer_id: int) -> bool:
        """Notes the first byte; False where that changes nothing."""
        entry = self._by_transfer.get(transfer_id)
        if entry is None or entry.state != TicketState.TICKET_STATE_RESERVED:
            return False
        entry.state = TicketState.TICKET_STATE_RECEIVING
        return True

    def commit(self, transfer_id: int) -> CommitOutcome:
        """Spends the ticket, if it can be; single use."""
        entry = self._by_transfer.get(transfer_id)
        if entry is None:
            return CommitOutcome.UNKNOWN
        if not entry.awaited:
            return CommitOutcome.REPEATED
        if self._clock() >= entry.deadline:
            return CommitOutcome.EXPIRED
        entry.state = TicketState.TICKET_STATE_COMMITTED
        return CommitOutcome.ACCEPTED

    def activate(self, transfer_id: int) -> bool:
        """A committed entry's slot runs; False where that changes nothing."""
        entry = self._by_transfer.get(transfer_id)
        if entry is None or entry.state != TicketState.TICKET_STATE_COMMITTED:
            return False
        entry.state = TicketState.TICKET_STATE_ACTIVE
        return True

    def end(self, transfer_id: int) -> TicketEntry[Grant] | None:
        """Ends an entry in any state, leaves its tombstone, hands it out; None if it is not live."""
        entry = self._by_transfer.pop(transfer_id, None)
        if entry is None:
            return None
        del self._live[entry.key]
        entry.state = TicketState.TICKET_STATE_ENDED
        self._bury(entry.key)
        return entry

    def cancel(self, key: AttemptKey) -> TicketEntry[Grant] | None:
        """Like `end`; an attempt not seen yet gets a tombstone too, which a second cancel renews."""
        entry = self._live.get(key)
        if entry is not None:
            return self.end(entry.transfer_id)
        self._bury(key)
        return None

    def expired(self) -> list[TicketEntry[Grant]]:
        """Entries past their deadline: awaited ones at once, others after `RUNNING_GRACE_S`."""
        now = self._clock()
        late = [entry for entry in self._live.values() if now >= entry.deadline]
        return [entry for entry in late if entry.awaited or now >= entry.deadline + RUNNING_GRACE_S]

    def _bury(self, key: AttemptKey) -> None:
        self._purge()
        self._tombstones[key] = self._clock() + self._tombstone_s
        self._tombstones.move_to_end(key)
        self._numbers.setdefault(key.request_id, set()).add(key.number)
        if len(self._tombstones) > self._max_tombstones:
            self._forget(next(iter(self._tombstones)))

    def _purge(self) -> None:
        now = self._clock()
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest] > now:
                return
            self._forget(oldest)

    def _forget(self, key: AttemptKey) -> None:
        del self._tombstones[key]
        numbers = self._numbers[key.request_id]
        numbers.discard(key.number)
        if not numbers:
            del self._numbers[key.request_id]
