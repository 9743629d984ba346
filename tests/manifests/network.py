"""The cluster's network: a bridge, to which each pod is connected by a pair of veth interfaces.

This process is in a network namespace of the cluster's own (`namespace`), where it may make interfaces.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import time

_BRIDGE, _GATEWAY, _BITS = "pods", "10.244.0.1", 16
_START_S = 10.0


def make_bridge() -> None:
    """Call it once, before the first pod."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", _BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{_GATEWAY}/{_BITS}", "dev", _BRIDGE)
    _ip("link", "set", _BRIDGE, "up")


def join_commands(address: str) -> list[str]:
    """What a pod does to have its address, as shell commands."""
    return [
        "until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done",
        f"ip addr add {address}/{_BITS} dev eth0",
        "ip link set eth0 up",
        "ip link set lo up",
        f"ip route add default via {_GATEWAY}",
    ]


class Network:
    """Gives out addresses. Pods and Services have a range each."""

    def __init__(self) -> None:
        self._pods = itertools.count(2)
        self._services = itertools.count(1)
        self._links = itertools.count(1)

    def pod_address(self) -> str:
        return f"10.244.0.{next(self._pods)}"

    def service_address(self) -> str:
        """An address of this process."""
        address = f"10.96.0.{next(self._services)}"
        _ip("addr", "add", f"{address}/32", "dev", _BRIDGE)
        return address

    async def connect(self, address: str, pid: int) -> None:
        """Connects the network namespace that process `pid` is about to make."""
        deadline = time.monotonic() + _START_S
        while not _has_own_network(pid):
            assert time.monotonic() < deadline, "no network namespace"
            await asyncio.sleep(0.002)
        name = f"veth{next(self._links)}"
        # The same for a container that is started again, so that no neighbour has to learn another.
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        peer = ("peer", "name", "eth0", "address", mac, "netns", str(pid))
        _ip("link", "add", name, "type", "veth", *peer)
        _ip("link", "set", name, "master", _BRIDGE, "up")


def _has_own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)
