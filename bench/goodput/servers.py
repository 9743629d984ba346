"""Starts and stops the servers of an arm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.cluster.baton_up import baton_up, write_model
from bench.goodput.arms import Arm
from bench.goodput.word_tokenizer import write_word_tokenizer

MODEL = "random"
# The longest that a server takes to be ready, and to end.
_START_S, _STOP_S, _POLL_S = 900.0, 30.0, 0.5


class NotServedError(Exception):
    """An arm that cannot run here, and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server takes requests. `admin`, `metrics_url`: of Baton's router, else empty."""

    url: str
    admin: str = ""
    metrics_url: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all arms have in common. `vllm`: a Python that has vLLM, or finds it in the folder `vllm_site`;
    `tokens`: the longest sequence; `protocol`: that Baton is asked by, http or grpc."""

    shape: str
    dtype: str
    device: str
    tokens: int
    vllm: str
    folder: Path
    vllm_site: str = ""
    protocol: str = "http"


@contextlib.asynccontextmanager
async def serve(arm: Arm, setup: Setup, gpus: Sequence[str]) -> AsyncIterator[Target]:
    """Serves an arm on these GPUs; one that runs already is taken as it is. Raises NotServedError where it
    does not come up."""
    if arm.url:
        yield Target(arm.url)
        return
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if setup.device == "cuda" else {}
    folder = setup.folder / arm.name
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(folder, setup.shape, setup.tokens)
    write_word_tokenizer(model)
    if arm.kind == "vllm":
        async with _vllm(arm, setup, model, visible) as target:
            yield target
        return
    flags = [
        *arm.roles, "--device", setup.device, "--dtype", setup.dtype, "--log-level", "warning",
        "--max-context-tokens", str(setup.tokens), "--admin-grpc-port", "0", *arm.flags,
    ]  # fmt: skip
    try:
        started = baton_up(model, MODEL, flags, visible)
        addresses = await started.__aenter__()
    except (RuntimeError, TimeoutError) as error:
        raise NotServedError(str(error) or "it was not ready in time") from error
    try:
        yield Target(
            f"{setup.protocol}://{addresses[setup.protocol]}",
            addresses["admin"],
            f"http://{addresses['admin_http']}/metrics",
        )
    finally:
        await started.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def _vllm(arm: Arm, setup: Setup, model: Path, visible: dict[str, str]) -> AsyncIterator[Target]:
    program = shutil.which(setup.vllm)
    if program is None:
        raise NotServedError(f"there is no {setup.vllm}")
    port = _free_port()
    command = [
        program, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", MODEL, "--load-format", "dummy",
        "--max-model-len", str(setup.tokens), "--enable-prefix-caching", *arm.flags,
    ]  # fmt: skip
    # Its packages and ours must not be on one path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"VLLM_CACHE_ROOT": str(model / "vllm"), **visible}
    if setup.vllm_site:
        environment["PYTHONPATH"] = setup.vllm_site
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, cwd=model, stdout=sys.stderr, start_new_session=True
    )
    try:
        await _healthy(f"http://127.0.0.1:{port}/health", process)
        yield Target(f"http://127.0.0.1:{port}")
    finally:
        await _stop(process)


async def _healthy(url: str, process: asyncio.subprocess.Process) -> None:
    """Returns once the server answers. Raises NotServedError where it ends before, or takes too long."""
    try:
        async with asyncio.timeout(_START_S), httpx.AsyncClient() as client:
            while process.returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(url)).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise NotServedError("it was not ready in time") from None
    raise NotServedError(f"it ended with {process.returncode} before it was ready")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends a server and all that it started, which are its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
