"""The router's stored responses: reads those that clients refer to, and stores new ones in the background.

No request waits for a write. A response is written once it has ended; until then, and while the store is away
for a short time, it waits here, where this router's clients find it already.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Sized
from typing import TypeVar

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.state.stores.protocols import ResponseStore
from services.common.config.router import ResponseStorage
from services.common.observability.logs import get_log
from services.router.conversations.record import StoredResponse
from services.router.tenants.current import current_caller, current_tenant
from services.router.tenants.places import Places

# Responses that wait to be written, and their bytes; further ones are not stored.
MAX_PENDING = 1024
MAX_PENDING_BYTES = 64 * 1024 * 1024
# How long a write is tried.
WRITE_S = 10.0
_RETRY_S = 0.5
# Another router may still be writing a response that its client refers to at once.
SETTLE_S = 0.25
# Calls that read or delete at a time: the connection to Redis is the journal's too.
MAX_READS = 64

_ID = re.compile(r"resp_[0-9a-f]{32}")

T = TypeVar("T")

_log = get_log("responses")


class StoredResponses:
    """The stored responses of the caller's tenant; those of other tenants do not exist for it. Belongs to one
    event loop.

    Reading raises BatonError: NOT_FOUND, UNAVAILABLE while the store does not answer, OVERLOADED or
    RATE_LIMITED where too many calls read.
    """

    def __init__(
        self, store: ResponseStore, limits: ResponseStorage, most_bytes: int, settle_s: float = SETTLE_S
    ) -> None:
        """`most_bytes`: of a response with the conversation before it; larger ones are not stored."""
        self._most_bytes = most_bytes
        self._settle_s = settle_s
        self._store = store
        self._limits = limits
        self._ttl_s = limits.ttl_s or 0.0
        self._reads = Places(MAX_READS, "stored_response_reads", "calls read stored responses")
        self._pending: dict[tuple[str, str], StoredResponse] = {}
        self._writes: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.pending_bytes = 0
        # Since the start: writes by result, reads by result.
        self.written: Counter[str] = Counter(dict.fromkeys(("stored", "failed", "too_large", "dropped"), 0))
        self.reads: Counter[str] = Counter(dict.fromkeys(("found", "missing", "failed"), 0))
        self._failing = False

    @property
    def pending(self) -> int:
        """Number of responses that wait to be written."""
        return len(self._pending)

    def check(self, items: Sized) -> None:
        """Raises FieldError where the items of a conversation, as JSON, are too large to be stored."""
        if len(items) > self._most_bytes:
            raise FieldError(
                f"a stored conversation has at most {self._most_bytes} bytes, this one {len(items)}: send "
                "`store: false`",
                param="store",
                code="response_too_large",
            )

    def keep(self, response_id: str, response: StoredResponse) -> None:
        """Stores a response that has ended, of the present caller. Returns at once and never fails."""
        if len(response) > self._most_bytes:
            self._not_kept("too_large", f"it has {len(response)} bytes, of at most {self._most_bytes}")
        elif len(self._pending) >= MAX_PENDING or self.pending_bytes + len(response) > MAX_PENDING_BYTES:
            self._not_kept("dropped", "too many wait to be stored")
        else:
            key = (_tenant(), response_id)
            self._pending[key] = response
            self.pending_bytes += len(response)
            self._writes[key] = asyncio.create_task(self._write(key))

    async def get(self, response_id: str) -> StoredResponse:
        """The caller's response with this id."""
        key = (_tenant(), response_id)
        if _ID.fullmatch(response_id):
            found = self._pending.get(key) or await self._read(key)
            if found is not None:
                self.reads["found"] += 1
                return found
        self.reads["missing"] += 1
        raise BatonError(ErrorKind.NOT_FOUND, "there is no stored response with this id")

    async def conversation(self, response_id: str) -> bytes:
        """The items that a request begins with which continues this response."""
        try:
            return (await self.get(response_id)).conversation()
        except BatonError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
            raise FieldError(
                error.message,
                param="previous_response_id",
                code="previous_response_not_found",
                kind=ErrorKind.NOT_FOUND,
            ) from None

    async def delete(self, response_id: str) -> None:
        """Removes the caller's response with this id."""
        key = (_tenant(), response_id)
        if _ID.fullmatch(response_id):
            if (write := self._writes.get(key)) is not None:
                await asyncio.wait({write})
            with self._reads.hold(current_tenant()):
                if await self._answered(self._store.delete(*key)):
                    return
        raise BatonError(ErrorKind.NOT_FOUND, "there is no stored response with this id")

    async def close(self, timeout_s: float) -> None:
        """Gives pending writes `timeout_s` to end, and abandons the rest."""
        if self._writes:
            _, late = await asyncio.wait(set(self._writes.values()), timeout=timeout_s)
            for write in late:
                write.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _read(self, key: tuple[str, str]) -> StoredResponse | None:
        with self._reads.hold(current_tenant()):
            record = await self._answered(self._store.get(*key))
            if record is None:
                await asyncio.sleep(self._settle_s)
                record = await self._answered(self._store.get(*key))
        return None if record is None else StoredResponse.unpacked(record)

    async def _answered(self, call: Awaitable[T]) -> T:
        """The store's answer; an error that does not name the store."""
        try:
            return await call
        except BatonError as error:
            self.reads["failed"] += 1
            _log.debug("stored_response_not_read", reason=error.message)
            raise BatonError(ErrorKind.UNAVAILABLE, "stored responses cannot be read now") from None

    async def _write(self, key: tuple[str, str]) -> None:
        """Writes a pending response, again where that fails, until it is too late."""
        record = self._pending[key].packed()
        most = self._limits.max_mb_per_tenant * 1024 * 1024
        reason = f"Redis did not answer within {WRITE_S:g} s"
        try:
            async with asyncio.timeout(WRITE_S):
                while True:
                    try:
                        await self._store.put(*key, record, self._ttl_s, most)
                        break
                    except BatonError as error:
                        reason = error.message
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            self._not_kept("failed", reason)
        except asyncio.CancelledError:
            self._not_kept("failed", "the router stops")
        else:
            self.written["stored"] += 1
            self._failing = False
        finally:
            self.pending_bytes -= len(self._pending.pop(key))
            del self._writes[key]

    def _not_kept(self, result: str, reason: str) -> None:
        """Counts a response that is not stored, and logs the first one after others were."""
        self.written[result] += 1
        if not self._failing:
            self._failing = True
            _log.warning("response_not_stored", result=result, reason=reason)


def _tenant() -> str:
    """The name of the caller's tenant; empty where there are none."""
    caller = current_caller.get()
    return "" if caller is None else caller.tenant_name
