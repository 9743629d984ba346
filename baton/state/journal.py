"""The journal of accepted requests that have not ended, written in the background.

No request waits for it: changes are buffered, at most one per request, and a writer sends them in batches.
While Redis is unavailable, changes of one request are merged, entries that have ended are never sent, and
beyond the bound new entries are dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from baton.base.errors import BatonError
from baton.base.structured_logs import structlog
from baton.state.client.counters import Counters
from baton.state.stores.protocols import JournalStore
from baton.state.stores.records import JournalRecord, JournalWrite
from baton.state.stores.seal import Seal

MAX_PENDING = 4096
_RETRY_S = 0.5
# Changes within this time are one batch; a request's first call to a worker is sent before it.
_BATCH_DELAY_S = 0.005
# Bounds of one batch: changes, and tokens (a single larger change is sent alone).
MAX_BATCH = 128
MAX_BATCH_TOKENS = 256 * 1024

_log = structlog.get_logger(part="state")


@dataclass
class Receipt:
    """The state of an entry: a stream is `resumable` once its entry is acknowledged."""

    acknowledged: bool = False
    dropped: bool = False


@dataclass
class _Pending:
    """The changes of one request that have not been written."""

    record: JournalRecord | None = None
    receipt: Receipt | None = None
    expires_at: float = 0.0
    attempt: int = 0
    closed: bool = False
    # Redis may have the entry, although it did not confirm it.
    sent: bool = False

    def merged(self, newer: _Pending) -> _Pending:
        """Combines this change with a newer one."""
        return _Pending(
            newer.record or self.record,
            newer.receipt or self.receipt,
            max(self.expires_at, newer.expires_at),
            max(self.attempt, newer.attempt),
            self.closed or newer.closed,
            self.sent or newer.sent,
        )


class Journal:
    """Buffers and writes changes; `append`, `mark_attempt` and `close` return at once and never fail."""

    def __init__(
        self,
        store: JournalStore,
        seal: Seal,
        counters: Counters,
        clock: Callable[[], float],
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._store = store
        self._seal = seal
        self._counters = counters
        self._clock = clock
        self._max_pending = max_pending
        self._pending: dict[bytes, _Pending] = {}
        # Changes that were dropped and not logged yet, by the reason.
        self._dropped: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def pending(self) -> int:
        """The number of requests with changes that have not been written."""
        return len(self._pending)

    def append(self, record: JournalRecord, ttl_s: float) -> Receipt:
        """Adds an accepted request; its entry expires with its deadline, `ttl_s` seconds from now."""
        receipt = Receipt()
        # The other half is reserved for marks and closes.
        if len(self._pending) >= self._max_pending // 2:
            self._drop("full", receipt)
        else:
            self._put(record.request_id, _Pending(record, receipt, self._clock() + ttl_s, record.attempt))
        return receipt

    def mark_attempt(self, request_id: bytes, attempt: int) -> None:
        """Records that the request was dispatched again, as attempt number `attempt`."""
        self._change(request_id, _Pending(attempt=attempt))

    def close(self, request_id: bytes) -> None:
        """Records that the request has ended."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.record is not None and not pending.sent:
            del self._pending[request_id]
        else:
            self._change(request_id, _Pending(closed=True))

    async def count_open(self) -> int:
        """The number of open requests in Redis."""
        return await self._store.count_open()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until all changes are written; returns False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Writes batches until cancelled; run by `State`."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_BATCH_DELAY_S)
            self._report_dropped()
            if not await self._write_batch():
                await asyncio.sleep(_RETRY_S)
            elif not self._pending:
                self._report_dropped()
                self._wake.clear()
                self._idle.set()

    def _change(self, request_id: bytes, change: _Pending) -> None:
        pending = self._pending.get(request_id)
        if pending is not None:
            self._pending[request_id] = pending.merged(change)
        elif len(self._pending) < self._max_pending:
            self._put(request_id, change)
        else:
            self._drop("full")

    def _put(self, request_id: bytes, change: _Pending) -> None:
        self._pending[request_id] = change
        self._idle.clear()
        self._wake.set()

    def _drop(self, why: str, receipt: Receipt | None = None) -> None:
        """Counts a change that will not be written; `_report_dropped` logs it."""
        self._counters.journal_dropped += 1
        self._dropped[why] += 1
        self._wake.set()
        if receipt is not None:
            receipt.dropped = True

    def _report_dropped(self) -> None:
        """Logs what was dropped since the last line: `full`: more waited than are kept; `expired`: the
        request's deadline had passed before Redis took it."""
        if self._dropped:
            _log.warning("journal_entries_dropped", **self._dropped)
            self._dropped.clear()

    def _take_batch(self) -> dict[bytes, _Pending]:
        """The next batch: first closes alone, since a Redis with full memory accepts nothing else."""
        closed = ((one, pending) for one, pending in self._pending.items() if pending.closed)
        batch = dict(islice(closed, MAX_BATCH))
        tokens = 0
        for request_id, pending in self._pending.items() if not batch else ():
            tokens += len(pending.record.token_ids) if pending.record is not None else 0
            if len(batch) == MAX_BATCH or (batch and tokens > MAX_BATCH_TOKENS):
                break
            batch[request_id] = pending
        for request_id in batch:
            del self._pending[request_id]
        return batch

    async def _write_batch(self) -> bool:
        batch = self._take_batch()
        if not batch:
            return True
        try:
            await self._store.write(self._writes(batch))
        except BatonError as error:
            self._counters.journal_batches_failed += 1
            _log.debug("journal_write_failed", changes=len(batch), reason=error.message)
            self._put_back(batch)
            return False
        for pending in batch.values():
            if pending.receipt is not None and not pending.receipt.dropped:
                pending.receipt.acknowledged = True
        return True

    def _put_back(self, batch: dict[bytes, _Pending]) -> None:
        newer, self._pending = self._pending, {}
        for request_id, pending in batch.items():
            later = newer.pop(request_id, None)
            if pending.receipt is not None and pending.receipt.dropped and not pending.sent:
                continue  # dropped before it was ever sent
            pending.sent = True
            self._pending[request_id] = pending if later is None else pending.merged(later)
        self._pending.update(newer)

    def _writes(self, batch: dict[bytes, _Pending]) -> list[JournalWrite]:
        writes = []
        now = self._clock()
        for request_id, pending in batch.items():
            record = pending.record
            if pending.closed:
                writes.append(JournalWrite(request_id, "close"))
            elif record is None:
                writes.append(JournalWrite(request_id, "attempt", pending.attempt))
            elif pending.expires_at <= now:
                self._drop("expired", pending.receipt)
            else:
                body = self._seal.seal(request_id, record.tenant, record.token_ids, record.details)
                ttl_s = pending.expires_at - now
                writes.append(JournalWrite(request_id, "append", pending.attempt, body, ttl_s))
        return writes
