"""The engine's two kinds of steps in this process, without a cluster; a reader only empties the ring."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Ordered

import torch

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import Grant, SlotPool
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.engine.shared_memory.layout import SharedRings
from bench.cluster.fake_engine import decode_loop
from bench.engine_driver import admit, decode_step, executor_of, prefill_step
from services.common.config.worker import EngineConfig
from services.worker.engine.startup.model_loader import LoadedModel
from services.worker.engine.startup.prefill_setup import prefill_steps


class BarePrefill:
    """A prefill worker's scheduler and loop."""

    def __init__(self, model: LoadedModel, engine: EngineConfig) -> None:
        self._executor = executor_of(prefill_steps(model, engine))
        self._scheduler = self._executor.prompts.scheduler

    def replay(self, sent_ns: Ordered[int], prompt: int) -> list[float]:
        """TTFT in ms of prompts of `prompt` tokens that arrive at these times, in order."""
        offset = time.monotonic_ns() - sent_ns[0]
        due = deque(sent + offset for sent in sent_ns)
        came: dict[Sequence, int] = {}
        ttft: list[float] = []
        while due or came:
            if not came:
                time.sleep(max(0.0, (due[0] - time.monotonic_ns()) / 1e9))
            while due and due[0] <= time.monotonic_ns():
                sequence = _sequence(prompt, max_tokens=2)
                self._scheduler.add(sequence)
                came[sequence] = due.popleft()
            for result in prefill_step(self._executor):
                sequence = result.chunk.sequence
                self._scheduler.remove(sequence)
                ttft.append((time.monotonic_ns() - came.pop(sequence)) / 1e6)
        return ttft


class BareDecode:
    """A decode worker's slots and loop, with all slots in use."""

    def __init__(self, model: LoadedModel, slots: int, prompt: int, max_tokens: int) -> None:
        rings = SharedRings(slots)
        memory = SharedMemory.create("bare-engine", rings.size)
        widths = tuple(group.blocks_for(model.max_context_tokens) for group in model.layout.groups)
        state = SlotState(slots, widths, model.config.vocab_size, torch.device(model.device))
        self._reader = rings.reader(memory)
        self._loop = decode_loop(model.decoder, model.cache, state, rings, memory)
        pool = SlotPool(slots)
        for _ in range(slots):
            self._admit(model, pool, _sequence(prompt, max_tokens))
        self._step()  # applies the admissions

    def _admit(self, model: LoadedModel, pool: SlotPool, sequence: Sequence) -> None:
        blocks = model.pools.allocate(sequence.end - 1)
        admit(
            self._loop,
            Grant(*pool.grant(), blocks, sequence.end - 1),
            token_ids=sequence.token_ids,
            prompt_length=sequence.length,
            last_token=0,
            end=sequence.end,
            sampling=sequence.sampling,
            limits=sequence.limits,
        )

    def tpot(self, steps: int) -> float:
        """Mean time of a step in ms; at most max_tokens - 2 steps in total."""
        begun = time.monotonic()
        for _ in range(steps):
            self._step()
        return (time.monotonic() - begun) * 1e3 / steps

    def _step(self) -> None:
        decode_step(self._loop)
        self._reader.read()


def _sequence(prompt: int, max_tokens: int) -> Sequence:
    return Sequence(tuple(range(prompt)), prompt, SamplingParams(), Limits(max_tokens))
