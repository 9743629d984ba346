"""Handles Ctrl-C: the first one ends the run and keeps its results, the second one ends the process."""

from __future__ import annotations

import asyncio
import signal
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context manager in which the first SIGINT or SIGTERM only sets `asked`; the next has its default
    effect."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _ask(self) -> None:
        self.asked = True
        self._leave()

    def _leave(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
