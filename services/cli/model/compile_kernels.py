"""`baton model compile`: fills a folder with the compiled kernels of workers, for an image of theirs."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.base.python_module import python_module
from baton.device.kernel_files.manifest import SHIPPED_VARIABLE, KernelManifest
from services.cli.common import extras, process_configs
from services.cli.common.messages import write_line
from services.cli.up.model_folder import model_and_name, require_weights
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import invalid, nearest
from services.common.config.settings_tree.views import KERNELS
from services.common.config.transfer import TransferConfig
from services.common.config.worker import WorkerConfig
from services.common.processes.child_process import Child

_WORKER = python_module("services.worker")
_STOP_S = 30.0
_START_S = 1800.0  # longest time that one worker may take
_KEYS = ("workers", "start_timeout_s")
_ASK_S = 120.0  # Torch is imported, and a driver initialised.


def add_flags(parser: argparse.ArgumentParser) -> None:
    reader.add_config_flag(parser, "YAML file of workers: model, role, engine")
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
    out: Path = arguments.out.absolute()
    workers = workers_of(arguments.config, out)
    manifest = kernels_here(0)
    # Else workers would copy what they should compile.
    os.environ.pop(SHIPPED_VARIABLE, None)
    asyncio.run(_warm(workers, out))
    manifest.write(out)
    return 0


def kernels_here(gpu: int) -> KernelManifest:
    """Returns the manifest of kernels that workers of this machine compile, asked in a process of its own,
    which may use the GPU. Raises `BatonError(INVALID)` if there is none."""
    command = python_module("baton.device.kernel_files.environment", str(gpu))
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
    if done.returncode:
        raise invalid((done.stderr.strip().splitlines() or ["no answer"])[-1])
    return KernelManifest.parse(done.stdout)


async def _warm(workers: Sequence[WorkerConfig], out: Path) -> None:
    for worker in workers:
        child = await Child.start(worker.name, _WORKER, worker.model_dump_json())
        try:
            await child.ready(worker.start_timeout_s)
        finally:
            await child.stop(asyncio.get_running_loop().time() + _STOP_S)
        write_line(sys.stdout, f"{worker.served_model_name} {worker.role}: {_files(out)} files")


def _files(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


def workers_of(file: Path, out: Path) -> list[WorkerConfig]:
    """The workers of a file, with random weights and the kernel cache `out`. Each entry of `workers` has a
    `role`, a `model`, whose folder needs no weights, and the `engine` settings of workers that will use the
    kernels. Raises `BatonError(INVALID)`."""
    values = reader.read_yaml(file)
    entries, timeout_s = values.pop("workers", None), values.pop("start_timeout_s", _START_S)
    if values:
        raise invalid(f"unknown key {next(iter(values))}{nearest(next(iter(values)), _KEYS)}")
    if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
        raise invalid(f"{file}: workers must be a list of mappings, with model, role and engine")
    return [_worker(index, dict(entry), out, timeout_s) for index, entry in enumerate(entries)]


def _worker(index: int, entry: dict[str, Any], out: Path, timeout_s: float) -> WorkerConfig:
    role = entry.pop("role", None)
    settings = reader.read_values(KERNELS, entry)
    folder, _ = model_and_name(settings.model or "")
    require_weights(folder, "random")
    return process_configs.worker_config(
        settings,
        role,
        name=f"warm-{index}",
        model=str(folder),
        served_model_name=settings.model,
        metrics_port=None,
        engine=settings.engine.model_copy(update={"weights": "random", "kernel_cache": str(out)}),
        transfer=TransferConfig(transport="grpc"),
        cluster_secret=secrets.token_hex(32),
        start_timeout_s=timeout_s,
        drain_s=0,
    )
