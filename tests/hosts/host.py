"""One host: namespaces of network, processes, mounts, hostname and shared memory, and its own folders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hosts.network import Network
from tests.manifests.container import REPOSITORY, inner_pid

_NEW = ("--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--kill-child")
_ENTERED = ("--mount", "--pid", "--uts", "--ipc", "--net")
# What a host has of this machine's /etc.
_ETC = ("passwd", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "ssl", "alternatives")
# Folders that each host has for itself, which exist on every machine.
_OWN = ("etc", "opt", "srv", "var/cache")
_START_S = 10.0
COMMAND_S = 120.0
STAND_INS = "/opt/stand-ins"


class Host:
    """A machine with a name and addresses. `start` it; `power_off` it, and it may be started again, with the
    same files and another address."""

    def __init__(self, name: str, folder: Path, network: Network) -> None:
        """`folder` has the files of all hosts."""
        self.name = name
        self.folder = folder / name
        self._network = network
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        for own in (*_OWN, "tmp"):
            (self.folder / own).mkdir(parents=True)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def path(self, path: str) -> Path:
        """A file of this host, from outside."""
        return self.folder / path.removeprefix("/")

    def start(self, *addresses: str) -> None:
        """Boots it with these addresses, which have prefix lengths."""
        script = self.folder / "start.sh"
        script.write_text("\n".join(self._script()) + "\n")
        self._process = subprocess.Popen(["unshare", *_NEW, "sh", "-e", str(script)])
        deadline = time.monotonic() + _START_S
        while not (self.folder / "booted").exists():
            assert self._process.poll() is None, f"{self.name} did not start"
            assert time.monotonic() < deadline, f"{self.name} did not start"
            time.sleep(0.01)
        pid = inner_pid(self._process.pid)
        assert pid is not None
        self.pid = pid
        self._network.connect(self.name, addresses, pid)

    def power_off(self) -> None:
        """All of its processes end at once, and no peer hears of it."""
        self._network.both(self.name, self._network.ports, drop=True)
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(_START_S)
        (self.folder / "booted").unlink(missing_ok=True)

    def reconnect(self) -> None:
        """Ends what `power_off` did to its links."""
        self._network.both(self.name, self._network.ports)

    def command(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Runs `command` on this host."""
        settings = [f"{key}={value}" for key, value in self._environment(environment).items()]
        target = ["nsenter", "--target", str(self.pid), *(f"{kind}" for kind in _ENTERED)]
        return [*target, "--wd=/", "env", "-i", *settings, *command]

    async def run(self, script: str) -> str:
        """Runs a shell script on this host; returns its output. AssertionError where it fails."""
        process = await asyncio.create_subprocess_exec(
            *self.command(["bash", "-e", "-o", "pipefail", "-c", script], {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        async with asyncio.timeout(COMMAND_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, f"{self.name}: {script}\n{output.decode()}"
        return output.decode()

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        path = f"{STAND_INS}:/opt/baton/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {
            "PATH": path,
            "HOME": str(self.folder / "tmp"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def _script(self) -> list[str]:
        folder, quoted = self.folder, shlex.quote(str(self.folder))
        self._write_stand_ins()
        copies = " ".join(f"/etc/{name}" for name in _ETC if os.path.exists(f"/etc/{name}"))
        return [
            f"cp -r {copies} {quoted}/etc/",
            f"echo 'hosts: files' > {quoted}/etc/nsswitch.conf",
            "mount --make-rprivate /",
            *(f"mount --bind {shlex.quote(str(folder / own))} /{own}" for own in _OWN),
            "mount -t proc proc /proc",
            "mount -t tmpfs shm /dev/shm",
            "mount -t tmpfs run /run",
            f"hostname {self.name}",
            f"touch {quoted}/booted",
            # Process 1: adopts what loses its parent, and reaps it.
            "exec sleep infinity",
        ]

    def _write_stand_ins(self) -> None:
        """`baton` of this checkout where the page installs it, and what hosts of the tests cannot do: other
        users. `scp` copies between hosts' folders."""
        baton = f'exec {sys.executable} -P -m services.cli.main "$@"'
        files = {
            "opt/baton/bin/baton": baton,
            "opt/stand-ins/useradd": "exit 0",
            "opt/stand-ins/chown": "exit 0",
            "opt/stand-ins/redis-server": f'exec {_redis()} "$@"',
            "opt/stand-ins/scp": _SCP.format(python=sys.executable, folder=self.folder.parent),
        }
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)


# scp FILE... HOST:FOLDER/
_SCP = """exec {python} - "$@" <<'END'
import pathlib, shutil, sys
*files, target = sys.argv[1:]
host, folder = target.rsplit("@", 1)[-1].split(":")
there = pathlib.Path("{folder}") / host / folder.strip("/")
for file in files:
    shutil.copy(file, there)
END"""


def _redis() -> str:
    from baton.state.embedded import server_binary

    return str(server_binary())
