"""A process of clients: `python -m bench.router.clients`. It answers lines of JSON (`JsonLinesProcess`):

{"start": {"api": "grpc", "address": "host:port", "streams": 128, "connections": 4,
           "output_len": 400, "pause_s": 0.5}}     begins; with SSE each stream has its own connection
{"reset": true}                                     counts from now on
{"read": true}                                      the counts
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

from baton.base.addresses import split_address
from baton.base.process_tuning import batch_wakeups
from bench.router.closed_loop import Load
from bench.router.counts import Counts
from bench.router.grpc_stream import GrpcConnection
from bench.router.sse_stream import SseStream

# Connections opened at once: fewer than a listener's backlog.
_AT_ONCE = 64


async def start(asked: dict[str, Any], counts: Counts) -> None:
    """Opens the connections; each begins once it is open."""
    host, port = split_address(asked["address"])
    load = Load(asked["output_len"], asked["pause_s"])
    loop = asyncio.get_running_loop()
    streams, connections = asked["streams"], asked["connections"]
    if asked["api"] == "sse":
        protocols: list[Any] = [lambda: SseStream(load, counts)] * streams
    else:
        shares = [streams // connections + (index < streams % connections) for index in range(connections)]
        protocols = [lambda share=share: GrpcConnection(load, counts, share) for share in shares if share]
    for first in range(0, len(protocols), _AT_ONCE):
        batch = protocols[first : first + _AT_ONCE]
        await asyncio.gather(*(loop.create_connection(one, host, port) for one in batch))


async def serve() -> None:
    """Answers requests until stdin ends."""
    counts = Counts()
    print(json.dumps({"ready": True}), flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        if "start" in request:
            await start(request["start"], counts)
        answer = dataclasses.asdict(counts) if "read" in request else {}
        if "reset" in request:
            for field in dataclasses.fields(Counts):
                setattr(counts, field.name, getattr(Counts(), field.name))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    import uvloop

    batch_wakeups()
    uvloop.run(serve())
