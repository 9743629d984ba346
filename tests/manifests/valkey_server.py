"""Stands in for `valkey-server` of the bundled Valkey's image: the embedded server with the same
configuration file. That build has no TLS, so this process speaks it, by the file's own `tls-…` lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from pathlib import Path

from baton.state.embedded import server_binary

_SOCKET = "/tmp/valkey.sock"
_OWN_ENDS = ("tls-", "bind ", "port ")


def main() -> None:
    config = Path(sys.argv[1])
    lines = config.read_text().splitlines()
    settings = dict(line.split(maxsplit=1) for line in lines)
    if "tls-port" not in settings:
        os.execv(server_binary(), ["valkey-server", str(config)])
    assert settings["tls-auth-clients"] == "yes"
    kept = "\n".join(line for line in lines if not line.startswith(_OWN_ENDS))
    raise SystemExit(asyncio.run(serve(kept + "\n", settings)))


async def serve(config: str, settings: dict[str, str]) -> int:
    """Runs the server on a socket of the pod, and TLS before it; ends when it does."""
    server = await asyncio.create_subprocess_exec(
        server_binary(), "-", "--port", "0", "--unixsocket", _SOCKET, stdin=asyncio.subprocess.PIPE
    )
    asyncio.get_running_loop().add_signal_handler(15, server.terminate)
    assert server.stdin is not None
    server.stdin.write(config.encode())
    server.stdin.close()
    while not os.path.exists(_SOCKET):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings["tls-ca-cert-file"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(settings["tls-cert-file"], settings["tls-key-file"])
    await asyncio.start_server(_forward, None, int(settings["tls-port"]), ssl=context)
    return await server.wait()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    to_reader, to_writer = await asyncio.open_unix_connection(_SOCKET)
    copied = [asyncio.ensure_future(_copy(*ends)) for ends in ((reader, to_writer), (to_reader, writer))]
    await asyncio.wait(copied, return_when=asyncio.FIRST_COMPLETED)
    for task in copied:
        task.cancel()
    to_writer.close()
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


if __name__ == "__main__":
    main()
