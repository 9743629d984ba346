"""A worker whose model takes a fixed time per step and emits the time: what is left is the cost of Baton
itself.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.slot_state import SlotState
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.reference_decode_loop import ReferenceDecodeLoop
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.model.weights import weight_places
from baton.engine.prefill.reference_pass import ReferencePass
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import Finish
from baton.model_spec.model_files import TokenizerFiles
from bench.cluster.fake_model_folder import CONTEXT, VOCAB
from services.common.config.worker import CPU_SLOTS, EngineConfig, WorkerConfig
from services.worker.engine.startup.model_loader import LoadedModel

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

    def forward(self, rows: Rows, cache: KVCache, between_layers: Callable[[], None] | None = None) -> Tensor:
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

    def _advance(self, rows: Tensor, between_layers: Callable[[], None] | None) -> None:
        state, count = self._state, rows.numel()
        position = state.position[rows].long()
        steps = Rows(rows, position, list(range(count + 1)), ())
        self._reference.forward(steps, self._cache, between_layers)
        token = ticks()
        going = position + 2 < state.end[rows]
        state.position[rows] += 1
        generations, slots = state.generation[rows].tolist(), rows.tolist()
        self.positions.publish(slots, generations, state.position[rows].tolist())
        state.active[rows] = going
        finish = [Finish.NONE if goes else Finish.LENGTH for goes in going.tolist()]
        self.ring.write([token] * count, slots, generations, finish)
        self._tokens_decoded += count


def decode_loop(
    model: Model, cache: KVCache, state: SlotState, rings: SharedRings, memory: SharedMemory, **_: object
) -> DecodeLoop:
    """Stands in for `baton.engine.executor.decode_factory.decode_loop`."""
    box, ring, positions = rings.mailbox(memory), rings.writer(memory), rings.positions(memory)
    return FakeDecodeLoop(_fake(), cache, state, box, ring, positions)


def prompt_pass(model: Model, cache: KVCache, most_rows: int, **_: object) -> ReferencePass:
    """Stands in for `baton.engine.prefill.factory.prompt_pass`."""
    return ReferencePass(_fake(), cache)


def _fake() -> FakeModel:
    return FakeModel(float(os.environ[STEP_VARIABLE]) / 1e3)


def load(model: str, engine: EngineConfig) -> LoadedModel:
    """Replaces the loaded model; `model` is a folder that `write_model` created."""
    config = load_config(Path(model))
    layout = config.layout(engine.block_tokens_on("cpu"), "float32")
    precision = Precision.of(torch.float32)
    slots = engine.slots or CPU_SLOTS
    blocks = engine.kv_blocks or slots * layout.groups[0].blocks_for(CONTEXT) + 1
    return LoadedModel(
        config=config,
        decoder=Model(config, weight_places(config, "cpu", torch.float32), layout, "cpu", precision),
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
    )


def _run_worker() -> int:
    import uvloop

    from services.common.processes.child_protocol import run_child
    from services.worker.front.process import serve

    program = (sys.executable, "-m", "bench.cluster.fake_engine", "engine")
    return run_child(WorkerConfig, partial(serve, engine_program=program), uvloop.new_event_loop)


def _run_engine() -> int:
    from services.worker.engine import process as engine_process
    from services.worker.engine.startup import prefill_setup

    engine_process.decode_loop = decode_loop  # type: ignore[attr-defined]
    prefill_setup.prompt_pass = prompt_pass  # type: ignore[attr-defined]
    return engine_process.main(load)


if __name__ == "__main__":
    code = {"worker": _run_worker, "engine": _run_engine}[sys.argv[1]]()
    sys.stderr.flush()
    os._exit(code)  # like services.worker.engine.main
