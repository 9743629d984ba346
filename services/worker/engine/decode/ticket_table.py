"""The receiver's tickets and the state of each attempt's reservation. Torch-free, grpc-free.

              reserve           receiving          commit           activate
    (nothing) ───────▶ RESERVED ─────────▶ RECEIVING ──────▶ COMMITTED ────────▶ ACTIVE
        │                 │  └──────────── commit ────────────▶ │                    │
        │                 └──────────────────┴── end, cancel ───┴────────────────────┘
        │                                             ▼
        └─────────────── cancel ─────────────────▶ ENDED: a tombstone for 30 s, then forgotten

An attempt has at most one live entry, and an entry at most one commit. A tombstone refuses a late reserve
of its attempt; so does any higher attempt of the same request, live or tombstoned. A ticket lives until
its request's deadline. A reserved or receiving one takes no commit after that; it is in `expired` for its
owner to end. One whose sequence still runs `RUNNING_GRACE_S` later is in `expired` too. The caller frees the
reserved slot and blocks, once, when `end` or `cancel` returns the entry. Time is that of the injected clock,
never the wire's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import TicketState
from services.common.engine.attempt_key import AttemptKey

Reserved = TypeVar("Reserved")

TOMBSTONE_S = 30.0
# Two thousand ended attempts a second for 30 s; beyond that the oldest tombstone is dropped early.
MAX_TOMBSTONES = 65536
# How long after its deadline a running sequence counts as expired. The router cancels it at the deadline, and
# should come first.
RUNNING_GRACE_S = 0.5


@dataclass(slots=True)
class TicketEntry(Generic[Reserved]):
    """A live ticket. `TicketTable` changes `state`; all else is fixed."""

    key: AttemptKey
    transfer_id: int
    reservation: Reserved
    deadline: float
    state: TicketState.ValueType = TicketState.TICKET_STATE_RESERVED

    @property
    def awaited(self) -> bool:
        """True if the ticket may still be committed."""
        return self.state in (TicketState.TICKET_STATE_RESERVED, TicketState.TICKET_STATE_RECEIVING)


class CommitOutcome(Enum):
    ACCEPTED = 1
    REPEATED = 2  # committed before; nothing changed
    EXPIRED = 3  # past its deadline; nothing changed
    UNKNOWN = 4  # never issued, or ended


class TicketTable(Generic[Reserved]):
    """All tickets that one incarnation of a receiver issued. Not thread-safe."""

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
        self._live: dict[AttemptKey, TicketEntry[Reserved]] = {}
        self._by_transfer: dict[int, TicketEntry[Reserved]] = {}
        # When each tombstone is dropped; the oldest first.
        self._tombstones: OrderedDict[AttemptKey, float] = OrderedDict()
        # Attempt numbers of each request, live or tombstoned.
        self._numbers: dict[bytes, set[int]] = {}

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def tombstones(self) -> int:
        self._purge()
        return len(self._tombstones)

    def find(self, key: AttemptKey) -> TicketEntry[Reserved] | None:
        """The live entry of this attempt."""
        return self._live.get(key)

    def find_transfer(self, transfer_id: int) -> TicketEntry[Reserved] | None:
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

    def check(self, key: AttemptKey) -> TicketEntry[Reserved] | None:
        """The live entry of an attempt, since reserving is idempotent; None where `reserve` may follow.

        Raises BatonError(CONFLICT) for an attempt that has ended, or is lower than one seen.
        """
        self._purge()
        if key in self._tombstones:
            raise BatonError(ErrorKind.CONFLICT, f"attempt {key.number} has ended already")
        highest = max(self._numbers.get(key.request_id, ()), default=0)
        if key.number < highest:
            raise BatonError(ErrorKind.CONFLICT, f"attempt {key.number} is superseded by attempt {highest}")
        return self._live.get(key)

    def superseded(self, key: AttemptKey) -> list[TicketEntry[Reserved]]:
        """Live entries of lower attempts of this request, for the caller to end."""
        numbers = sorted(self._numbers.get(key.request_id, ()))
        lower = (AttemptKey(key.request_id, number) for number in numbers if number < key.number)
        return [self._live[other] for other in lower if other in self._live]

    def reserve(
        self, key: AttemptKey, transfer_id: int, reservation: Reserved, ttl_s: float
    ) -> TicketEntry[Reserved]:
        """Adds an entry. Raises BatonError(CONFLICT) as `check` does, or where attempt or transfer id is
        live."""
        if self.check(key) is not None or transfer_id in self._by_transfer:
            raise BatonError(ErrorKind.CONFLICT, f"attempt {key.number} or its transfer id is live already")
        entry = TicketEntry(key, transfer_id, reservation, self._clock() + ttl_s)
        self._live[key] = entry
        self._by_transfer[transfer_id] = entry
        self._numbers.setdefault(key.request_id, set()).add(key.number)
        return entry

    def receiving(self, transfer_id: int) -> bool:
        """Records that the first byte arrived; False where that changes nothing."""
        entry = self._by_transfer.get(transfer_id)
        if entry is None or entry.state != TicketState.TICKET_STATE_RESERVED:
            return False
        entry.state = TicketState.TICKET_STATE_RECEIVING
        return True

    def commit(self, transfer_id: int) -> CommitOutcome:
        """Spends the ticket where possible; single use."""
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
        """Records that a committed entry's slot is active; False where that changes nothing."""
        entry = self._by_transfer.get(transfer_id)
        if entry is None or entry.state != TicketState.TICKET_STATE_COMMITTED:
            return False
        entry.state = TicketState.TICKET_STATE_ACTIVE
        return True

    def end(self, transfer_id: int) -> TicketEntry[Reserved] | None:
        """Ends and returns an entry in any state and leaves a tombstone; None where it is not live."""
        entry = self._by_transfer.pop(transfer_id, None)
        if entry is None:
            return None
        del self._live[entry.key]
        entry.state = TicketState.TICKET_STATE_ENDED
        self._bury(entry.key)
        return entry

    def cancel(self, key: AttemptKey) -> TicketEntry[Reserved] | None:
        """Ends an attempt's ticket like `end`. An attempt not seen yet gets a tombstone too, which a second
        cancel renews."""
        entry = self._live.get(key)
        if entry is not None:
            return self.end(entry.transfer_id)
        self._bury(key)
        return None

    def expired(self) -> list[TicketEntry[Reserved]]:
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
