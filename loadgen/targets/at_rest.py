"""After a run: has the server let go of everything? A slot that a cancelled request still holds is lost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.v1.router_pb2 import GetStatusRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from loadgen.targets.grpc_target import OPTIONS, address_of

if TYPE_CHECKING:
    from baton.v1.router_pb2 import GetStatusResponse
    from baton.v1.worker_pb2 import Audit

# The door promises 1 s; a busy machine gets more.
PATIENCE_S = 5.0
_ANSWER_S = 2.0


async def leaks(url: str) -> list[str] | None:
    """What is still held when nothing runs any more, in words; None where the target cannot say."""
    if not url.startswith("grpc://"):
        return None
    until = time.monotonic() + PATIENCE_S
    async with grpc.aio.insecure_channel(address_of(url), options=OPTIONS) as channel:
        router = RouterServiceStub(channel)
        while True:
            try:
                status = await router.GetStatus(GetStatusRequest(check_integrity=True), timeout=_ANSWER_S)
            except grpc.aio.AioRpcError:
                return None
            held = held_by(status)
            if not held or time.monotonic() > until:
                return held
            await asyncio.sleep(0.25)


def held_by(status: GetStatusResponse) -> list[str]:
    """Everything that a server at rest does not hold."""
    held = [f"router: {status.router.running} requests run"] if status.router.running else []
    for one in status.workers:
        name = one.worker.identity.name or one.worker.address
        held += [f"{name}: {what}" for what in _held(one.worker.audit)]
    return held


def _held(audit: Audit) -> list[str]:
    counts = {
        "slots in use": audit.load.slots - audit.load.free_slots,
        "live tickets": audit.live_tickets,
        "pinned blocks": audit.pinned_blocks,
    }
    held = [f"{count} {what}" for what, count in counts.items() if count]
    return [*held, audit.integrity_error] if audit.integrity_error else held
