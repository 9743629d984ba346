"""A Ray node that this process owns: the head of a local Ray, or a node without resources beside a program
that joins a Ray on other machines.

    FOLDER/            mode 0700: no other user can read, replace or connect to its contents
      start.log
      token            of a head: Ray's token, mode 0600
      secrets          of a head: the cluster's secrets, mode 0600, for the worker actors
      stderr           of a head: the socket that shares this process's stderr
      run/             of a head: the process ids of its workers
      r/               of a head: Ray's temporary folder, which Ray creates with mode 0777

All its processes are descendants of a reaper (`services/cluster/on_ray/ray_reaper.py`), which kills them when
its stdin is closed or this process dies. `ray stop` is never used: it would end every Ray of the machine.
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
from services.common.config.settings_tree.secrets import VARIABLES
from services.common.processes.run_folder import FOLDER_VARIABLE

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; Baton stores no objects in it
STARTED = "Ray runtime started"
_START_S = 120.0
_POLL_S = 0.02
_STOP_S = 10.0
# A Ray node connects to its object store shortly before the store listens; by default it retries after a
# second. These retries are shorter, and last as long in all as ten of the default ones.
_QUICKLY = {
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
# Ports that Ray would choose long before it binds them, and exit if another process has bound one meanwhile.
_PORTS = ("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port")
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT, _PORTS_END, PORTS_TRIED = 10_000, 65_536, 200
_SOCKET_PATH_BYTES = 107  # the kernel's limit
# What Ray appends to its folder: /session_<date>_<time>_<pid>/sockets/plasma_store
_RAY_APPENDS_BYTES = 65
_PREFIX, _RANDOM_CHARACTERS, _RAY = "baton-", 8, "r"


class RayNode:
    """A running node, created by `head` or `beside` and ended by `stop`. A process that joins it needs
    `environment`."""

    def __init__(
        self, folder: Path, port: int, environment: Mapping[str, str], reaper: subprocess.Popen[bytes]
    ) -> None:
        """`port`: of the control store of a head; else 0."""
        self.folder = folder
        self.port = port
        self.environment = environment
        self._reaper = reaper

    @classmethod
    def head(
        cls, environment: Mapping[str, str], prestarted: int, gpus: int, room: Mapping[str, int]
    ) -> RayNode:
        """Starts a Ray of this node alone and returns at once. All its processes get `environment`;
        `prestarted` Python processes wait for actors, `gpus` is the number of GPUs that Ray assumes, and
        `room` are the resources that it declares."""
        folder = short_folder()
        token = _private_file(folder / "token", secrets.token_hex(32))
        environment = {
            **environment,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "PYTHONPATH": os.pathsep.join(filter(None, (_packages(), os.environ.get("PYTHONPATH")))),
            FOLDER_VARIABLE: str(folder / "run"),
        }
        ports = free_ports(2 + len(_PORTS))
        ray_folder(folder).mkdir()
        command = head_command(ray_folder(folder), ports, prestarted, gpus, room)
        return cls(folder, ports[0], environment, _reaper(folder, command, environment))

    @classmethod
    async def beside(cls, address: str, host: str) -> RayNode:
        """Starts a node at the address `host` of this machine that joins the Ray at `address` and runs no
        worker, and returns once it serves programs. Raises BatonError(UNAVAILABLE) where it does not start.
        """
        folder = Path(tempfile.mkdtemp(prefix="baton-ray-"))
        node = cls(folder, 0, {}, _reaper(folder, _beside(address, host, free_ports(len(_PORTS))), {}))
        try:
            await node.started(f"cannot join Ray at {address}")
        except BaseException:
            await node.stop()
            raise
        return node

    async def address(self) -> str:
        """The address of a head for `ray.init`, once it accepts programs. Raises BatonError(UNAVAILABLE) if
        it does not start."""
        log = await self.started("the local Ray did not start")
        return f"{_node_address(log)}:{self.port}"

    async def started(self, problem: str) -> str:
        """Returns what the node has logged, once it serves programs. Raises BatonError(UNAVAILABLE), whose
        message begins with `problem`, where it has ended or does not start in time."""
        deadline = asyncio.get_running_loop().time() + _START_S
        log = ""
        while STARTED not in log:
            if self.lost() or asyncio.get_running_loop().time() > deadline:
                last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
                raise BatonError(ErrorKind.UNAVAILABLE, f"{problem}: {last.strip()}")
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(FileNotFoundError):  # the reaper of a node that has ended removes it
                log = (self.folder / "start.log").read_text(errors="replace")
        return log

    def write_secrets(self, shared: Mapping[str, str]) -> Path:
        """Writes the cluster's secrets to a private file in the node's folder and returns its path."""
        return _private_file(self.folder / "secrets", json.dumps(dict(shared)))

    def lost(self) -> bool:
        """True if the node has ended unexpectedly, as it does when its cluster is lost."""
        return self._reaper.poll() is not None

    async def stop(self) -> None:
        """Kills all processes of the node, waits for their end, and removes its folder."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._reaper.wait, _STOP_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def _reaper(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The reaper of the processes that `command` starts, which get `environment` beside this process's own
    without its secrets: Ray's processes expose theirs to anyone who may debug them."""
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}
    with (folder / "start.log").open("wb") as log:
        return subprocess.Popen(
            python_module("services.cluster.on_ray.ray_reaper", str(folder), *command),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**_QUICKLY, **own, **environment, **SAFE_PATH},
            start_new_session=True,
        )


def head_command(
    folder: Path, ports: Sequence[int], prestarted: int, gpus: int, room: Mapping[str, int]
) -> tuple[str, ...]:
    port, client, *others = ports
    return (
        *_start(others),
        *("--head", f"--port={port}", f"--temp-dir={folder}"),
        *(f"--num-cpus={prestarted}", f"--num-gpus={gpus}", f"--resources={json.dumps(dict(room))}"),
        *(f"--ray-client-server-port={client}", "--include-dashboard=false", "--no-monitor"),
    )


def _beside(address: str, host: str, ports: Sequence[int]) -> tuple[str, ...]:
    none = ("--num-cpus=0", "--num-gpus=0", "--resources={}")
    return (*_start(ports), f"--address={address}", f"--node-ip-address={host}", *none)


def _start(ports: Sequence[int]) -> tuple[str, ...]:
    return (
        *python_module("services.cluster.on_ray.ray_start"),
        *(f"--{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        *("--include-log-monitor=false", "--disable-usage-stats", "--dashboard-agent-listen-port=0"),
        *("--min-worker-port=0", "--max-worker-port=0"),
    )


def _private_file(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


def ray_folder(folder: Path) -> Path:
    """The folder for Ray's own files below the node's private folder."""
    return folder / _RAY


def short_folder() -> Path:
    """A new private folder in the temporary folder, or in /tmp where socket paths below the former would
    be too long."""
    base = tempfile.gettempdir()
    own = len(f"/{_PREFIX}/{_RAY}") + _RANDOM_CHARACTERS
    fits = len(os.fsencode(base)) + own + _RAY_APPENDS_BYTES <= _SOCKET_PATH_BYTES
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base if fits else "/tmp"))


def free_ports(count: int, lowest: int = LOWEST_PORT, tried: int = PORTS_TRIED) -> list[int]:
    """`count` free ports below the kernel's ephemeral range, so that no other process is assigned one before
    it is used.
    Where that range covers almost everything, any free ports. Raises OSError where there are too few."""
    candidates = range(lowest, _first_ephemeral_port())
    if len(candidates) < tried:
        candidates = range(lowest, _PORTS_END)
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, k=tried):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"of {tried} ports below {candidates.stop} fewer than {count} are free")


def _first_ephemeral_port() -> int:
    return int(EPHEMERAL_PORTS.read_text().split()[0])


def _packages() -> str:
    """The folder that contains Baton's packages, since Ray's processes may run in another working
    directory."""
    return str(Path(__file__).parents[3])


def _node_address(log: str) -> str:
    return next(line.rpartition(": ")[2] for line in log.splitlines() if "Local node IP" in line).strip()
