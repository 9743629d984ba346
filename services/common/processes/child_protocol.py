"""What a child process of `baton up` owes its parent.

stdin    its configuration, one JSON document, read to the end
stdout   one line, `{"ready": {"grpc": "host:port", ...}}`, once a request would be served; or
         `{"error": {"kind": "invalid", "message": "one clear line"}}` and exit code 2, or 3 from one that has
         drained by itself and asks to be started anew
stderr   everything else
SIGTERM, SIGINT   the first drains and exits 0, the second stops at once
the parent's death   kills it (PR_SET_PDEATHSIG), unless it was started --detached
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from baton.errors import BatonError, ErrorKind
from baton.parent_death import die_with_parent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

EXIT_REFUSED = 2
EXIT_ANEW = 3
EXIT_AT_ONCE = 130

# The argument of a process that outlives whoever started it: an operator's own `baton worker`.
DETACHED = "--detached"

_LINE_BYTES = 1024 * 1024

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class StartAnewError(BatonError):
    """This process is not whole any more. It has drained, and another one should take its place."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, why)


class StopSignal:
    """The parent's wish that this process ends: `await stop.wait()`, then drain."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    async def wait(self) -> None:
        """Returns at the first SIGTERM or SIGINT."""
        await self._asked.wait()

    def ask(self) -> None:
        """The first call starts the drain; the second ends the process where it stands."""
        if self._asked.is_set():
            os._exit(EXIT_AT_ONCE)
        self._asked.set()

    def install(self) -> None:
        """Takes SIGTERM and SIGINT of this process; call from a running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)


def parse_config(model: type[ConfigT], text: str) -> ConfigT:
    """The configuration in `text`; BatonError(INVALID) naming the first wrong key."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise BatonError(ErrorKind.INVALID, f"{where}: {first['msg']}") from error


def say_ready(addresses: Mapping[str, str]) -> None:
    """Tells the parent where this process serves; always the first line, where it is not an error."""
    say({"ready": dict(addresses)})


def say_error(error: BatonError) -> None:
    """Tells the parent why this process refuses to run, in one line."""
    message = " ".join(error.message.split())
    say({"error": {"kind": error.kind.name.lower(), "message": message}})


def run_child(
    config_model: type[ConfigT],
    main: Callable[[ConfigT, StopSignal], Coroutine[None, None, None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Reads the configuration, runs `main` until it returns, and gives the exit code.

    A BatonError that `main` raises becomes the error line and code 2, a `StartAnewError` that and code 3.
    """
    try:
        if DETACHED not in sys.argv:
            die_with_parent()
        config = parse_config(config_model, _first_line())
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_with_signals(main, config))
    except BatonError as error:
        say_error(error)
        return EXIT_ANEW if isinstance(error, StartAnewError) else EXIT_REFUSED
    return 0


def _first_line() -> str:
    """The configuration. Unbuffered, so that what follows on stdin is left for whoever reads on."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline().decode()


async def messages_from_parent() -> AsyncIterator[dict[str, Any]]:
    """The JSON objects that the parent writes to stdin after the configuration, one a line, until it
    closes it; none where stdin is no pipe. BatonError(INTERNAL) for anything else."""
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        return
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            yield json.loads(line)
    except ValueError as error:
        raise BatonError(ErrorKind.INTERNAL, f"the parent wrote what is no JSON line: {error}") from error
    finally:
        transport.close()


async def _with_signals(
    main: Callable[[ConfigT, StopSignal], Coroutine[None, None, None]], config: ConfigT
) -> None:
    stop = StopSignal()
    stop.install()
    await main(config, stop)


def say(document: Mapping[str, Any]) -> None:
    """Tells the parent one JSON line."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
