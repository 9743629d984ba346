"""Messages that a router receives from a worker that decodes nothing for it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from baton.v1.decode_pb2 import SubscribeRequest, SubscribeResponse
from tests.decode.test_ring_reading import Worker, running, worker

__all__ = ["worker"]

_HEARTBEAT_S = 0.1


class Stream:
    """The context of a Subscribe call: keeps what is written."""

    def __init__(self) -> None:
        self.messages: list[SubscribeResponse] = []

    async def write(self, message: SubscribeResponse) -> None:
        self.messages.append(message)


def _subscribe(worker: Worker, router_id: bytes) -> tuple[Stream, asyncio.Task[None]]:
    stream = Stream()
    request = SubscribeRequest(router_id=router_id, incarnation=b"i" * 16)
    call = worker.servicer.Subscribe(request, cast(Any, stream))
    return stream, asyncio.ensure_future(call)


async def test_tokens_of_another_router_defer_no_heartbeat(worker: Worker) -> None:
    """A router that waits in vain for `LIVENESS_TIMEOUT_S` takes the worker for lost."""
    worker.servicer.heartbeat_s = _HEARTBEAT_S
    async with running(worker):
        busy, idle = _subscribe(worker, b"r" * 16), _subscribe(worker, b"s" * 16)
        for token in range(40):  # a step every 20 ms, a fifth of the heartbeat
            worker.step(token)
            worker.stepped.set()
            await asyncio.sleep(0.02)
        for _, task in (busy, idle):
            task.cancel()
    assert sum(len(output.token_ids) for message in busy[0].messages for output in message.outputs) >= 39
    heartbeats = idle[0].messages[1:]  # the first one reports that the stream is open
    assert len(heartbeats) >= 4
    assert not any(message.outputs for message in heartbeats)
