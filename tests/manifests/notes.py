"""Runs the commands that `helm install` prints for this machine: as they stand, in one shell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO

from tests.manifests import notes_programs
from tests.manifests.services import ServiceProxy
from tests.manifests.volumes import Store

_ROOT = Path(__file__).parents[2]
_START_S = 30.0
# Exit code of loadgen, the last command: all were answered, but this machine was too busy for a measurement.
_INVALID = 3


class Notes:
    """The block of commands under "Ask it, from this machine". `folder`: where they run, with ca.crt,
    client.crt and client.key where clients need them."""

    def __init__(self, text: str, folder: Path) -> None:
        block = re.search(r"from this machine:\n\n(.*?)\n\n   Within the cluster", text, re.DOTALL)
        assert block is not None, text
        lines = textwrap.dedent(block.group(1)).splitlines(keepends=True)
        self.forward, self.commands = lines[0], "".join(lines[1:])
        assert self.forward.startswith("kubectl "), self.forward
        self._folder = folder

    async def run(self, service: ServiceProxy, store: Store, within_s: float) -> str:
        """Runs the commands of the notes and returns their output. Raises AssertionError where one fails."""
        programs = self._folder / "programs"
        programs.mkdir()
        for name in ("kubectl", "grpcurl"):
            self._stand_in(programs / name)
        secrets = {name: data for (kind, name), data in store.items() if kind == "secret"}
        cluster = self._folder / "cluster.json"
        cluster.write_text(
            json.dumps({"secrets": secrets, "services": {service.service.name: service.address}})
        )
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, notes_programs.CLUSTER: str(cluster)}
        printed = self._folder / "printed"
        async with self._forwarding(environment):
            with printed.open("wb") as output:
                shell = await self._shell("set -eo pipefail\n" + self.commands, environment, output)
            code: int | None = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    code = await shell.wait()
            if code is None:
                shell.kill()
        assert code in (0, _INVALID), printed.read_text()
        return printed.read_text()

    def _stand_in(self, program: Path) -> None:
        """Writes a program that runs from any folder, as the commands do."""
        program.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(_ROOT))}\n"
            f'exec {sys.executable} -m {notes_programs.__name__} {program.name} "$@"\n'
        )
        program.chmod(0o755)

    async def _shell(
        self, script: str, environment: Mapping[str, str], output: IO[bytes] | None = None
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("bash", "-c", script),
            cwd=self._folder,
            env=environment,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT if output else None,
        )

    @contextlib.asynccontextmanager
    async def _forwarding(self, environment: Mapping[str, str]) -> AsyncIterator[None]:
        """The command that ends with `&`, until all ports that it forwards listen."""
        forward = await self._shell("exec " + self.forward.rstrip("&\n "), environment)
        try:
            async with asyncio.timeout(_START_S):
                for port in re.findall(r" (\d+):\d+", self.forward):
                    await _until_it_listens(int(port))
            yield
        finally:
            forward.terminate()
            await forward.wait()


async def _until_it_listens(port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
