"""Engines whose model takes a fixed time per step and emits the time: what is left is the cost of Baton
itself. In a worker, and both kinds of steps bare in this process, without a cluster.

    python -m bench.cluster.fake_engine worker       a front with that engine, WorkerConfig on stdin
    python -m bench.cluster.fake_engine engine       that engine

Everything but the model is real: fronts, channel, slots, rings, links. A decode step samples nothing, since
on a GPU that is no work of the host. Each token id is the time of its step in ticks of `TICK_NS`, so that a
receiver on this machine knows its age.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import Grant, SlotPool
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.reference_decode_loop import ReferenceDecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.kv_cache import BlockMemory, KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.model.weight_places import weight_places
from baton.engine.prefill.reference_pass import ReferencePass
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.sequence import Sequence as PromptSequence
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import Finish
from baton.engine.speculation.verification_rows import VerificationRows
from baton.model_spec.model_files import TokenizerFiles
from bench.engine_driver import admit, decode_step, executor_of, prefill_step
from bench.model_folders import CONTEXT, VOCAB
from services.common.config.worker import CPU_SLOTS, EngineConfig, WorkerConfig
from services.worker.engine.startup.model_loader import LoadedModel
from services.worker.engine.startup.prefill_setup import prefill_steps

STEP_VARIABLE = "BATON_FAKE_STEP_MS"
TICK_NS = 50_000  # 205 ms until a clock of VOCAB ticks wraps
_LAYERS = 10


def ticks() -> int:
    """The machine's monotonic clock, the same in every process, as a token id."""
    return time.monotonic_ns() // TICK_NS % VOCAB


def age_ms(token: int, received_ns: int) -> float:
    """Age in ms of the token's step at `received_ns`; correct below 205 ms."""
    return (received_ns // TICK_NS - token) % VOCAB * TICK_NS / 1e6


class FakeModel(ReferenceModel):
    """Waits, layer by layer, until its step has taken `step_s`, and then emits the time."""

    def __init__(self, step_s: float) -> None:
        self.device = torch.device("cpu")
        self._step_s = step_s
        self._last = 0.0

    def forward(
        self, rows: Rows, cache: BlockMemory, between_layers: Callable[[], None] | None = None
    ) -> Tensor:
        now = time.monotonic()
        # Consecutive decode steps are evenly spaced, like replays of a graph; other steps take `step_s` from
        # now.
        decodes = len(rows.query_start) == rows.token_ids.shape[0] + 1
        beats = decodes and self._last + 2 * self._step_s > now
        self._last = max(self._last + self._step_s, now) if beats else now + self._step_s
        for left in reversed(range(_LAYERS)):
            layer_ends = self._last - left * self._step_s / _LAYERS
            time.sleep(max(0.0, layer_ends - time.monotonic()))
            if between_layers is not None:
                between_layers()
        return torch.zeros(rows.token_ids.shape[0], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(hidden.shape[0], VOCAB)
        logits[:, ticks()] = 1
        return logits


class FakeDecodeLoop(ReferenceDecodeLoop):
    """The plain loop's admissions, cancels and ends; a step's token is the time, for all rows."""

    def _advance(self, rows: VerificationRows, between_layers: Callable[[], None] | None) -> None:
        state, of, count = self.state, rows.slots, len(rows.slots)
        position = state.position[of].long()
        steps = Rows(of, position, list(range(count + 1)), ())
        self._reference.forward(steps, self._cache, between_layers)
        token = ticks()
        going = position + 2 < state.end[of]
        state.position[of] += 1
        generations, slots = state.generation[of].tolist(), of.tolist()
        self.progress.publish(slots, generations, state.position[of].tolist())
        state.active[of] = going
        finish = [Finish.NONE if goes else Finish.LENGTH for goes in going.tolist()]
        self.ring.write([token] * count, slots, generations, finish)
        self._tokens_decoded += count


def decode_loop(
    ranks: Sequence[Model],
    cache: BlockMemory,
    state: SlotState,
    rings: SharedRings,
    memory: SharedMemory,
    **_: object,
) -> DecodeLoop:
    """Builds a loop that computes nothing, in place of
    `baton.engine.executor.decode_factory.decode_loop`."""
    box, ring, progress = rings.mailbox(memory), rings.writer(memory), rings.progress(memory)
    return FakeDecodeLoop(_fake(), cache, state, box, ring, progress)


def prompt_pass(ranks: Sequence[Model], cache: BlockMemory, most_rows: int, **_: object) -> ReferencePass:
    """Builds a pass that computes nothing, in place of `baton.engine.prefill.factory.prompt_pass`."""
    return ReferencePass(_fake(), cache)


def _fake() -> FakeModel:
    return FakeModel(float(os.environ[STEP_VARIABLE]) / 1e3)


def load(model: str, engine: EngineConfig) -> LoadedModel:
    """Replaces the loaded model; `model` is a folder that `write_fake_model` created."""
    config = load_config(Path(model))
    layout = config.layout(engine.block_tokens_on("cpu"), "float32")
    precision = Precision.of(torch.float32)
    slots = engine.slots or CPU_SLOTS
    blocks = engine.kv_blocks or slots * layout.groups[0].blocks_for(CONTEXT) + 1
    return LoadedModel(
        config=config,
        ranks=(Model(config, weight_places(config, "cpu", torch.float32), layout, "cpu", precision),),
        cache=KVCache(layout, blocks, "cpu"),
        pools=BlockPools(layout, [blocks]),
        slots=slots,
        max_context_tokens=config.max_position_embeddings,
        max_logprobs=engine.max_logprobs,
        device=torch.device("cpu"),
        fingerprint=layout.fingerprint(b"fake"),
        exact=True,
        checkpoint=b"fake",
        tokenizer=TokenizerFiles.read(Path(model)).digest,
        weight_format="float32",
        chunk_tokens=engine.chunk_tokens_on("cpu"),
    )


def _run_worker() -> int:
    import uvloop

    from services.common.processes.child_protocol import run_child
    from services.worker.front.process import serve

    program = (sys.executable, "-m", "bench.cluster.fake_engine", "engine")
    return run_child(WorkerConfig, partial(serve, engine_program=program), uvloop.new_event_loop)


def _run_engine() -> int:
    from services.worker.engine import assembly
    from services.worker.engine import process as engine_process
    from services.worker.engine.startup import prefill_setup

    assembly.decode_loop = decode_loop  # type: ignore[attr-defined]
    prefill_setup.prompt_pass = prompt_pass  # type: ignore[attr-defined]
    return engine_process.main(load)


class BarePrefill:
    """A prefill worker's scheduler and loop."""

    def __init__(self, model: LoadedModel, engine: EngineConfig) -> None:
        self._executor = executor_of(prefill_steps(model, engine))
        self._scheduler = self._executor.prompts.scheduler

    def replay(self, sent_ns: Sequence[int], prompt: int) -> list[float]:
        """TTFT in ms of prompts of `prompt` tokens that arrive at these times, in order."""
        offset = time.monotonic_ns() - sent_ns[0]
        due = deque(sent + offset for sent in sent_ns)
        came: dict[PromptSequence, int] = {}
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
        self._loop = decode_loop(model.ranks, model.cache, state, rings, memory)
        pool = SlotPool(slots)
        for _ in range(slots):
            self._admit(model, pool, _sequence(prompt, max_tokens))
        self._step()  # applies the admissions

    def _admit(self, model: LoadedModel, pool: SlotPool, sequence: PromptSequence) -> None:
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


def _sequence(prompt: int, max_tokens: int) -> PromptSequence:
    return PromptSequence(tuple(range(prompt)), prompt, SamplingParams(), Limits(max_tokens))


if __name__ == "__main__":
    code = {"worker": _run_worker, "engine": _run_engine}[sys.argv[1]]()
    sys.stderr.flush()
    os._exit(code)  # like services.worker.engine.main
