"""The protocol between a child process of `baton up` and its parent, on the child's side.

stdin    its configuration, one JSON document, read to the end
stdout   one line, `{"ready": {"grpc": "host:port", ...}}`, once a request would be served; or
         `{"error": {"kind": "invalid", "message": "..."}}`, with a "cause" where one is known, and exit code
         1 where something failed, 2 where the process refused to run, 3 from one that asks to be restarted,
         since it has drained by itself, 4 where another worker has its name
         then, to each line {"ask": n} on stdin, {"answer": n} from its event loop
stderr   logs; and the error's message in one line where it was started --detached
SIGTERM, SIGINT   the first drains and exits 0, the second exits at once
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

from baton.base.errors import BatonError, ErrorKind
from baton.base.parent_death import die_with_parent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_RESTART = 3
EXIT_NAME_TAKEN = 4
EXIT_AT_ONCE = 130

_FAILURES = (ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.DEADLINE)

# The argument of a process that outlives its parent: `baton worker` as an operator starts it.
DETACHED = "--detached"

_LINE_BYTES = 1024 * 1024

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def detached() -> bool:
    """True if no parent watches this process."""
    return DETACHED in sys.argv


class RestartNeededError(BatonError):
    """This process has drained since it is no longer fit to serve, and should be restarted."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, why)


class StopSignal:
    """The parent's request to end this process: `await stop.wait()`, then drain."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()

    async def wait(self) -> None:
        """Returns at the first SIGTERM or SIGINT."""
        await self._requested.wait()

    def request(self) -> None:
        """Requests the end: the first call starts the drain, the second exits the process at once."""
        if self._requested.is_set():
            os._exit(EXIT_AT_ONCE)
        self._requested.set()

    def install(self) -> None:
        """Handles SIGTERM and SIGINT of this process; to be called within a running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)


def parse_config(model: type[ConfigT], text: str) -> ConfigT:
    """The configuration in a JSON text. Raises BatonError(INVALID), which names the first invalid key."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise BatonError(ErrorKind.INVALID, f"{where}: {first['msg']}") from error


def report_ready(addresses: Mapping[str, str]) -> None:
    """Reports to the parent where this process serves; the first line on stdout unless that is an error."""
    report({"ready": dict(addresses)})


def report_error(error: BatonError) -> None:
    """Reports to the parent why this process does not run, in one line."""
    fields = {"kind": error.kind.name.lower(), "message": " ".join(error.message.split())}
    if error.cause is not None:
        fields["cause"] = error.cause.name.lower()
    report({"error": fields})


def run_child(
    config_model: type[ConfigT],
    main: Callable[[ConfigT, StopSignal], Coroutine[None, None, None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Reads the configuration, runs `main` until it returns, and returns the exit code.

    A BatonError from `main` is reported to the parent and becomes the exit code 1 to 4 (`exit_code`).
    """
    try:
        if not detached():
            die_with_parent()
        config = parse_config(config_model, _first_line())

        async def serve() -> None:
            stop = StopSignal()
            stop.install()
            await main(config, stop)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(serve())
    except BatonError as error:
        report_error(error)
        if detached():
            print(f"baton: error: {' '.join(error.message.split())}", file=sys.stderr, flush=True)
        return exit_code(error)
    return 0


def exit_code(error: BatonError) -> int:
    """The exit code of a process that ends with this error."""
    if isinstance(error, RestartNeededError):
        return EXIT_RESTART
    if error.kind is ErrorKind.CONFLICT:
        return EXIT_NAME_TAKEN
    return EXIT_FAILED if error.kind in _FAILURES else EXIT_REFUSED


def _first_line() -> str:
    """The configuration. Read unbuffered, so that later lines on stdin are left for
    `messages_from_parent`."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline().decode()


async def messages_from_parent() -> AsyncIterator[dict[str, Any]]:
    """The JSON objects that the parent writes to stdin after the configuration, one a line, until it closes
    stdin; none where stdin is not a pipe. Questions whether it runs are answered here. Raises
    BatonError(INTERNAL) for a line that is not JSON."""
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        return
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            message = json.loads(line)
            if "ask" in message:
                report({"answer": message["ask"]})
            else:
                yield message
    except ValueError as error:
        raise BatonError(ErrorKind.INTERNAL, f"the parent wrote a line that is not JSON: {error}") from error
    finally:
        transport.close()


def report(document: Mapping[str, Any]) -> None:
    """Writes one JSON line to the parent."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
