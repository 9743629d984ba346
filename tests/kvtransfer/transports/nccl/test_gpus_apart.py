"""A link between two processes that see one GPU each, as two `baton worker` with CUDA_VISIBLE_DEVICES do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_WORD_S = 90.0


@contextmanager
def peer(gpu: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `staged_peer` that sees this GPU alone."""
    command = [sys.executable, "-m", "tests.kvtransfer.support.staged_peer", *arguments]
    process = subprocess.Popen(
        ["timeout", str(_WORD_S), *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("ipc-fake", marks=pytest.mark.slow),
        pytest.param("ipc-cuda", marks=pytest.mark.multigpu),
    ],
)
def test_neither_sees_the_others_gpu(transport: str) -> None:
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    here, there = visible[0], visible[-1]
    with ExitStack() as stack:
        receiver = stack.enter_context(peer(there, "receive", "1", "7", "1", transport))
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        assert address.startswith("ipc:")  # there is no other way
        sender = stack.enter_context(peer(here, "send", "a", "1", address, "7", "committed", transport))
        assert sender.stdout is not None
        assert [sender.stdout.readline().strip() for _ in range(2)] == ["ready", "committed"]
