"""Starts the engine process with its configuration, one end of a socket pair, and the shared memory; detects
by its heartbeat that it hangs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.base.errors import BatonError
from baton.base.parent_death import tied
from baton.base.process_watch import ProcessWatch
from baton.base.python_module import python_module
from baton.device.nvidia_libraries import EAGER_LOADING, ENVIRONMENT, NO_RUNTIME
from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.device_watchdog import HUNG_S, HUNG_STEPS
from baton.engine.model.source import CONFIG_FILES, resolve_model
from baton.engine.shared_memory.heartbeat import Heartbeat
from baton.engine.shared_memory.mask_board import MaskBoard
from baton.model_spec.model_files import ConfigFile, ModelLimits
from baton.v1.types_pb2 import WorkerIdentity
from services.common.config.worker import EngineConfig, WorkerConfig
from services.common.engine.channel import FrontEnd
from services.common.engine.launch import EngineLaunch
from services.common.engine.rings import worker_rings
from services.grammar.client import mask_processes
from services.grammar.process_client import MaskSetup

ENGINE_PROGRAM: tuple[str, ...] = python_module("services.worker.engine.main")
_STOP_S = 5.0
_HEARTBEAT_POLL_S = 0.1


@dataclass(slots=True)
class EngineHandle:
    """A started engine: its process, the channel to it, and the memory that both map."""

    process: subprocess.Popen[bytes]
    channel: FrontEnd
    memory: SharedMemory
    # What masks are computed with; None where the model's folder cannot be read.
    masks: MaskSetup | None
    # Set by the engine when decode steps have ended.
    stepped: Wakeup

    def abort(self) -> None:
        """Kills the engine: while it loads it reads no commands, and one that hangs would never end."""
        self.process.kill()

    async def stop(self) -> int:
        """Waits for an engine that was sent a stop command, and kills it where it does not end. Returns its
        exit code."""
        self.channel.close()
        self.stepped.close()
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
    rings = worker_rings(config.engine)
    memory = SharedMemory.create(f"baton-{config.name}", rings.size)
    rings.check(memory)
    # It may download the configuration. The thread ends with it: the event loop's own threads are not to
    # start before the front asks for `batch_wakeups`, nor may the engine inherit that.
    with ThreadPoolExecutor(max_workers=1) as thread:
        masks = await asyncio.get_running_loop().run_in_executor(thread, mask_setup, config, memory)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stepped = Wakeup()
    with theirs:
        launch = EngineLaunch(
            worker=config.model_copy(update={"state": None}),  # the engine does not use Redis
            incarnation=identity.incarnation.hex(),
            started_ns=identity.started_ns,
            channel_fd=theirs.fileno(),
            memory_fd=memory.fd,
            masks_fd=None if masks is None else masks.board.fd,
            stepped_fd=stepped.fileno(),
        )
        process = _spawn(program, launch)
    return EngineHandle(process, await FrontEnd.open(ours), memory, masks, stepped)


def mask_setup(config: WorkerConfig, rings: SharedMemory) -> MaskSetup | None:
    """The mask board and all else that mask processes need; None where the model's folder cannot be read,
    which the engine reports."""
    try:
        folder = resolve_model(config.model, CONFIG_FILES)  # the engine fetches the rest
        vocab_size = ModelLimits.read(ConfigFile.read(folder / "config.json")).vocab_size
    except BatonError:
        return None
    sizes = worker_rings(config.engine)
    _, board = MaskBoard.create(sizes.slots, vocab_size)
    # Prefill asks for the mask of each request's first token alone.
    processes = 1 if config.role == "prefill" else mask_processes(sizes.slots)
    return MaskSetup(folder, vocab_size, sizes, rings, board, processes=processes)


def engine_environment(engine: EngineConfig) -> dict[str, str]:
    """Variables of an engine process, which its libraries read before any of its code runs.

    A kernel that is loaded when it is first launched waits for its device, which may be waiting for another
    whose kernel is launched next: engines of several devices load all kernels at once. Nothing calls the
    runtime before `load_kernels` does, which measures what that takes.
    """
    return ENVIRONMENT | (dict([EAGER_LOADING, NO_RUNTIME]) if engine.tensor_parallel > 1 else {})


def _spawn(program: Sequence[str], launch: EngineLaunch) -> subprocess.Popen[bytes]:
    inherited = launch.channel_fd, launch.memory_fd, launch.masks_fd, launch.stepped_fd
    process = subprocess.Popen(
        tied(program),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # the front's stdout belongs to its parent protocol
        pass_fds=tuple(fd for fd in inherited if fd is not None),
        env={**os.environ, **engine_environment(launch.worker.engine)},
    )
    assert process.stdin is not None
    process.stdin.write(launch.model_dump_json().encode())
    process.stdin.close()
    return process


async def detect_hang(heartbeat: Heartbeat, watch: ProcessWatch) -> str:
    """Returns the reason once the engine counts as hung; never returns while it makes progress.

    Hung means no progress for 2 s and for ten times the expected duration of its current step, though the
    process could run; 20 s in any case. Time in which this process itself did not run does not count.
    """
    turns = heartbeat.read().turns
    while True:
        beat = heartbeat.read()
        if beat.turns != turns:
            turns = beat.turns
            watch.progressed()
        else:
            watch.look()
            if watch.hangs(max(HUNG_S, HUNG_STEPS * beat.expected_step_s)):
                return f"the engine made no progress for {watch.silent_s:.1f} s"
        await asyncio.sleep(_HEARTBEAT_POLL_S)
