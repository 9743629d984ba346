"""`baton warm-kernels`: fills a folder with the compiled kernels of workers, for an image of theirs."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
from pathlib import Path

from baton.base.python_module import python_module
from baton.device.kernel_files.manifest import SHIPPED_VARIABLE, KernelManifest
from services.cli.common import config_file, extras
from services.cli.common.config_file import invalid
from services.cli.common.messages import write_line
from services.cli.up.model_folder import model_and_name, require_weights
from services.common.config.kernels import KernelsFile, WarmedWorker
from services.common.config.worker import TransferConfig, WorkerConfig
from services.common.processes.child_process import Child

_WORKER = python_module("services.worker")
_STOP_S = 30.0
_ASK_S = 120.0  # Torch is imported, and a driver initialised.


def add_flags(parser: argparse.ArgumentParser) -> None:
    config_file.add_flag(parser, "YAML file of workers: model, role, engine")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        required=True,
        help="folder for the kernels, such as for `make images`",
    )


def run(arguments: argparse.Namespace) -> int:
    """Starts and stops each worker, and writes what the kernels were compiled with.

    Raises `BatonError`: INVALID where a worker cannot run here or there is no GPU. Raises `ChildError` where
    one ends.
    """
    extras.require("worker")
    config = config_file.load(arguments.config, KernelsFile, {})
    out: Path = arguments.out.absolute()
    manifest = kernels_here(config.workers[0].engine.device_index or 0)
    # Else workers would copy what they should compile.
    os.environ.pop(SHIPPED_VARIABLE, None)
    asyncio.run(_warm(config, out))
    manifest.write(out)
    return 0


def kernels_here(gpu: int) -> KernelManifest:
    """What workers of this machine compile with, asked in a process of its own, which may use the GPU. Raises
    `BatonError(INVALID)` where there is none."""
    command = python_module("baton.device.kernel_files.environment", str(gpu))
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
    if done.returncode:
        raise invalid((done.stderr.strip().splitlines() or ["no answer"])[-1])
    return KernelManifest.parse(done.stdout)


async def _warm(config: KernelsFile, out: Path) -> None:
    for index, warmed in enumerate(config.workers):
        worker = _worker(f"warm-{index}", warmed, out)
        child = await Child.start(worker.name, _WORKER, worker.model_dump_json())
        try:
            await child.ready(config.start_timeout_s)
        finally:
            await child.stop(asyncio.get_running_loop().time() + _STOP_S)
        write_line(sys.stdout, f"{warmed.model} {warmed.role}: {_files(out)} files")


def _files(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


def _worker(name: str, warmed: WarmedWorker, out: Path) -> WorkerConfig:
    folder, _ = model_and_name(warmed.model)
    require_weights(folder, "random")
    return WorkerConfig(
        name=name,
        role=warmed.role,
        model=str(folder),
        metrics_port=None,
        engine=warmed.engine.model_copy(update={"weights": "random", "kernel_cache": str(out)}),
        transfer=TransferConfig(transport="grpc"),
        cluster_secret=secrets.token_hex(32),
        drain_s=0,
    )
