"""Starts `baton up` with random weights of a known shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from bench.cluster.cluster_secret import CLUSTER_SECRET
from bench.shapes import SHAPES, with_positions

# Time to load and compile; then to drain and kill.
_START_S = 300.0
_STOP_S = 40.0
_READY = "READY "


def write_model(folder: Path, shape: str, tokens: int) -> Path:
    """Writes a folder for `--weights random`: a configuration for sequences of up to `tokens`."""
    config = with_positions(SHAPES[shape], tokens).config
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def first_gpu() -> dict[str, str]:
    """An environment in which a cluster sees one GPU, the first of this process, which its workers share."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


@contextlib.asynccontextmanager
async def baton_up(
    model: Path, name: str, flags: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[dict[str, str]]:
    """Runs a cluster on free ports without Ray and Redis; yields the addresses of READY by name.

    `environment` goes over this process's own; its stderr is this process's. Raises RuntimeError where it
    ends before it is ready, TimeoutError.
    """
    command = [
        sys.executable, "-m", "services.cli.main", "up", "--model", str(model), "--weights", "random",
        "--served-model-name", name, "--http-port", "0", "--grpc-port", "0",
        "--ray-address", "none", "--redis-url", "none", *flags,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "BATON_CLUSTER_SECRET": CLUSTER_SECRET,
            **environment,
            "PYTHONUNBUFFERED": "1",
        },
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            line = (await process.stdout.readline()).decode()
        if not line.startswith(_READY):
            raise RuntimeError(f"baton up ended with {await process.wait()} before it was ready")
        yield dict(word.split("=", 1) for word in line.removeprefix(_READY).split())
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
