"""A server that reads and discards what it is sent; `python -m tests.e2e.support.discard` prints its port.

It answers nothing and closes a connection 2 s after its last byte, so that a client's work against it is what
that client's sending costs a machine by itself.
"""

from __future__ import annotations

import asyncio
import contextlib

_IDLE_S = 2.0


async def _discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(_IDLE_S):
                if not await reader.read(1 << 18):
                    break
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_discard, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
