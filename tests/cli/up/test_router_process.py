"""`baton up` replaces a router that hangs as it does one that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import pytest

from services.cli.up.router_process import RouterProcess
from services.common.config.router import RouterConfig
from services.common.processes.child_process import Child

ROUTER = """
import asyncio, sys
from services.common.processes.child_protocol import messages_from_parent, report_ready

async def main():
    report_ready({"http": "127.0.0.1:0"})
    async for message in messages_from_parent():
        pass

sys.stdin.buffer.raw.readline()
asyncio.run(main())
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The processes that were started."""
    children: list[Child] = []
    start = Child.start

    async def noted(*arguments: Any, **settings: Any) -> Child:
        children.append(await start(*arguments, **settings))
        return children[-1]

    monkeypatch.setattr(Child, "start", noted)
    return children


async def test_a_router_that_hangs_is_replaced(
    capsys: pytest.CaptureFixture[str], started: list[Child]
) -> None:
    config = RouterConfig(model="m", served_model_name="m", http_port=0, grpc_port=0)
    router = RouterProcess([sys.executable, "-c", ROUTER], config, restarts=3)
    await router.spawn()
    try:
        await router.ready(20)
        (first,) = started
        while not first.answers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        os.kill(first.pid, signal.SIGSTOP)
        said = ""
        async with asyncio.timeout(30):
            while "the router is ready again" not in said:
                await asyncio.sleep(0.1)
                said += "".join(capsys.readouterr())
        assert "the router does not answer for 5" in said
        assert "was killed by SIGKILL; restarting the router" in said
        assert len(started) == 2
    finally:
        await router.stop(asyncio.get_running_loop().time())
