"""Children that die with their parent, and that gRPC in the parent cannot harm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from baton.base.parent_death import tied

LIMIT_S = 10.0
# A parent that starts a sleeper, prints its pid, and waits.
PARENT = """
import subprocess, sys, time
from baton.base.parent_death import tied
print(subprocess.Popen(tied(["sleep", "60"])).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with process:
        yield process
        process.kill()


def test_it_dies_with_its_parent(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([child], [], [], LIMIT_S)
        assert ended
    finally:
        os.close(child)


def test_one_whose_parent_is_gone_already_never_starts() -> None:
    command = tied(["echo", "started"])
    command[4] = str(os.getppid())  # not who starts it
    ended = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (126, b"")


def test_its_exit_code_output_and_arguments_are_its_own() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "-I"]
    ended = subprocess.run(tied(command), capture_output=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (7, b"['a b', '-I']\n")


async def test_a_parent_busy_with_grpc_starts_them_unharmed() -> None:
    """Forked with `preexec_fn`, three in ten died of a signal before they were the new program."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("test", i)]) for i in range(8)]

    async def call_again_and_again(channel: grpc.aio.Channel) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.unary_unary("/no/method", bytes, bytes)(b"", timeout=1)

    calls = [asyncio.create_task(call_again_and_again(channel)) for channel in channels]
    try:
        for _ in range(20):
            process = await asyncio.create_subprocess_exec(*tied(["true"]), start_new_session=True)
            assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
    finally:
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for channel in channels:
            await channel.close(None)
        await server.stop(None)
