"""`stores.ResponseStore` in memory, on any clock."""

from __future__ import annotations

from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind
from baton.state.stores.redis_responses import TOMBSTONE_S


class MemoryResponses:
    """Responses with the rules of the Redis script, in Python. `unavailable` makes every call fail."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: the present time in seconds."""
        self._clock = clock
        self.unavailable = False
        # (tenant, id) -> (record, end), oldest first.
        self._records: dict[tuple[str, str], tuple[bytes, float]] = {}

    async def put(self, tenant: str, response_id: str, record: bytes, ttl_s: float, most_bytes: int) -> None:
        records = self._live()
        if records.get((tenant, response_id), (None, 0.0))[0] == b"":
            return
        records.pop((tenant, response_id), None)
        records[tenant, response_id] = (record, self._clock() + ttl_s)
        own = sorted((one for one in records if one[0] == tenant), key=lambda one: records[one][1])
        total = sum(len(records[one][0]) for one in own)
        for one in own:
            if total <= most_bytes or one[1] == response_id:
                break
            total -= len(records.pop(one)[0])

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        record, _ = self._live().get((tenant, response_id), (None, 0.0))
        return record or None

    async def delete(self, tenant: str, response_id: str) -> bool:
        records = self._live()
        if not records.get((tenant, response_id), (b"", 0.0))[0]:
            return False
        records[tenant, response_id] = (b"", self._clock() + TOMBSTONE_S)
        return True

    def _live(self) -> dict[tuple[str, str], tuple[bytes, float]]:
        if self.unavailable:
            raise BatonError(ErrorKind.UNAVAILABLE, "the in-memory store is unavailable")
        now = self._clock()
        self._records = {one: (record, end) for one, (record, end) in self._records.items() if end > now}
        return self._records
