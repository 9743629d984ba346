"""One pod: started, probed and ended as a kubelet does it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.base.addresses import join_address
from tests.manifests.manifests import Container, PodTemplate, Probe, Variable
from tests.manifests.network import Network
from tests.manifests.runtime import Root, Runtime
from tests.manifests.volumes import EmptyDir, ObjectFiles, Store, mount_empty, unmount, write_files

# A kubelet asks once in `periodSeconds`; a test has no time for that.
_ASKS_S = 0.1
# After a pod's deletion nodes forward to it until they have learnt of it.
_FORWARDED_S = 1.0
_SHOWN = 6000
_INIT_S = 60.0


@dataclass(frozen=True)
class Ended:
    """The end of a pod, with times counted from its deletion, as its grace period is."""

    code: int
    after_s: float


class Pod:
    """A pod of one container. `ready` follows its readiness probe; `terminating`: it was deleted. A container
    that ends by itself is an error, unless it `may_restart`."""

    def __init__(
        self, name: str, template: PodTemplate, network: Network, folder: Path, runtime: Runtime
    ) -> None:
        self.name = name
        self.template = template
        self.address = network.pod_address()
        self.ready = False
        self.terminating = False
        self.may_restart = False
        self.restarts = 0
        self.log = folder / "log"
        self._network = network
        self._folder = folder
        self._runtime = runtime
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """This machine's pid of the pod's process 1."""
        pid = self._inner_pid()
        assert pid is not None, self.why(f"{self.name} has no process")
        return pid

    def _inner_pid(self) -> int | None:
        assert self._process is not None
        return self._runtime.inner_pid(self._root(self.template.container, self.address), self._process.pid)

    def why(self, message: str) -> str:
        """A message with the end of the pod's log."""
        return f"{message}\n{self.log.read_text()[-_SHOWN:]}"

    def write_volumes(self, store: Store) -> None:
        """Writes the files of its volumes, or replaces those there are."""
        for name, volume in self.template.volumes.items():
            if isinstance(volume, ObjectFiles):
                write_files(self._folder / "volumes" / name, volume, store)
                self._runtime.own(self._folder / "volumes" / name, self.template.fs_group)

    def _make_empty_folders(self) -> None:
        """Makes the volumes that last as long as the pod, whose containers share them."""
        for name, volume in self.template.volumes.items():
            if isinstance(volume, EmptyDir):
                mount_empty(self._folder / "volumes" / name, volume)

    def write_hosts(self, hosts: str) -> None:
        """Sets /etc/hosts, also of a running pod."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "hosts").write_text(hosts)

    async def start(self, store: Store) -> None:
        """Starts it, once it has its hosts; returns before it is ready."""
        self.write_volumes(store)
        self._make_empty_folders()
        for container in self.template.init:
            process = await self._started(container, None)
            async with asyncio.timeout(_INIT_S):
                code = await process.wait()
            assert code == 0, self.why(f"{self.name}: {container.name} ended with {code}")
        await self._run()
        self._tasks.append(asyncio.create_task(self._live()))

    async def _run(self) -> None:
        self._process = await self._started(self.template.container, self.address)
        await self._network.connect(self.address, self._process.pid)

    async def _live(self) -> None:
        """Probes; starts the container again when it has ended, if the test allows that."""
        while not self.terminating:
            assert self._process is not None
            probing = asyncio.create_task(self._probe_always())
            ending = asyncio.create_task(self._process.wait())
            try:
                await asyncio.wait({probing, ending}, return_when=asyncio.FIRST_COMPLETED)
                if probing.done():
                    return probing.result()
            finally:
                probing.cancel()
                ending.cancel()
            if self.terminating:
                return
            assert self.may_restart, self.why(f"{self.name} ended with {self._process.returncode}")
            self.ready = False
            self.restarts += 1
            await self._run()

    async def _started(self, container: Container, address: str | None) -> asyncio.subprocess.Process:
        """Runs a container. Those before the main one have no network, which the chart's need none of."""
        root = self._root(container, address)
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._runtime.start_command(root, self._expanded(container)),
                env=root.variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _root(self, container: Container, address: str | None) -> Root:
        template = self.template
        return Root(
            folder=self._folder,
            container=container,
            volumes=self._folder / "volumes",
            writable={name for name, volume in template.volumes.items() if isinstance(volume, EmptyDir)},
            hostname=self.name,
            address=address,
            user=template.user,
            group=template.group,
            fs_group=template.fs_group,
            variables=self.environment(container),
        )

    def _expanded(self, container: Container) -> list[str]:
        """A container's command with the values of variables in place of $(NAME), as Kubernetes expands
        it."""
        expanded = list(container.command)
        for name, value in self.environment(container).items():
            expanded = [word.replace(f"$({name})", value) for word in expanded]
        assert not [word for word in expanded if "$(" in word], f"{self.name}: unknown variables"
        return expanded

    def environment(self, container: Container) -> dict[str, str]:
        """The variables of its image and manifest."""
        return self._runtime.variables(container.image) | {
            variable.name: self._value(variable) for variable in container.variables
        }

    def _value(self, variable: Variable) -> str:
        if variable.value is not None:
            return variable.value
        known = {"status.podIP": self.address, "metadata.name": self.name}
        assert variable.field in known, f"{variable.name} is of {variable.field}"
        return known[variable.field]

    async def _probe_always(self) -> None:
        """The startup probe until it succeeds, then liveness and readiness."""
        container = self.template.container
        if container.startup is not None:
            began = time.monotonic()
            while not await self._asked(container.startup):
                waited_s = time.monotonic() - began
                assert waited_s < container.startup.fails_after_s, self.why(f"{self.name} does not start")
                await asyncio.sleep(_ASKS_S)
        async with asyncio.TaskGroup() as group:
            if container.liveness is not None:
                group.create_task(self._follow(container.liveness, self._alive))
            if container.readiness is not None:
                group.create_task(self._follow(container.readiness, self._set_ready))

    async def _follow(self, probe: Probe, report: Callable[[bool], None]) -> None:
        good = time.monotonic()
        while not self.terminating:
            if await self._asked(probe):
                good = time.monotonic()
                report(True)
            elif time.monotonic() - good > probe.fails_after_s:
                report(False)
            await asyncio.sleep(_ASKS_S)

    def _alive(self, alive: bool) -> None:
        if not alive:
            assert self.may_restart, self.why(f"{self.name} fails its liveness probe")
            assert self._process is not None
            self._process.kill()

    def _set_ready(self, ready: bool) -> None:
        self.ready = ready

    async def _asked(self, probe: Probe) -> bool:
        """True if the probe succeeds."""
        port = self.template.container.ports[probe.port]
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
            async with asyncio.timeout(probe.timeout_s):
                return await asks(self.address, port, probe.path)
        return False

    async def until_ready(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not self.ready:
            self.check()
            assert time.monotonic() < deadline, self.why(f"{self.name} is not ready")
            await asyncio.sleep(0.02)

    def check(self) -> None:
        """Raises what a probe has found."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def delete(self) -> Ended:
        """preStop, SIGTERM, and SIGKILL at the end of the grace period, which counts from now."""
        assert self._process is not None
        began, self.terminating = time.monotonic(), True
        asyncio.get_running_loop().call_later(_FORWARDED_S, self._set_ready, False)
        if self.template.container.pre_stop:
            code, output = await self.execute(self.template.container.pre_stop, self.template.grace_s)
            assert code == 0, output
        if (pid := self._inner_pid()) is not None:
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(began + self.template.grace_s - time.monotonic()):
                await self._process.wait()
        after_s = time.monotonic() - began
        code = await self.kill()
        return Ended(code, after_s)

    async def kill(self) -> int:
        """Ends it at once if it runs; its exit code."""
        assert self._process is not None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        root = self._root(self.template.container, self.address)
        await asyncio.to_thread(self._runtime.remove, root)
        if self._process.returncode is None:
            self._process.kill()  # `--kill-child` takes process 1 along, and the kernel all others
        code = await self._process.wait()
        for name, volume in self.template.volumes.items():
            if isinstance(volume, EmptyDir):
                unmount(self._folder / "volumes" / name)
        return code

    async def ended(self, within_s: float) -> int:
        """Waits for the end of a pod that ends by itself; its exit code."""
        assert self._process is not None
        async with asyncio.timeout(within_s):
            return await self._process.wait()

    async def execute(self, command: Sequence[str], within_s: float) -> tuple[int, str]:
        """Runs a command in the container: exit code and output."""
        root = self._root(self.template.container, self.address)
        process = await asyncio.create_subprocess_exec(
            *self._runtime.exec_command(root, self.pid, command),
            env=root.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()


async def asks(host: str, port: int, path: str | None) -> bool:
    """A probe: a GET answered with 200 to 399, or a connection. Raises OSError where there is none."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if path is None:
            return True
        named = join_address(host, port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {named}\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.readline()).split()
        return 200 <= int(status[1]) < 400
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def memory_of(pids: Mapping[int, str] | Sequence[int]) -> int:
    """Bytes that the processes take, what they share divided among them."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
