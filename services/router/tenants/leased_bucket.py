"""A limit per minute of which several routers have a part each, leased from Redis."""

from __future__ import annotations

from collections.abc import Callable

from baton.state.stores.records import BucketAsk

# Seconds between two rebalances of the leases.
REBALANCE_S = 0.5
_MINUTE_S = 60.0
# Amounts in Redis are rounded.
_TOLERANCE = 1e-3
# A bucket counts as full from this share on: what refills it arrives with the next rebalance.
_FULL = 0.99


class LeasedBucket:
    """Replaces a `TokenBucket` where routers share a limit: calls are judged by what this router holds,
    without a question to the store.

    Its amount is a lease that is rebalanced in the background. Before the first rebalance, and while Redis is
    away, it refills by itself at this router's part of the rate; what it uses of that is reported with the
    next rebalance. A call for more than a router usually holds is admitted once it holds its usual part, and
    the rest is a debt: all routers wait until it is refilled.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float], routers: int, used: float = 0.0) -> None:
        """`clock`: monotonic seconds. `routers`: how many there are, as far as is known. `used`: what was
        used lately, of a limit that was not leased before."""
        self._capacity = float(per_minute)
        self._clock = clock
        self._routers = max(1, routers)
        # What may be used, and the part of it that is not leased.
        self._unleased = self._capacity / self._routers
        self._balance = self._unleased - used
        self._asked_unleased = 0.0
        self._away = True
        self._filled_at = clock()
        self._wanted = 0.0

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` may be taken, as far as can be foreseen; 0: now."""
        usual = self._capacity if self._routers == 1 else self._capacity / (2 * self._routers)
        lacking = min(amount, _FULL * usual) - self._filled()
        if lacking <= _TOLERANCE:
            return 0.0
        self._wanted = max(self._wanted, min(amount, self._capacity))
        return lacking * _MINUTE_S / self._capacity + REBALANCE_S

    def take(self, amount: float) -> None:
        """Takes `amount`. Precondition: `wait_s(amount)` is 0."""
        self._balance = self._filled() - amount

    def give_back(self, amount: float) -> None:
        """Returns what was taken and not used."""
        self._balance = min(self._capacity, self._balance + amount)

    def resize(self, per_minute: int) -> None:
        """Changes the rate; what was used so far stays used."""
        if self._away:
            more = (per_minute - self._capacity) / self._routers
            self._unleased += more
            self._balance += more
        self._capacity = float(per_minute)

    def ask(self) -> BucketAsk:
        """Returns the request to the store for a share of the limit; `rebalanced` or `store_away` follows."""
        self._asked_unleased = self._unleased
        return BucketAsk(int(self._capacity), self._balance - self._unleased, self._wanted)

    def rebalanced(self, change: float, routers: int) -> None:
        """Applies the store's answer to `ask`."""
        self._filled()
        self._balance += change - self._asked_unleased
        self._unleased -= self._asked_unleased
        self._asked_unleased = self._wanted = 0.0
        self._routers = max(1, routers)
        self._away = False

    def store_away(self) -> None:
        """Records that the store does not answer: from now on the bucket fills by itself."""
        if not self._away:
            self._away = True
            self._filled_at = self._clock()

    def _filled(self) -> float:
        """Refills the bucket; returns what may be used now."""
        now = self._clock()
        if self._away:
            part = self._capacity / self._routers
            gained = min((now - self._filled_at) * part / _MINUTE_S, max(0.0, part - self._balance))
            self._balance += gained
            # Meanwhile Redis refills as well, up to the limit: what was used beyond that is no debt.
            self._unleased = min(part, self._unleased + gained)
        self._filled_at = now
        return self._balance
