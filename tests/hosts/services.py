"""A service manager of a few lines: reads unit files of systemd, refuses keys that it does not know, starts
services, starts them again as the files say, and stops them."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.host import Host
from tests.manifests.container import inner_pid

# What systemd does with these is of no concern here: users, limits, the boot.
_IGNORED = {
    "Unit": {"Description", "Documentation", "Wants", "After", "StartLimitIntervalSec"},
    "Service": {"User", "LimitNOFILE", "KillMode"},
    "Install": {"WantedBy"},
}
_READ = {"ExecStart", "EnvironmentFile", "Restart", "RestartSec", "TimeoutStopSec", "CacheDirectory"}
# The distribution's unit, whose configuration is the page's.
DISTRIBUTION = {
    "redis-server": "[Service]\nExecStart=/opt/stand-ins/redis-server /etc/redis/redis.conf\n",
}


@dataclass(frozen=True)
class Unit:
    """The settings of a unit file; %i is replaced."""

    command: list[str]
    environment_file: str | None
    restart: bool
    pause_s: float
    stop_s: float
    cache: str | None


def read_unit(text: str, instance: str) -> Unit:
    """Raises AssertionError for a key that nothing here knows."""
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text.replace("%i", instance))
    for section in parser.sections():
        unknown = set(parser[section]) - _IGNORED[section] - (_READ if section == "Service" else set())
        assert not unknown, f"keys of a unit that nothing here knows: {unknown}"
    service = parser["Service"]
    return Unit(
        shlex.split(service["ExecStart"]),
        service.get("EnvironmentFile"),
        service.get("Restart", "no") == "always",
        float(service.get("RestartSec", "0.1")),
        float(service.get("TimeoutStopSec", "90")),
        service.get("CacheDirectory"),
    )


@dataclass
class Service:
    """A service of a host, from its start until `stop` or the end of its host."""

    host: Host
    name: str
    unit: Unit
    log: Path
    codes: list[int] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None
    _stopping: bool = False
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        if self.unit.cache is not None:
            self.host.path(f"/var/cache/{self.unit.cache}").mkdir(exist_ok=True)
        while not self._stopping and self.host.running:
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self.host.command(self.unit.command, self._environment()),
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
                self.codes.append(await self._process.wait())
            if not self.unit.restart:
                return
            await asyncio.sleep(self.unit.pause_s)

    def _environment(self) -> dict[str, str]:
        if self.unit.environment_file is None:
            return {}
        lines = self.host.path(self.unit.environment_file).read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

    def signal(self, number: int) -> None:
        """Sends a signal to the service's main process."""
        pid = inner_pid(self._process.pid) if self._process is not None else None
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)

    async def stop(self) -> None:
        """Stops the service as `systemctl stop` does."""
        self._stopping = True
        if self._task is None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.unit.stop_s):
                await asyncio.shield(self._task)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._task

    async def restart(self) -> None:
        """Restarts the service as `systemctl restart` does."""
        await self.stop()
        self.start()

    async def ended(self) -> None:
        """Waits until its host's end has ended it."""
        if self._task is not None:
            await self._task

    async def until(self, event: str, within_s: float = 60.0) -> None:
        """Waits until its log has the event once more."""
        before = len(self.events(event))
        async with asyncio.timeout(within_s):
            while len(self.events(event)) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def events(self, name: str) -> list[str]:
        """The lines of its log with this event."""
        text = self.log.read_text() if self.log.exists() else ""
        return [line for line in text.splitlines() if re.search(rf"event='{name}'", line)]


def unit_of(host: Host, name: str) -> Unit:
    """The unit that `systemctl start NAME` starts: a file of the host, or one of the distribution."""
    template, _, instance = name.partition("@")
    file = host.path(f"/etc/systemd/system/{template}{'@' if instance else ''}.service")
    return read_unit(file.read_text() if file.exists() else DISTRIBUTION[name], instance)
