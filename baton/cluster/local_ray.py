"""A lean Ray of our own on this machine: its own folder, ports and token, and nothing of it is left.

    FOLDER/            mode 0700: no other user can read, replace or connect to what is below
      token            Ray's, mode 0600
      secrets          the cluster's, mode 0600, for the actors of workers
      start.log
      r/               Ray's own folder, which Ray itself makes 0777

Its processes live below a warden (`baton/cluster/ray_reaper.py`), which ends them all when we close its
stdin or die. Never `ray stop`: that would end every Ray of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.errors import BatonError, ErrorKind
from services.common.config.secrets import VARIABLES, Secrets

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's least: nothing of ours passes through it
_STARTED = "Ray runtime started"
_START_S = 120.0
_POLL_S = 0.05
_STOP_S = 10.0
# What Ray would choose itself long before it is used, and end where somebody else has it by then: its first,
# then the door for clients, and those of its agents.
_PORTS = (
    "port",
    "ray-client-server-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _PORTS_END, _PORTS_TRIED = 10_000, 65_536, 200
_SOCKET_PATH_BYTES = 107  # the kernel's limit
# What Ray appends to its folder: /session_<date>_<time>_<pid>/sockets/plasma_store
_RAY_APPENDS_BYTES = 65
_PREFIX, _RANDOM_CHARACTERS, _RAY = "baton-", 8, "r"


class LocalRay:
    """A running head node. Made by `start`; whoever did must call `stop`. A process needs `environment` in
    its own before it joins."""

    def __init__(
        self, folder: Path, port: int, environment: Mapping[str, str], warden: subprocess.Popen[bytes]
    ) -> None:
        self.folder = folder
        self.port = port
        self.environment = environment
        self._warden = warden

    @classmethod
    def start(cls, environment: Mapping[str, str], prestarted: int, gpus: int) -> LocalRay:
        """Starts it, with `environment` for all its processes, and returns at once; `prestarted` Python
        processes will wait for actors, and of GPUs it believes what it is told."""
        folder = _short_folder()
        token = _private_file(folder / "token", secrets.token_hex(32))
        environment = {**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_packages(), os.environ.get("PYTHONPATH"))))
        ports = free_ports(len(_PORTS))
        ray_folder(folder).mkdir()
        head = _head(ray_folder(folder), ports, prestarted, gpus)
        with (folder / "start.log").open("wb") as log:
            warden = subprocess.Popen(
                (sys.executable, "-m", "baton.cluster.ray_reaper", str(folder), *head),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**_without_secrets(os.environ), **environment},
                start_new_session=True,
            )
        return cls(folder, ports[0], environment, warden)

    async def address(self) -> str:
        """Where drivers join, once they can. BatonError(UNAVAILABLE) if it does not come up."""
        deadline = asyncio.get_running_loop().time() + _START_S
        while _STARTED not in (said := self._said()):
            if self._warden.poll() is not None or asyncio.get_running_loop().time() > deadline:
                last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
                raise BatonError(ErrorKind.UNAVAILABLE, f"the local Ray did not start: {last.strip()}")
            await asyncio.sleep(_POLL_S)
        return f"{_node_address(said)}:{self.port}"

    def keep(self, shared: Secrets) -> Path:
        """Writes the cluster's secrets to a private file, which is removed with the rest."""
        return _private_file(self.folder / "secrets", shared.model_dump_json())

    def lost(self) -> bool:
        """Whether it has ended by itself."""
        return self._warden.poll() is not None

    async def stop(self) -> None:
        """Kills all of it; returns when it is gone."""
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._warden.wait, _STOP_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _said(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "start.log").read_text(errors="replace")
        return ""


def _head(folder: Path, ports: Sequence[int], prestarted: int, gpus: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *(f"--{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
        f"--temp-dir={folder}",
        f"--num-cpus={prestarted}",
        f"--num-gpus={gpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
    )


def _private_file(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Ray's processes need none of the cluster's, and show their environment to whoever may debug them."""
    return {name: value for name, value in environment.items() if name not in VARIABLES.values()}


def ray_folder(folder: Path) -> Path:
    """Ray's part of a private folder."""
    return folder / _RAY


def _short_folder() -> Path:
    """A new private folder, where temporary files go if sockets' paths can be that long, else in /tmp."""
    base = tempfile.gettempdir()
    ours = len(f"/{_PREFIX}/{_RAY}") + _RANDOM_CHARACTERS
    fits = len(os.fsencode(base)) + ours + _RAY_APPENDS_BYTES <= _SOCKET_PATH_BYTES
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base if fits else "/tmp"))


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to whoever asks for any: between our look and their use nobody else
    is given one. Where it gives almost all, any. OSError where there are none."""
    places = range(_LOWEST_PORT, _first_given())
    if len(places) < _PORTS_TRIED:
        places = range(_LOWEST_PORT, _PORTS_END)
    found: list[int] = []
    for port in random.SystemRandom().sample(places, k=_PORTS_TRIED):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"of {_PORTS_TRIED} ports below {places.stop} no {count} are free")


def _first_given() -> int:
    return int(_GIVEN_PORTS.read_text().split()[0])


def _packages() -> str:
    """The folder that holds our packages: Ray's processes need not run where we do."""
    return str(Path(__file__).parents[2])


def _node_address(said: str) -> str:
    return next(line.rpartition(": ")[2] for line in said.splitlines() if "Local node IP" in line).strip()
