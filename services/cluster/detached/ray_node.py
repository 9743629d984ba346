"""A Ray node without resources, beside a program that joins a Ray cluster on other machines.

Ray serves a program only through a node on the same machine; no worker runs on this one. All its processes
are descendants of a reaper (`services/cluster/ray_reaper.py`), which kills them when this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.base.python_module import SAFE_PATH, python_module
from services.cluster.local_ray import OBJECT_STORE_BYTES, STARTED, free_ports

# Ports that Ray would choose long before it binds them.
_PORTS = ("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port")
_START_S = 60.0
_POLL_S = 0.05
_STOP_S = 10.0


class RayNode:
    """A running node, created by `join` and ended by `stop`."""

    def __init__(self, folder: Path, reaper: subprocess.Popen[bytes]) -> None:
        self._folder = folder
        self._reaper = reaper

    @classmethod
    async def join(cls, address: str, host: str) -> RayNode:
        """Starts a node at the address `host` of this machine that joins the Ray at `address`, and returns
        once it serves programs. Raises BatonError(UNAVAILABLE) where it does not within a minute."""
        node = cls(*_start(address, host))
        try:
            await node._started(address)
        except BaseException:
            await node.stop()
            raise
        return node

    def lost(self) -> bool:
        """Whether the node has ended unexpectedly, as it does when the cluster is lost."""
        return self._reaper.poll() is not None

    async def stop(self) -> None:
        """Kills all processes of the node and waits for their end."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._reaper.wait, _STOP_S)

    async def _started(self, address: str) -> None:
        deadline = asyncio.get_running_loop().time() + _START_S
        log = ""
        while STARTED not in log:
            if self.lost() or asyncio.get_running_loop().time() > deadline:
                last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
                raise BatonError(ErrorKind.UNAVAILABLE, f"cannot join Ray at {address}: {last.strip()}")
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(FileNotFoundError):  # the reaper of a node that has ended removes it
                log = (self._folder / "start.log").read_text(errors="replace")


def _start(address: str, host: str) -> tuple[Path, subprocess.Popen[bytes]]:
    """The node's folder and the reaper of its processes."""
    folder = Path(tempfile.mkdtemp(prefix="baton-ray-"))
    with (folder / "start.log").open("wb") as log:
        reaper = subprocess.Popen(
            python_module("services.cluster.ray_reaper", str(folder), *_command(address, host)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **SAFE_PATH},
            start_new_session=True,
        )
    return folder, reaper


def _command(address: str, host: str) -> tuple[str, ...]:
    return (
        *python_module("ray.scripts.scripts", "start", "--block"),
        *(f"--{name}={port}" for name, port in zip(_PORTS, free_ports(len(_PORTS)), strict=True)),
        f"--address={address}",
        f"--node-ip-address={host}",
        *("--num-cpus=0", "--num-gpus=0", "--resources={}"),
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
    )
