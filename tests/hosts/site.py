"""The cluster of docs/several-hosts.md on hosts of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import httpx
from google.protobuf import json_format

from baton.client import AsyncClient
from baton.v1.admin_pb2 import AdminServiceGetStatusResponse, WorkerState
from models.demo_training.evaluate import DEMO_MODEL
from tests.e2e.support.cluster import leaks
from tests.hosts.addresses import addresses_of
from tests.hosts.host import Host
from tests.hosts.network import Network
from tests.hosts.page import Block, read_blocks
from tests.hosts.services import Service, unit_of

PAGE = "several-hosts.md"
CLIENT = "client"
_CLIENT_ADDRESS = "10.0.0.2"
READY_S = 120.0
_MODEL = "llama"
_ACCEPTED = re.compile(r"^ *(?:ip6? saddr (\{[^}]*\}|\S+) )?tcp dport (\{[^}]*\}|\d+) accept$", re.M)


class Site:
    """Hosts by name, and their services. `text`: what is read from the page passes through it."""

    def __init__(self, folder: Path, network: Network, text: Callable[[str], str]) -> None:
        self._text = text
        self._folder = folder
        self.network = network
        self.addresses = {name: text(address) for name, address in addresses_of(PAGE).items()}
        self.hosts = {name: Host(name, folder, network) for name in self.addresses}
        self.services: dict[str, Service] = {}
        self.names: dict[str, str] = dict(self.addresses)
        self._moves = 0

    @property
    def router(self) -> str:
        """The router's address, as a URL has it."""
        address = self.addresses["router"]
        return f"[{address}]" if ":" in address else address

    @property
    def workers(self) -> list[str]:
        return [name for name in self.hosts if name not in ("redis", "router")]

    def boot(self) -> None:
        """Starts the hosts, with what a distribution and a copied model bring."""
        self.network.connect(CLIENT, [self.prefixed(self._text(_CLIENT_ADDRESS))], None)
        for name, host in self.hosts.items():
            host.start(self.prefixed(self.addresses[name]))
            shutil.copytree(DEMO_MODEL, host.path("/srv/models/llama"))
            host.path("/etc/systemd/system").mkdir(parents=True)
        self.hosts["redis"].path("/etc/redis").mkdir()
        self.write_names()

    def prefixed(self, address: str) -> str:
        return f"{address}/64" if ":" in address else f"{address}/24"

    def write_names(self) -> None:
        """Every host's /etc/hosts: `names`, as NAME and NAME.lab."""
        lines = [f"{address} {name} {name}.lab" for name, address in self.names.items()]
        for host in self.hosts.values():
            host.path("/etc/hosts").write_text(
                "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines]) + "\n"
            )

    async def follow(self, blocks: Iterable[Block]) -> None:
        """Does what the page says, in its order."""
        for block in blocks:
            if block.path is None and any("curl" in command for command in block.commands):
                await self.until_ready()
            for name in block.hosts:
                if block.path is None:
                    await self._run(self.hosts[name], block.commands)
                else:
                    self.hosts[name].path(block.path).write_text(self._text(block.text))

    async def _run(self, host: Host, commands: list[str]) -> None:
        """Commands of one block, in one shell except those of systemd."""
        shell: list[str] = []
        for command in commands:
            if command.startswith("systemctl restart "):
                for unit in command.split()[2:]:
                    self._start(host, unit)
            elif not command.startswith("systemctl enable "):
                shell.append(self._text(command))
        if shell:
            await host.run("\n".join(shell))

    def _start(self, host: Host, unit: str) -> None:
        if unit == "nftables":
            self.read_firewall(host)
            return
        log = self._folder / f"{host.name}.{unit}.log"
        self.services[host.name] = Service(host, unit, unit_of(host, unit), log)
        self.services[host.name].start()

    def read_firewall(self, host: Host) -> None:
        """Has the switch do what the host's /etc/nftables.conf says."""
        text = host.path("/etc/nftables.conf").read_text()
        assert "policy drop" in text
        assert "ct state established,related accept" in text
        allowed = [
            (re.findall(r"[\w.:]+", sources), [int(port) for port in re.findall(r"\d+", ports)])
            for sources, ports in _ACCEPTED.findall(text)
        ]
        assert len(allowed) == text.count("tcp dport")
        self.network.allow(host.name, allowed)

    async def boot_again(self, name: str, address: str | None = None) -> None:
        """Starts a host whose power was off, with the services that are enabled there; `address`: a new one,
        which its own file, the names and Redis' firewall get."""
        if address is not None:
            self._move(name, address)
        await self.services[name].ended()
        self.hosts[name].start(self.prefixed(self.addresses[name]))
        self.hosts[name].reconnect()
        self.services[name].start()

    def another_address(self, name: str) -> str:
        """One that no host has had."""
        self._moves += 1
        return re.sub(r"\d+$", str(100 + self._moves), self.addresses[name])

    def _move(self, name: str, address: str) -> None:
        old, self.addresses[name] = self.addresses[name], address
        self.names[name] = address
        self.write_names()
        variables = self.hosts[name].path("/etc/baton/worker.env")
        variables.write_text(variables.read_text().replace(f"BATON_HOST={old}\n", f"BATON_HOST={address}\n"))
        self.change_file("redis", "/etc/nftables.conf", old, address)
        self.read_firewall(self.hosts["redis"])

    def change_file(self, name: str, path: str, old: str, new: str) -> None:
        """Replaces `old` in a host's file."""
        file = self.hosts[name].path(path)
        text = file.read_text()
        assert old in text, f"{name}: {path} has no {old}"
        file.write_text(text.replace(old, new))

    def client(self) -> AsyncClient:
        (key,) = self.hosts["router"].path("/etc/baton/api-keys").read_text().split()
        return AsyncClient(f"{self.router}:50051", model=_MODEL, api_key=key)

    async def is_ready(self) -> bool:
        async with httpx.AsyncClient(timeout=5) as client:
            with contextlib.suppress(httpx.HTTPError):
                return (await client.get(f"http://{self.router}:8000/ready")).status_code == 200
        return False

    async def until_ready(self) -> None:
        await self._until(self.is_ready, "the router is not ready")

    async def status(self) -> AdminServiceGetStatusResponse:
        """Returns what `baton status` reports on the router's host."""
        output = await self.hosts["router"].run("/opt/baton/bin/baton status --json || true")
        parsed = AdminServiceGetStatusResponse()
        json_format.ParseDict(json.loads(output.splitlines()[-1]), parsed)
        return parsed

    async def worker_addresses(self) -> set[str]:
        """host:port of each worker, as the router knows them."""
        return {one.worker.address for one in (await self.status()).workers}

    async def failed_links(self) -> set[tuple[str, str]]:
        """Names of prefill and decode workers whose links the router takes for failed."""
        workers = (await self.status()).workers
        return {(one.worker.identity.name, link.decode) for one in workers for link in one.failed_links}

    async def until_ready_workers(self) -> None:
        """Waits until every worker is ready."""

        async def ready() -> bool:
            return await self.ready_workers() == set(self.workers)

        await self._until(ready, "not every worker is ready")

    async def ready_workers(self) -> set[str]:
        """Names of those that the router takes for ready."""
        return set(await self._held())

    async def until_whole(self) -> None:
        """Waits until every worker is ready, and nothing is held any more."""
        held: dict[str, list[str]] = {}

        async def whole() -> bool:
            nonlocal held
            held = await self._held()
            return held == {name: [] for name in self.workers}

        await self._until(whole, lambda: f"what workers that are ready hold: {held}")

    async def _held(self) -> dict[str, list[str]]:
        """The resources that each ready worker holds."""
        return {
            one.worker.identity.name: leaks(one.worker.report)
            for one in (await self.status()).workers
            if one.state == WorkerState.WORKER_STATE_READY
        }

    async def _until(self, true: Callable[[], Awaitable[bool]], why: str | Callable[[], str]) -> None:
        deadline = time.monotonic() + READY_S
        while not await true():
            shown = why if isinstance(why, str) else why()
            assert time.monotonic() < deadline, f"{shown}\n{self.logs()}"
            await asyncio.sleep(0.2)

    def logs(self) -> str:
        """The end of each service's log."""
        return "\n".join(
            f"--- {name}\n" + "\n".join(one.log.read_text().splitlines()[-12:])
            for name, one in self.services.items()
            if one.log.exists()
        )

    async def shut_down(self) -> None:
        await asyncio.gather(*(service.stop() for service in self.services.values()))
        for host in self.hosts.values():
            if host.running:
                host.power_off()


@contextlib.asynccontextmanager
async def site(folder: Path, text: Callable[[str], str] = str) -> AsyncIterator[Site]:
    """The page's cluster, ready; `text` changes what is read from the page."""
    network = Network()
    running = Site(folder, network, text)
    try:
        running.boot()
        await running.follow(read_blocks(PAGE))
        yield running
    finally:
        await running.shut_down()
        network.close()
