"""A child that has ended leaves its parent nothing, whatever loop the parent runs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import pytest
import uvloop

from services.common.processes import child_process
from services.common.processes.child_process import Child

READY = (sys.executable, "-c", """print('{"ready": {}}', flush=True); input()""")


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("killed", [False, True])
def test_no_descriptor_is_leaked(
    loop: Callable[[], asyncio.AbstractEventLoop], killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "LAST_OUTPUT_S", 0.05)

    async def live_and_end() -> int:
        """Runs a child to its end and returns the number of descriptors that are left."""
        child = await Child.start("child", READY, "")
        await child.ready(20)
        if killed:
            child.kill()
        await child.ended()
        await asyncio.sleep(0.2)
        return len(os.listdir("/proc/self/fd"))

    async def run() -> None:
        left = [await live_and_end() for _ in range(4)]  # the loop itself opens some for the first
        assert left == [left[0]] * 4

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_a_wait_cancelled_as_the_child_becomes_ready_is_cancelled() -> None:
    """`asyncio.wait_for` of Python 3.11 would lose the cancellation, and a start that a signal ended would
    wait for ever for what comes next."""
    child = await Child.start("child", (sys.executable, "-c", "input(); input()"), "", keep_stdin=True)
    waiting = asyncio.create_task(child.ready(20))
    await asyncio.sleep(0.05)
    child._stdout.feed_data(b'{"ready": {}}\n')
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    child.kill()
    await child.ended()
