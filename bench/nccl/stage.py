"""Processes on GPUs that are given commands, stopped and killed, for `bench.nccl`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from baton.base.process_stat import process_stat

# By mode: MB and repetitions that take most of a second, to be interrupted in the middle.
_LONG = {"p2p": (4096, 60), "legacy": (4096, 60), "shm": (512, 20), "net": (128, 10)}
_MODES: dict[str, dict[str, str]] = {
    "p2p": {},
    "legacy": {"NCCL_CUMEM_ENABLE": "0"},
    "shm": {"NCCL_P2P_DISABLE": "1"},
    "net": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}

Facts = dict[str, Any]


class SilentError(RuntimeError):
    """An end did not answer in time."""


class Peer:
    """An end that gets commands over a socket; forked, so that torch is imported once."""

    def __init__(self, device: int, mode: str, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        self.log = folder / f"nccl-{time.monotonic_ns()}.log"
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_become_end, args=(device, _MODES[mode], theirs, self.log))
        self._process.start()
        theirs.close()
        self._socket = ours
        self._received = b""

    def send_command(self, do: str, **what: object) -> None:
        self._socket.sendall(json.dumps({"do": do, **what}).encode() + b"\n")

    def receive(self, timeout: float = 10) -> Facts:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self._socket.recv(65536)
            except TimeoutError:
                raise SilentError(f"no answer for {timeout} s") from None
            if not part:
                raise SilentError("the process has ended")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer: Facts = json.loads(line)
        return answer

    def call(self, do: str, timeout: float = 10, **what: object) -> Facts:
        self.send_command(do, **what)
        return self.receive(timeout)

    def stop(self) -> str:
        """Stops the process; its state according to the kernel ("T")."""
        self._signal(signal.SIGSTOP)
        time.sleep(0.002)
        assert self._process.pid is not None
        stat = process_stat(self._process.pid)
        return stat.state if stat else "ended"

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> float:
        """Kills the process; the time in s until it is gone, its GPU context included."""
        begun = time.monotonic()
        self._signal(signal.SIGKILL)
        self._process.join(10)
        return round(time.monotonic() - begun, 3)

    def end(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._socket.close()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _become_end(device: int, mode: dict[str, str], channel: socket.socket, log: Path) -> None:
    os.environ.update(mode)
    os.environ["NCCL_DEBUG"] = "INFO"
    from bench.nccl.end import serve

    serve(device, channel, log)


class Stage:
    """The ends of one case, closed with it."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.long_mb, self.long_times = _LONG[mode]
        self._mode = mode
        self._folder = folder
        self._peers: list[Peer] = []

    def peer(self, device: int) -> Peer:
        peer = Peer(device, self._mode, self._folder)
        self._peers.append(peer)
        return peer

    def end(self) -> None:
        for peer in self._peers:
            peer.end()
