"""A child whose event loop hangs is killed, however it hangs; one that is slow, or knows no questions, is
not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from services.common.processes.child_process import Child
from services.common.processes.child_watch import ChildWatch

HUNG_S = 0.8
# How long one may sleep.
ASLEEP_S = 2.0

CHILD = """
import asyncio, os, sys, time
from services.common.processes.child_protocol import messages_from_parent, report_ready

async def main():
    async for message in messages_from_parent():
        match message:
            case {"ready": _}: report_ready({"grpc": "a:1"})
            case {"spin": s}:
                until = time.monotonic() + s
                while time.monotonic() < until: pass
            case {"sleep": s}: time.sleep(s)

sys.stdin.buffer.raw.readline()
asyncio.run(main())
"""

DEAF = "import sys; sys.stdin.read()"


class Watched:
    def __init__(self, child: Child) -> None:
        self.child = child
        self.hung: list[float] = []
        self.changes: list[bool] = []
        self.watch = ChildWatch(child, self.hung.append, self.changes.append, HUNG_S / 2, HUNG_S)


@contextlib.asynccontextmanager
async def watched(program: str) -> AsyncIterator[Watched]:
    child = await Child.start("child", [sys.executable, "-c", program], "{}", keep_stdin=True)
    one = Watched(child)
    watching = asyncio.create_task(one.watch.run())
    try:
        async with asyncio.timeout(30):
            yield one
    finally:
        watching.cancel()
        child.kill()
        await child.ended()


async def until_answers(one: Watched, count: int = 1) -> None:
    while one.child.answers < count:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks ten times as often."""
    from baton.base import process_watch
    from services.common.processes import child_watch

    monkeypatch.setattr(process_watch, "STARVED_S", ASLEEP_S)
    monkeypatch.setattr(child_watch, "ASK_S", 0.1)
    monkeypatch.setattr(child_watch, "LOOK_S", 0.025)


@pytest.mark.parametrize("how", ["stopped", "spins", "sleeps"])
async def test_a_child_that_hangs(how: str) -> None:
    async with watched(CHILD) as one:
        ready = asyncio.create_task(one.child.ready(10))
        await until_answers(one, 2)  # before it is ready
        one.child.send({"ready": 1})
        assert await ready == {"grpc": "a:1"}
        await until_answers(one, 4)
        if how == "stopped":
            os.kill(one.child.pid, signal.SIGSTOP)
        else:
            one.child.send({"spin" if how == "spins" else "sleep": 60})
        assert await one.child.ended() == -signal.SIGKILL
        assert one.changes == [False, True]
        (silent_s,) = one.hung
        assert silent_s >= (ASLEEP_S if how == "sleeps" else HUNG_S)


async def test_a_child_that_answers_again() -> None:
    async with watched(CHILD) as one:
        one.child.send({"ready": 1})
        await one.child.ready(10)
        await until_answers(one)
        os.kill(one.child.pid, signal.SIGSTOP)
        while one.changes != [False, True]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        os.kill(one.child.pid, signal.SIGCONT)
        await until_answers(one, one.child.answers + 3)
        assert one.changes == [False, True, False]
        assert one.hung == []


async def test_a_child_without_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child starts, or is another program: the caller that waits for it judges that."""
    asked: list[Child] = []
    monkeypatch.setattr(Child, "ask", lambda child: asked.append(child))
    async with watched(DEAF) as one:
        await asyncio.sleep(2 * HUNG_S)
        assert (one.hung, one.changes) == ([], [])
        assert asked == [one.child]


async def test_a_child_that_has_ended_is_watched_no_more() -> None:
    """An owner may pause before the next start, and the silence of a dead process is no hang."""
    async with watched(CHILD) as one:
        one.child.send({"ready": 1})
        await one.child.ready(10)
        await until_answers(one)
        one.child.kill()
        await one.child.ended()
        before = list(one.changes)
        await asyncio.sleep(HUNG_S + ASLEEP_S)
        assert (one.changes, one.hung) == (before, [])
