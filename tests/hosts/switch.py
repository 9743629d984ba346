"""A switch in user space, for kernels without netem: a TAP device for each host, and rules between each two.

python -m tests.hosts.switch     JSON commands on stdin, a line each; answers on stdout; ends with stdin

{"port": "d1"}                                          makes the TAP device d1
{"rule": ["p1", "d1"], "drop": true, ...}               what p1 sends to d1: drop, delay_s, bytes_s, largest
{"firewall": "d1", "allowed": [[["10.0.0.11"], [50060]]]}    connections to d1: sources ([]: any) and ports
{"counts": true}                                        frames passed and dropped, by reason
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import selectors
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.hosts.frames import BROADCAST, opening

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65536
# What may wait between two hosts; more is dropped, as by a switch whose buffers are full.
_MOST_WAITING = 4 * 1024 * 1024
_MOST_AT_ONCE = 64
Address = bytes


@dataclass(slots=True)
class Rule:
    """A rule for frames from one host to another. `largest`: bytes of the largest frame that passes."""

    drop: bool = False
    delay_s: float = 0.0
    bytes_s: float | None = None
    largest: int | None = None
    free_at: float = 0.0
    waiting: int = 0


@dataclass
class Switch:
    """Forwards frames between TAP devices until its stdin ends."""

    rules: dict[tuple[str, str], Rule] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _taps: dict[str, int] = field(default_factory=dict)
    _learnt: dict[Address, str] = field(default_factory=dict)
    # host -> sources and ports to which connections may be opened
    _firewalls: dict[str, list[tuple[set[str], set[int]]]] = field(default_factory=dict)
    _later: list[tuple[float, int, Rule, str, bytes]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        unread = b""
        while True:
            pause = max(0.0, self._later[0][0] - time.monotonic()) if self._later else None
            for key, _ in self._selector.select(pause):
                if key.data is not None:
                    self._read(key.data)
                    continue
                received = os.read(sys.stdin.fileno(), _FRAME_BYTES)
                if not received:
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    print(json.dumps(self._obey(json.loads(line))), flush=True)
            self._send_what_is_due()

    def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command:
            case {"port": name}:
                self._close(name)
                self._taps[name] = _tap(name)
                self._selector.register(self._taps[name], selectors.EVENT_READ, name)
            case {"rule": [source, target], **settings}:
                self.rules[source, target] = Rule(**settings)
            case {"firewall": host, "allowed": allowed}:
                self._firewalls[host] = [(set(sources), set(ports)) for sources, ports in allowed]
            case {"counts": _}:
                return dict(self.counts)
        return {}

    def _read(self, source: str) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                frame = os.read(self._taps[source], _FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the device has ended with its host's namespace
                return self._close(source)
            self._learnt[frame[6:12]] = source
            known = None if frame[0] & BROADCAST else self._learnt.get(frame[:6])
            for target in self._taps if known is None else (known,):
                if target != source:
                    self._forward(source, target, frame)

    def _close(self, name: str) -> None:
        if (device := self._taps.pop(name, None)) is not None:
            self._selector.unregister(device)
            os.close(device)

    def _forward(self, source: str, target: str, frame: bytes) -> None:
        rule = self.rules.get((source, target))
        if self._is_refused(target, frame):
            self.counts["firewall"] += 1
        elif rule is None:
            self._send(target, frame)
        elif rule.drop:
            self.counts["cut"] += 1
        elif rule.largest is not None and len(frame) > rule.largest:
            self.counts["too large"] += 1
        elif rule.waiting + len(frame) > _MOST_WAITING:
            self.counts["full"] += 1
        else:
            now = time.monotonic()
            rule.free_at = max(rule.free_at, now) + (len(frame) / rule.bytes_s if rule.bytes_s else 0.0)
            rule.waiting += len(frame)
            heapq.heappush(self._later, (rule.free_at + rule.delay_s, next(self._order), rule, target, frame))

    def _is_refused(self, target: str, frame: bytes) -> bool:
        allowed = self._firewalls.get(target)
        opened = None if allowed is None else opening(frame)
        if allowed is None or opened is None:
            return False
        return not any(
            opened.port in ports and (not sources or opened.source in sources) for sources, ports in allowed
        )

    def _send_what_is_due(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _, _, rule, target, frame = heapq.heappop(self._later)
            rule.waiting -= len(frame)
            self._send(target, frame)

    def _send(self, target: str, frame: bytes) -> None:
        try:
            os.write(self._taps[target], frame)
        except (KeyError, OSError):  # the device is down, or gone with its host
            self.counts["down"] += 1
        else:
            self.counts["passed"] += 1


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


if __name__ == "__main__":
    Switch().run()
