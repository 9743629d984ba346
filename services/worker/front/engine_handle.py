"""Starts the engine process with its configuration, one end of a socket pair, and the shared memory."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from baton.device.nvidia_libraries import ENVIRONMENT
from baton.device.shared_memory import SharedMemory
from baton.engine.rings.layout import SharedRings
from baton.parent_death import tied
from baton.v1.types_pb2 import WorkerIdentity
from services.common.config.worker import WorkerConfig
from services.common.engine.channel import FrontEnd
from services.common.engine.launch import EngineLaunch

ENGINE_PROGRAM: tuple[str, ...] = (sys.executable, "-m", "services.worker.engine.main")
_STOP_S = 5.0


@dataclass(slots=True)
class EngineHandle:
    """A started engine: its process, the channel to it, and the memory both map."""

    process: subprocess.Popen[bytes]
    channel: FrontEnd
    memory: SharedMemory

    def abort(self) -> None:
        """Kills the engine: while it loads it reads no commands, and one that hangs would never end."""
        self.process.kill()

    async def stop(self) -> int:
        """Waits for an engine that was sent a stop command, and kills it where it does not end; its exit
        code."""
        self.channel.close()
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> int:
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(_STOP_S)


async def start_engine(
    config: WorkerConfig, identity: WorkerIdentity, program: Sequence[str]
) -> EngineHandle:
    """Starts the engine process; it sends a ready or a failed event on the channel."""
    rings = SharedRings(config.engine.most_slots, config.engine.max_logprobs)
    memory = SharedMemory.create(f"baton-{config.name}", rings.size)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = _spawn(program, config, identity, theirs, memory)
    return EngineHandle(process, await FrontEnd.open(ours), memory)


def _spawn(
    program: Sequence[str],
    config: WorkerConfig,
    identity: WorkerIdentity,
    channel: socket.socket,
    memory: SharedMemory,
) -> subprocess.Popen[bytes]:
    launch = EngineLaunch(
        worker=config.model_copy(update={"state": None}),  # the engine does not use Redis
        incarnation=identity.incarnation.hex(),
        started_ns=identity.started_ns,
        channel_fd=channel.fileno(),
        memory_fd=memory.fd,
    )
    process = subprocess.Popen(
        tied(program),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # the front's stdout belongs to its parent protocol
        pass_fds=(channel.fileno(), memory.fd),
        env={**os.environ, **ENVIRONMENT},
    )
    assert process.stdin is not None
    process.stdin.write(launch.model_dump_json().encode())
    process.stdin.close()
    return process
