"""Starts and stops the servers of an arm, on GPUs of its own, whose clocks are written down meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import httpx

from bench.goodput.arms import Arm
from bench.model_folders import write_random_model, write_word_tokenizer
from bench.processes import baton_up

MODEL = "random"
Result = TypeVar("Result")
# The longest that a server takes to be ready, and to end.
_START_S, _STOP_S, _POLL_S = 900.0, 30.0, 0.5
_NVIDIA_SMI_S = 30.0
_FIELDS = "timestamp,index,clocks.sm,power.draw,temperature.gpu"
_WRITTEN = "%Y/%m/%d %H:%M:%S.%f"


class NotServedError(Exception):
    """An arm that cannot run here, and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The addresses at which a server takes requests. `admin`, `metrics_url`: of Baton's router, else
    empty."""

    url: str
    admin: str = ""
    metrics_url: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all arms have in common. `vllm`: a Python that has vLLM, or finds it in the folder
    `vllm_site`; `tokens`: the longest sequence; `protocol`: that Baton is asked by, http or grpc; `model`: a
    folder with weights and tokenizer, which are random without it."""

    shape: str
    dtype: str
    device: str
    tokens: int
    vllm: str
    folder: Path
    vllm_site: str = ""
    protocol: str = "http"
    model: Path | None = None


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
    model, weights = setup.model, ["--weights", "file"]
    if model is None:
        model, weights = write_random_model(folder, setup.shape, setup.tokens), []
        write_word_tokenizer(model)
    if arm.kind == "vllm":
        async with _vllm(arm, setup, model, folder, visible) as target:
            yield target
        return
    flags = [
        *arm.roles, "--device", setup.device, "--dtype", setup.dtype, "--log-level", "warning",
        "--max-context-tokens", str(setup.tokens), "--admin-grpc-port", "0", *weights, *arm.flags,
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
async def _vllm(
    arm: Arm, setup: Setup, model: Path, folder: Path, visible: dict[str, str]
) -> AsyncIterator[Target]:
    program = shutil.which(setup.vllm)
    if program is None:
        raise NotServedError(f"there is no {setup.vllm}")
    port = _free_port()
    command = [
        program, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", MODEL,
        *(["--load-format", "dummy"] if setup.model is None else []),
        "--max-model-len", str(setup.tokens), "--enable-prefix-caching", *arm.flags,
    ]  # fmt: skip
    # Its packages and ours must not be on one path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"VLLM_CACHE_ROOT": str(folder / "vllm"), **visible}
    if setup.vllm_site:
        environment["PYTHONPATH"] = setup.vllm_site
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, cwd=folder, stdout=sys.stderr, start_new_session=True
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


async def until_terminated(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work`, which SIGTERM cancels: servers have sessions of their own, and would outlive this program
    with all the memory of their GPUs."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        sys.exit("bench.goodput: terminated")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty without a driver."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [part for part in given.split(",") if part]
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


class GpuPool:
    """Gives each taker GPUs of its own, in the order of asking."""

    def __init__(self, gpus: list[str]) -> None:
        self._free = list(gpus)
        self.size = len(gpus)
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[list[str]]:
        """Waits for `count` free GPUs, of those there are."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield taken
        finally:
            async with self._changed:
                self._free += taken
                self._changed.notify_all()


@contextlib.asynccontextmanager
async def gpu_samples(path: Path) -> AsyncIterator[None]:
    """Writes a line for each GPU and second to `path`; none where there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", "--loop=1"]
    with path.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=file, stderr=asyncio.subprocess.DEVNULL
            )
        except OSError:
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def clocks_between(path: Path, gpus: Sequence[str], begun: datetime, ended: datetime) -> str:
    """The means of these GPUs between two times, local ones, in words; empty where there is no sample."""
    found: dict[str, list[tuple[float, ...]]] = {gpu: [] for gpu in gpus}
    for line in path.read_text().splitlines():
        written, *fields = [field.strip() for field in line.split(",")]
        with contextlib.suppress(ValueError):  # a last line may be cut off, a field not be supported
            gpu, *values = fields
            if gpu in found and begun <= datetime.strptime(written, _WRITTEN) <= ended and len(values) == 3:
                found[gpu].append(tuple(map(float, values)))
    said = []
    for gpu, samples in found.items():
        if samples:
            clock, power, temperature = map(mean, zip(*samples, strict=True))
            said.append(f"GPU {gpu} {clock:.0f} MHz, {power:.0f} W, {temperature:.0f} °C")
    return "; ".join(said)
