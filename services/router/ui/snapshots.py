"""The status that the web page polls: the answer of `baton status --json`, shared by all who poll."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from google.protobuf import json_format

from baton.v1.admin_pb2 import AdminServiceGetStatusRequest, AdminServiceGetStatusResponse
from services.router.api.openapi import installed_version
from services.router.observability.status import Status

# Least time between two polls of the workers, in seconds, however many pages poll.
FRESH_S = 0.5
# More workers are counted but not shown, so that an answer stays below 1 MiB.
MOST_WORKERS = 256


class Snapshots:
    """The latest status as JSON."""

    def __init__(self, status: Status, *, chats: bool) -> None:
        """`chats`: whether the model has a chat template."""
        self._status = status
        self._chats = chats
        self._lock = asyncio.Lock()
        self._taken = float("-inf")
        self._body = b""

    async def latest(self) -> bytes:
        """A JSON object, at most `FRESH_S` older than the call: `version`, `chats`, `context_tokens`,
        `known_workers` and, as AdminServiceGetStatusResponse, `status`."""
        async with self._lock:
            if time.monotonic() - self._taken >= FRESH_S:
                self._body = json.dumps(await self._document()).encode()
                self._taken = time.monotonic()
        return self._body

    async def _document(self) -> dict[str, Any]:
        status = await self._status.full(AdminServiceGetStatusRequest())
        return {
            "version": installed_version(),
            "chats": self._chats,
            "context_tokens": self._status.model.max_context_tokens,
            "known_workers": len(status.workers),
            "status": _bounded(status),
        }


def _bounded(status: AdminServiceGetStatusResponse) -> dict[str, Any]:
    """Without what grows with the number of slots or of pairs of workers."""
    del status.workers[MOST_WORKERS:]
    for worker in status.workers:
        worker.worker.report.ClearField("links")
        worker.worker.report.ClearField("slot_states")
    return json_format.MessageToDict(status, always_print_fields_with_no_presence=True)
