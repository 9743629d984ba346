"""A minimal Ray head node for one cluster on this machine, with a folder, ports and a token of its own.

    FOLDER/            mode 0700: no other user can read, replace or connect to its contents
      token            Ray's token, mode 0600
      secrets          the cluster's secrets, mode 0600, for the worker actors
      start.log
      r/               Ray's temporary folder, which Ray creates with mode 0777

All its processes are descendants of a reaper (`services/cluster/ray_reaper.py`), which kills them when its
stdin is closed or this process dies. `ray stop` is never used: it would end every Ray of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.base.python_module import SAFE_PATH, python_module
from services.common.config.secrets import VARIABLES

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; Baton stores no objects in it
STARTED = "Ray runtime started"
_START_S = 120.0
_POLL_S = 0.05
_STOP_S = 10.0
# Ports that Ray would choose long before it binds them, and exit if another process has bound one meanwhile:
# the head's, the client server's, and those of its agents.
_PORTS = (
    "port",
    "ray-client-server-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _PORTS_END, _PORTS_TRIED = 10_000, 65_536, 200
_SOCKET_PATH_BYTES = 107  # the kernel's limit
# What Ray appends to its folder: /session_<date>_<time>_<pid>/sockets/plasma_store
_RAY_APPENDS_BYTES = 65
_PREFIX, _RANDOM_CHARACTERS, _RAY = "baton-", 8, "r"


class LocalRay:
    """A running head node, created by `start` and ended by `stop`. A process that joins it needs
    `environment`."""

    def __init__(
        self, folder: Path, port: int, environment: Mapping[str, str], reaper: subprocess.Popen[bytes]
    ) -> None:
        self.folder = folder
        self.port = port
        self.environment = environment
        self._reaper = reaper

    @classmethod
    def start(cls, environment: Mapping[str, str], prestarted: int, gpus: int) -> LocalRay:
        """Starts the node and returns at once. All its processes get `environment`; `prestarted` Python
        processes wait for actors, and `gpus` is the number of GPUs that Ray assumes."""
        folder = _short_folder()
        token = _private_file(folder / "token", secrets.token_hex(32))
        environment = {**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_packages(), os.environ.get("PYTHONPATH"))))
        environment |= SAFE_PATH
        ports = free_ports(len(_PORTS))
        ray_folder(folder).mkdir()
        head = _head(ray_folder(folder), ports, prestarted, gpus)
        with (folder / "start.log").open("wb") as log:
            reaper = subprocess.Popen(
                python_module("services.cluster.ray_reaper", str(folder), *head),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**_without_secrets(os.environ), **environment},
                start_new_session=True,
            )
        return cls(folder, ports[0], environment, reaper)

    async def address(self) -> str:
        """The address for `ray.init`, once the node accepts drivers. Raises BatonError(UNAVAILABLE) if
        it does not start."""
        deadline = asyncio.get_running_loop().time() + _START_S
        while STARTED not in (log := self._start_log()):
            if self._reaper.poll() is not None or asyncio.get_running_loop().time() > deadline:
                last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
                raise BatonError(ErrorKind.UNAVAILABLE, f"the local Ray did not start: {last.strip()}")
            await asyncio.sleep(_POLL_S)
        return f"{_node_address(log)}:{self.port}"

    def write_secrets(self, shared: Mapping[str, str]) -> Path:
        """Writes the cluster's secrets to a private file in the node's folder and returns its path."""
        return _private_file(self.folder / "secrets", json.dumps(dict(shared)))

    def lost(self) -> bool:
        """Whether the node has ended unexpectedly."""
        return self._reaper.poll() is not None

    async def stop(self) -> None:
        """Kills all processes of the node, waits for their end, and removes its folder."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._reaper.wait, _STOP_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_log(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "start.log").read_text(errors="replace")
        return ""


def _head(folder: Path, ports: Sequence[int], prestarted: int, gpus: int) -> tuple[str, ...]:
    return (
        *python_module("ray.scripts.scripts", "start", "--head", "--block"),
        *(f"--{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
        f"--temp-dir={folder}",
        f"--num-cpus={prestarted}",
        f"--num-gpus={gpus}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
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
    """The environment without the cluster's secrets: Ray's processes expose theirs to anyone who may
    debug them."""
    return {name: value for name, value in environment.items() if name not in VARIABLES.values()}


def ray_folder(folder: Path) -> Path:
    """The folder for Ray's own files below the node's private folder."""
    return folder / _RAY


def _short_folder() -> Path:
    """A new private folder in the temporary folder, or in /tmp where socket paths below the former would
    be too long."""
    base = tempfile.gettempdir()
    own = len(f"/{_PREFIX}/{_RAY}") + _RANDOM_CHARACTERS
    fits = len(os.fsencode(base)) + own + _RAY_APPENDS_BYTES <= _SOCKET_PATH_BYTES
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base if fits else "/tmp"))


def free_ports(count: int) -> list[int]:
    """`count` free ports below the kernel's ephemeral range, so that no other process is assigned one before
    it is used.
    Where that range covers almost everything, any free ports. Raises OSError where there are too few."""
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    if len(candidates) < _PORTS_TRIED:
        candidates = range(_LOWEST_PORT, _PORTS_END)
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, k=_PORTS_TRIED):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"of {_PORTS_TRIED} ports below {candidates.stop} fewer than {count} are free")


def _first_ephemeral_port() -> int:
    return int(_EPHEMERAL_PORTS.read_text().split()[0])


def _packages() -> str:
    """The folder that contains Baton's packages, since Ray's processes may run in another working
    directory."""
    return str(Path(__file__).parents[2])


def _node_address(log: str) -> str:
    return next(line.rpartition(": ")[2] for line in log.splitlines() if "Local node IP" in line).strip()
