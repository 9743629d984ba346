"""The network of the hosts: the switch as a child process, and what it is told."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

_END_S = 10.0


class Network:
    """Ports of the switch by the names of hosts. Runs until `close`."""

    def __init__(self) -> None:
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.switch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports: list[str] = []

    def close(self) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.close()
        self._switch.wait(_END_S)
        assert self._switch.stdout is not None
        self._switch.stdout.close()

    def connect(self, name: str, addresses: Sequence[str], pid: int | None) -> None:
        """Gives the network namespace of process `pid` (None: this one) the interface `name` at a new port,
        with these addresses (with their prefix lengths) and a hardware address made of `name`. It replaces a
        port of that name, whose namespace has ended."""
        self._tell({"port": name})
        enter = [] if pid is None else ["nsenter", "--target", str(pid), "--net"]
        if pid is not None:
            _run(["ip", "link", "set", name, "netns", str(pid)])
        _run([*enter, "ip", "link", "set", "lo", "up"])
        _run([*enter, "ip", "link", "set", name, "address", _hardware(name), "up"])
        for address in addresses:
            more = ["nodad"] if ":" in address else []  # it would wait a second for a duplicate
            _run([*enter, "ip", "addr", "add", address, "dev", name, *more])
        if name not in self.ports:
            self.ports.append(name)

    def rule(self, source: str, target: str, **settings: Any) -> None:
        """Sets the fate of frames from `source` to `target` from now on; without settings they pass."""
        self._tell({"rule": [source, target], **settings})

    def both(self, one: str, others: Collection[str], **settings: Any) -> None:
        """The same rule both ways between `one` and each of `others`."""
        for other in others:
            if other != one:
                self.rule(one, other, **settings)
                self.rule(other, one, **settings)

    @contextlib.contextmanager
    def between(self, one: str, others: Collection[str], **settings: Any) -> Iterator[None]:
        """`both`, while the block runs."""
        self.both(one, others, **settings)
        try:
            yield
        finally:
            self.both(one, others)

    def allow(self, host: str, allowed: Sequence[tuple[Sequence[str], Sequence[int]]]) -> None:
        """Drops connections to `host` except from these sources (none: any) and to these ports."""
        self._tell({"firewall": host, "allowed": allowed})

    def counts(self) -> dict[str, int]:
        """Frames so far, by what became of them."""
        counts: dict[str, int] = self._tell({"counts": True})
        return counts

    def _tell(self, command: dict[str, Any]) -> Any:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(command) + "\n")
        self._switch.stdin.flush()
        return json.loads(self._switch.stdout.readline())


def _hardware(name: str) -> str:
    """The same at each start of a host, so that no neighbour has to learn another."""
    return "02:" + ":".join(f"{byte:02x}" for byte in name.encode()[:5].ljust(5, b"\0"))


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=30, capture_output=True)
