"""Ray nodes of a test's own, each with a pod's environment, on loopback addresses of their own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.cluster.on_ray.ray_node import STARTED, free_ports
from services.common.processes.process_tree import descendants

START_S = 60.0
_COMMON = (
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=0", "--num-gpus=0"),
    *("--object-store-memory=83886080", "--disable-usage-stats", "--dashboard-agent-listen-port=0"),
    *("--min-worker-port=0", "--max-worker-port=0"),
)
HEAD_HOST = "127.0.0.2"


@dataclass
class RayNodes:
    """Nodes by host, the head first. Their processes end with the fixture that made this."""

    folder: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    variables: dict[str, str] = field(default_factory=dict)
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{HEAD_HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of every process that joins."""
        return {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }

    def start_head(self, pod: str, room: Mapping[str, int]) -> None:
        """Starts the head, which runs workers too."""
        token = self.folder / "token"
        if not token.exists():
            token.write_text(secrets.token_hex(32))
        flags = (
            "--head",
            f"--port={self.port}",
            f"--temp-dir={self.folder / 'r'}",
            "--include-dashboard=false",
        )
        quiet = (
            "--include-log-monitor=false",
            "--no-monitor",
            f"--ray-client-server-port={free_ports(1)[0]}",
        )
        self._start(HEAD_HOST, pod, room, *flags, *quiet)

    def start(self, host: str, pod: str, room: Mapping[str, int]) -> None:
        """Starts a node that joins the head."""
        self._start(host, pod, room, f"--address={self.address}")

    def kill(self, host: str) -> None:
        """Kills all processes of a node."""
        process = self._started.pop(host)
        for pid in (*descendants(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def freeze(self, host: str) -> None:
        """Stops all processes of a node, so that nothing there answers and no connection is closed, as when
        its host has lost power."""
        process = self._started[host]
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def run_folder(self, pod: str) -> Path:
        return self.folder / pod

    def _start(self, host: str, pod: str, room: Mapping[str, int], *flags: str) -> None:
        names = ("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port")
        ports = (f"--{name}={port}" for name, port in zip(names, free_ports(len(names)), strict=True))
        log = self.folder / f"{host}.log"
        pod_variables = {
            "BATON_HOST": host,
            "BATON_NAME": pod,
            "BATON_RUN_DIR": str(self.run_folder(pod)),
        }
        with log.open("wb") as output:
            self._started[host] = subprocess.Popen(
                (*_COMMON, f"--node-ip-address={host}", f"--resources={json.dumps(room)}", *ports, *flags),
                env=self.environment | pod_variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while STARTED not in log.read_text():
            assert self._started[host].poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, "no Ray"
            time.sleep(0.1)

    def stop(self) -> None:
        for host in list(self._started):
            self.kill(host)


@contextlib.contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(Path(folder))
        try:
            yield nodes
        finally:
            nodes.stop()
