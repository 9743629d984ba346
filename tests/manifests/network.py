"""The cluster's network: a bridge, to which each pod is connected by a pair of veth interfaces.

This process is in a network namespace of the cluster's own (`namespace`), where it may make interfaces.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import os
import subprocess
import time
from dataclasses import dataclass

_BRIDGE = "pods"
_START_S = 10.0


@dataclass(frozen=True)
class Family:
    """Ranges of a cluster's addresses. `pod`, `service`: the start of each address; `bits`: of the pods'
    network, `all_bits`: of an address; `more`: options of an address."""

    pod: str
    service: str
    bits: int
    all_bits: int
    more: tuple[str, ...] = ()

    @property
    def gateway(self) -> str:
        """The address of this process in the pods' network."""
        return f"{self.pod}1"


IPV4 = Family("10.244.0.", "10.96.0.", 16, 32)
# Without a search for duplicates, for which a new address waits.
IPV6 = Family("fd00:244::", "fd00:96::", 64, 128, ("nodad",))


def make_bridge() -> None:
    """Call it once, before the first pod."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", _BRIDGE, "type", "bridge")
    _ip("link", "set", _BRIDGE, "up")
    for family in (IPV4, IPV6):
        _ip("addr", "add", f"{family.gateway}/{family.bits}", "dev", _BRIDGE, *family.more)


def join_commands(address: str) -> list[str]:
    """Shell commands by which a pod gets its address."""
    family = IPV6 if ":" in address else IPV4
    return [
        "until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done",
        f"ip addr add {address}/{family.bits} dev eth0 {' '.join(family.more)}",
        "ip link set eth0 up",
        "ip link set lo up",
        f"ip route add default via {family.gateway}",
    ]


class Network:
    """Gives out addresses of one family. Pods and Services have a range each."""

    def __init__(self, family: Family = IPV4) -> None:
        self._family = family
        self._pods = itertools.count(2)
        self._services = itertools.count(1)
        self._links = itertools.count(1)

    def pod_address(self) -> str:
        return f"{self._family.pod}{next(self._pods)}"

    def service_address(self) -> str:
        """An address of this process."""
        address = f"{self._family.service}{next(self._services)}"
        _ip("addr", "add", f"{address}/{self._family.all_bits}", "dev", _BRIDGE, *self._family.more)
        return address

    async def connect(self, address: str, pid: int) -> None:
        """Connects the network namespace that process `pid` is about to make."""
        deadline = time.monotonic() + _START_S
        while not _has_own_network(pid):
            assert time.monotonic() < deadline, "no network namespace"
            await asyncio.sleep(0.002)
        name = f"veth{next(self._links)}"
        # The same for a container that is started again, so that no neighbour has to learn another.
        mac = "02:00:" + ":".join(f"{byte:02x}" for byte in ipaddress.ip_address(address).packed[-4:])
        peer = ("peer", "name", "eth0", "address", mac, "netns", str(pid))
        _ip("link", "add", name, "type", "veth", *peer)
        _ip("link", "set", name, "master", _BRIDGE, "up")


def _has_own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)
