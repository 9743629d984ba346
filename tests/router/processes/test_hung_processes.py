"""A router process that hangs is noticed, named, killed and replaced; the admin ports are another one's
meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.router.processes.test_group import START_S, routers, status_of
from tests.router.test_process import config, fake_pair, ready
from tests.router.test_process import start as start_router

pytestmark = pytest.mark.slow


async def _answer(address: str, path: str) -> tuple[int, str]:
    try:
        async with httpx.AsyncClient(timeout=2, verify=False) as client:
            answer = await client.get(f"http://{address}{path}")
    except httpx.HTTPError as error:
        return 0, type(error).__name__
    return answer.status_code, answer.text


@pytest.mark.parametrize("frozen", [0, 1])
async def test_a_process_that_is_stopped(model_folder: Path, frozen: int) -> None:
    async with fake_pair(model_folder) as worker:
        process = await start_router(config(model_folder, [worker.address], processes=2))
        addresses = await ready(process, START_S)
        public, admin = addresses["http"], addresses["admin_http"]
        pids = routers(process.pid)
        began = time.monotonic()
        os.kill(pids[frozen], signal.SIGSTOP)
        named: list[str] = []
        while time.monotonic() - began < 8:
            status, text = await _answer(public, "/ready")
            if status == 503:
                named.append(json.loads(text)["reason"])
            await asyncio.sleep(0.1)
        assert f"router process {frozen} does not answer" in named
        # From now on every connection is answered, those of the admin port too.
        for _ in range(24):
            assert (await _answer(public, "/health"))[0] == 200
        assert (await _answer(admin, "/health"))[0] == 200
        async with asyncio.timeout(START_S):
            while await status_of(admin, "/ready") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert pids[frozen] not in routers(process.pid)
        # Both serve again, without a third one.
        assert len(routers(process.pid)) == 2
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(process.communicate(), START_S)
        assert b"router_process_hung" in err
        assert err.count(b"router_process_replaced") == 1
        assert err.count(b"admin_ports_moved") == (frozen == 0)


async def test_a_process_that_ends_is_replaced_in_time(model_folder: Path) -> None:
    """The replacement takes 3 s on an idle machine; what is asserted leaves room for a loaded one."""
    async with fake_pair(model_folder) as worker:
        process = await start_router(config(model_folder, [worker.address], processes=2))
        addresses = await ready(process, START_S)
        for which in (0, 1, 0):
            killed = routers(process.pid)[which]
            os.kill(killed, signal.SIGKILL)
            began = time.monotonic()
            async with asyncio.timeout(START_S):
                while (await _answer(addresses["admin_http"], "/health"))[0] != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                moved_s = time.monotonic() - began
                while killed in (pids := routers(process.pid)) or len(pids) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                while await status_of(addresses["admin_http"], "/ready") != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            print(f"admin ports after {moved_s:.2f} s, all processes after {time.monotonic() - began:.2f} s")
            assert moved_s < 5
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), START_S)
