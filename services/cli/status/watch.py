"""`baton status --watch`: a cluster's rates, latencies, workers and slots, refreshed until q is pressed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator

from rich.live import Live

from baton.base.errors import BatonError
from baton.v1 import admin_pb2
from services.cli.common.console import console
from services.cli.status.source import CANNOT_SERVE, StatusSource
from services.cli.status.watch_view import WatchView, failure

_CALL_S = 3.0
_INTERVAL_S = 1.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        type=interval,
        metavar="SECONDS",
        help="with --watch: time between two frames, 0.1 to 60 (default 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="with --watch: print one frame, as without a terminal"
    )


def interval(text: str) -> float:
    """Parses the seconds between two frames."""
    value = float(text)
    if not 0.1 <= value <= 60:
        raise argparse.ArgumentTypeError("between 0.1 and 60 seconds")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 once the user quits; with one frame only, 1 if the cluster cannot serve. Raises BatonError
    where the router does not answer for that frame."""
    return asyncio.run(_Watch(arguments).run())


class _Watch:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._source = StatusSource(arguments.address, arguments.admin)
        self._request = admin_pb2.AdminServiceGetStatusRequest(window_s=arguments.window)
        self._interval: float = arguments.interval or _INTERVAL_S
        self._console = console()
        self._once: bool = arguments.once or not self._console.is_terminal
        self._view = WatchView()
        self._quit = asyncio.Event()

    async def run(self) -> int:
        async with self._source:
            if self._once:
                return await self._frame()
            with _keys(self._quit), Live(console=self._console, screen=True, auto_refresh=False) as live:
                while not self._quit.is_set():
                    await self._draw(live)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._interval):
                            await self._quit.wait()
        return 0

    async def _frame(self) -> int:
        answer = await self._source.get(self._request, _CALL_S)
        self._console.print(self._view.draw(answer, self._console.width))
        return 0 if answer.router.serving else CANNOT_SERVE

    async def _draw(self, live: Live) -> None:
        try:
            answer = await self._source.get(self._request, _CALL_S)
        except BatonError as error:
            live.update(failure(error.message), refresh=True)
        else:
            live.update(self._view.draw(answer, self._console.width), refresh=True)


@contextlib.contextmanager
def _keys(quit_: asyncio.Event) -> Iterator[None]:
    """Sets `quit_` on the key q and on a signal; restores the terminal afterwards."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, quit_.set)
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> None:
        if b"q" in os.read(descriptor, 64).lower():
            quit_.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
