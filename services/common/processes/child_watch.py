"""Ends a child whose event loop hangs: it is asked once a second whether it runs, and answers from its
loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.base.process_watch import ProcessWatch
from services.common.processes.child_process import Child

ASK_S = 1.0
# Seconds without an answer after which a child is reported as silent,
SILENT_S = 3.0
# and those after which it is killed if it is stopped or computes, later if it is starved or sleeps
# (`ProcessWatch`): it
# takes its clients' connections with it, and a call that sleeps may return.
HUNG_S = 5.0
LOOK_S = 0.25


class ChildWatch:
    """Watches one child from its first answer on: what it does before is judged by the code that waits for
    it."""

    def __init__(
        self,
        child: Child,
        on_hung: Callable[[float], None],
        on_change: Callable[[bool], None] = lambda silent: None,
        silent_s: float = SILENT_S,
        hung_s: float = HUNG_S,
    ) -> None:
        """`on_hung` is called with the seconds of silence before the child is killed; `on_change` with False
        at the first answer and whenever answers come again, with True once the child is silent."""
        self._child = child
        self._on_hung = on_hung
        self._on_change = on_change
        self._silent_s, self._hung_s = silent_s, hung_s
        self._process = ProcessWatch(child.pid, sleep_counts=False)
        self._asked = self._answered = 0
        self._silent: bool | None = None

    async def run(self) -> None:
        """Watches until the child has ended, or has been killed here."""
        ask_at = 0.0
        while not self._child.has_ended:
            now = time.monotonic()
            if self._child.answers != self._answered:
                self._answered = self._child.answers
                self._process.progressed()
                self._report(silent=False)
            if now >= ask_at and self._asked == self._answered:
                self._child.ask()
                self._asked += 1
                ask_at = now + ASK_S
            if self._silent is not None and self._hangs():
                return
            await asyncio.sleep(LOOK_S)

    def _hangs(self) -> bool:
        self._process.look()
        if self._process.silent_s > self._silent_s:
            self._report(silent=True)
        if not self._process.hangs(self._hung_s):
            return False
        self._on_hung(round(self._process.silent_s, 1))
        self._child.kill()
        return True

    def _report(self, *, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            self._on_change(silent)
