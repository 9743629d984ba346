"""What a child process of `baton up` owes its parent.

stdin    its configuration, one JSON document, read to the end
stdout   one line, `{"ready": {"grpc": "host:port", ...}}`, once a request would be served; or
         `{"error": {"kind": "invalid", "message": "one clear line"}}` and exit code 2
stderr   everything else
SIGTERM, SIGINT   the first drains and exits 0, the second stops at once
the parent's death   kills it (PR_SET_PDEATHSIG), unless it was started --detached
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from baton.errors import BatonError, ErrorKind
from baton.parent_death import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

EXIT_REFUSED = 2
EXIT_AT_ONCE = 130

# The argument of a process that outlives whoever started it: an operator's own `baton worker`.
DETACHED = "--detached"

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class StopSignal:
    """The parent's wish that this process ends: `await stop.wait()`, then drain."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        """Whether the process was told to stop."""
        return self._asked.is_set()

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
    """Tells the parent where this process serves. Nothing else is ever written to stdout."""
    _say({"ready": dict(addresses)})


def say_error(error: BatonError) -> None:
    """Tells the parent why this process refuses to run, in one line."""
    message = " ".join(error.message.split())
    _say({"error": {"kind": error.kind.name.lower(), "message": message}})


def run_child(
    config_model: type[ConfigT],
    main: Callable[[ConfigT, StopSignal], Coroutine[None, None, None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Reads the configuration, runs `main` until it returns, and gives the exit code.

    A BatonError that `main` raises before it is ready becomes the error line and code 2.
    """
    try:
        if DETACHED not in sys.argv:
            die_with_parent()
        config = parse_config(config_model, sys.stdin.read())
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_with_signals(main, config))
    except BatonError as error:
        say_error(error)
        return EXIT_REFUSED
    return 0


async def _with_signals(
    main: Callable[[ConfigT, StopSignal], Coroutine[None, None, None]], config: ConfigT
) -> None:
    stop = StopSignal()
    stop.install()
    await main(config, stop)


def _say(document: dict[str, dict[str, str]]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
