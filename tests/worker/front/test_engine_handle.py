"""Detection of a hanging engine, the front's answers while the engine is busy, and what it starts."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Literal

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_watch import Activity, ProcessWatch
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.heartbeat import HEARTBEAT_BYTES, Heartbeat
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, ReadyEvent
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import DescribeRequest, Load
from services.common.config.worker import EngineConfig, WorkerConfig
from services.common.processes.drain import Drain
from services.worker.front.engine_handle import detect_hang, engine_environment, mask_setup
from services.worker.front.worker_servicer import WorkerServicer
from tests.grammar.model import VOCAB_SIZE, make_folder


async def test_a_heartbeat_that_stands_still_for_two_seconds_is_a_hang() -> None:
    heartbeat = Heartbeat(SharedMemory.create("test-heartbeat", HEARTBEAT_BYTES), 0)
    watching = asyncio.create_task(detect_hang(heartbeat, _watch(wanting=False)))
    for _ in range(6):
        heartbeat.beat(0.005)
        await asyncio.sleep(0.1)
    stands_since = time.monotonic()
    async with asyncio.timeout(10):
        reason = await watching
    assert time.monotonic() - stands_since > 1.8
    assert "the engine made no progress for 2." in reason


async def test_a_starved_engine_is_not_hung() -> None:
    heartbeat = Heartbeat(SharedMemory.create("test-heartbeat", HEARTBEAT_BYTES), 0)
    watching = asyncio.create_task(detect_hang(heartbeat, _watch(wanting=True)))
    heartbeat.beat(0.005)
    await asyncio.sleep(3.0)
    assert not watching.done()
    watching.cancel()


def _watch(*, wanting: bool) -> ProcessWatch:
    """The watch of an engine that uses no processor time; `wanting`: it waits for a processor."""
    return ProcessWatch(1, look_at=lambda _: Activity(1.0, wanting))


async def test_a_step_that_should_take_longer_is_waited_for() -> None:
    heartbeat = Heartbeat(SharedMemory.create("test-heartbeat", HEARTBEAT_BYTES), 0)
    watching = asyncio.create_task(detect_hang(heartbeat, _watch(wanting=False)))
    heartbeat.beat(0.5)
    await asyncio.sleep(3.0)
    assert not watching.done()
    watching.cancel()
    assert heartbeat.read() == (1, 0.5)


@pytest.mark.parametrize(("role", "processes"), [("prefill", 1), ("decode", 4), ("both", 4)])
def test_mask_processes_by_role(
    role: Literal["prefill", "decode", "both"],
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    memory = SharedMemory.create("rings", 64)
    setup = mask_setup(WorkerConfig(name="w", role=role, model=str(make_folder(tmp_path))), memory)
    assert setup is not None
    assert (setup.processes, setup.vocab_size) == (processes, VOCAB_SIZE)


class SlowEngine:
    """Answers when it is let, and counts what it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = asyncio.Event()
        self.gone = False

    async def call(self, command: EngineCommand) -> EngineEvent:
        self.asked += 1
        await self.answers.wait()
        if self.gone:
            raise BatonError(ErrorKind.UNAVAILABLE, "the engine has ended")
        return EngineEvent(load=Load(slots=8, free_slots=self.asked))


class AbortedError(Exception):
    """The exception that a real context raises."""


class Context:
    async def abort(self, code: object, details: str, **rest: object) -> None:
        raise AbortedError(details)


async def test_describe_does_not_wait_for_a_busy_engine() -> None:
    """Describe answers with the last known load, and has one question at a time with the engine."""
    engine, request, context = SlowEngine(), DescribeRequest(), Context()
    servicer = WorkerServicer(
        engine,  # type: ignore[arg-type]
        WorkerIdentity(name="w"),
        ReadyEvent(),
        Drain(),
        lambda: None,
        load_s=0.01,
    )
    for _ in range(5):
        answer = await servicer.Describe(request, context)  # type: ignore[arg-type]
        assert (answer.identity.name, answer.load.slots) == ("w", 0)
    assert engine.asked == 1
    engine.answers.set()
    assert (await servicer.Describe(request, context)).load.free_slots == 1  # type: ignore[arg-type]
    assert (await servicer.Describe(request, context)).load.free_slots == 2  # type: ignore[arg-type]
    engine.gone = True
    with pytest.raises(AbortedError, match="the engine has ended"):
        await servicer.Describe(request, context)  # type: ignore[arg-type]


def test_kernels_of_several_devices_are_loaded_before_any_waits() -> None:
    one, two = (engine_environment(EngineConfig(tensor_parallel=devices)) for devices in (1, 2))
    assert two == one | {"CUDA_MODULE_LOADING": "EAGER", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    assert "CUDA_MODULE_LOADING" not in one
