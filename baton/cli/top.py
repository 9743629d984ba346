"""`baton top`: a cluster's rates, latencies, workers and slots, drawn anew until q."""

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

import grpc.aio
from rich.console import Console
from rich.live import Live

from baton.cli import status
from baton.cli.messages import say
from baton.cli.top_view import TopView, failure
from baton.v1 import router_pb2, router_pb2_grpc

_CALL_S = 3.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    status.add_address(parser)
    parser.add_argument(
        "--interval", type=interval, default=1.0, metavar="SECONDS", help="between two frames (default 1)"
    )
    parser.add_argument("--once", action="store_true", help="one frame, as where there is no terminal")


def interval(text: str) -> float:
    """Seconds between two frames."""
    value = float(text)
    if not 0.1 <= value <= 60:
        raise argparse.ArgumentTypeError("between 0.1 and 60 seconds")
    return value


def run(arguments: argparse.Namespace) -> int:
    """0 once the user quits; with one frame only, 1 if there was no answer or the cluster cannot serve."""
    return asyncio.run(_Top(arguments).run())


class _Top:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._address: str = arguments.address.removeprefix("grpc://")
        self._request = router_pb2.GetStatusRequest(window_s=arguments.window)
        self._interval: float = arguments.interval
        self._console = status.console()
        self._once: bool = arguments.once or not self._console.is_terminal
        self._view = TopView()
        self._quit = asyncio.Event()

    async def run(self) -> int:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            if self._once:
                return await self._frame(stub)
            with _keys(self._quit), Live(console=self._console, screen=True, auto_refresh=False) as live:
                while not self._quit.is_set():
                    await self._draw(stub, live, self._console)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._interval):
                            await self._quit.wait()
        return 0

    async def _frame(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> int:
        try:
            answer = await stub.GetStatus(self._request, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            say(f"error: no status from {self._address}: {error.code().name} {error.details()}")
            return status.CANNOT_SERVE
        self._console.print(self._view.draw(answer, self._console.width))
        return 0 if answer.router.serving else status.CANNOT_SERVE

    async def _draw(self, stub: router_pb2_grpc.RouterServiceAsyncStub, live: Live, console: Console) -> None:
        try:
            answer = await stub.GetStatus(self._request, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            live.update(failure(self._address, f"{error.code().name} {error.details()}"), refresh=True)
        else:
            live.update(self._view.draw(answer, console.width), refresh=True)


@contextlib.contextmanager
def _keys(quit_: asyncio.Event) -> Iterator[None]:
    """Sets `quit_` at q and at a signal; the terminal is as before afterwards."""
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
