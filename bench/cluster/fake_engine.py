"""A worker whose model takes a fixed time a step and emits the time of day: what is left is Baton's own cost.

    python -m bench.cluster.fake_engine worker       a front with that engine, WorkerConfig on stdin
    python -m bench.cluster.fake_engine engine       that engine

All but the model is the real thing: fronts, channel, slots, rings, links. A decode step draws nothing, as on
a GPU, where that is no work of the host. Each token's id is the moment of its step in ticks of `TICK_NS`, so
whoever receives it on this machine knows how long it was under way.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.loop import DecodeLoop
from baton.engine.decode.reference_loop import TorchDecodeLoop
from baton.engine.decode.slot_state import SlotState
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.config import ModelConfig
from baton.engine.model.reference import Decoder, Rows
from baton.engine.rings.layout import SharedRings
from baton.engine.rings.output_ring import Finish
from baton.tokenizer_files import TokenizerFiles
from services.common.config.engine import CPU_SLOTS, EngineConfig
from services.common.config.worker import WorkerConfig
from services.worker.engine.startup.model_loader import LoadedModel

STEP_VARIABLE = "BATON_FAKE_STEP_MS"
TICK_NS = 50_000
VOCAB = 4096  # ticks before the clock comes round: 205 ms
CONTEXT = 4096
_LAYERS = 10
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def ticks() -> int:
    """The machine's clock, the same in every process, as a token id."""
    return time.monotonic_ns() // TICK_NS % VOCAB


def age_ms(token: int, received_ns: int) -> float:
    """How long before `received_ns` the token's step was; right below 205 ms."""
    return (received_ns // TICK_NS - token) % VOCAB * TICK_NS / 1e6


class FakeDecoder(Decoder):
    """Waits, layer by layer, until its step has taken `step_s`, and then names the moment."""

    def __init__(self, config: ModelConfig, step_s: float) -> None:
        self.config = config
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._step_s = step_s
        self._last = 0.0

    def forward(self, rows: Rows, cache: KVCache, between_layers: Callable[[], None] | None = None) -> Tensor:
        now = time.monotonic()
        # Decode steps that follow one another keep a beat, like replays of a graph; any other takes its time.
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


class FakeDecodeLoop(TorchDecodeLoop):
    """The plain loop's admissions, cancels and ends; a step's tokens are the moment, for all rows."""

    def _advance(self, rows: Tensor, between_layers: Callable[[], None] | None) -> None:
        state, count = self._state, rows.numel()
        position = state.position[rows].long()
        steps = Rows(rows, position, list(range(count + 1)), ())
        self._decoder.forward(steps, self._cache, between_layers)
        token = ticks()
        going = position + 2 < state.end[rows]
        state.position[rows] += 1
        state.active[rows] = going
        finish = [Finish.NONE if goes else Finish.LENGTH for goes in going.tolist()]
        self._ring.write([token] * count, rows.tolist(), state.generation[rows].tolist(), finish)
        self._tokens_decoded += count


def decode_loop(
    decoder: Decoder, cache: KVCache, state: SlotState, rings: SharedRings, memory: SharedMemory, **_: object
) -> DecodeLoop:
    """Stands in for `baton.engine.prefill.factory.decode_loop`."""
    return FakeDecodeLoop(decoder, cache, state, rings.mailbox(memory), rings.writer(memory))


def load(model: str, engine: EngineConfig) -> LoadedModel:
    """What a worker serves instead of a checkpoint: `model` is a folder that `write_model` made."""
    config = ModelConfig.load(Path(model))
    layout = config.layout(engine.block_tokens_on("cpu"), "float32")
    slots = engine.slots or CPU_SLOTS
    blocks = engine.kv_blocks or slots * layout.groups[0].blocks_for(CONTEXT) + 1
    return LoadedModel(
        config=config,
        decoder=FakeDecoder(config, float(os.environ[STEP_VARIABLE]) / 1e3),
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


def write_model(folder: Path, context: int = CONTEXT, kv_heads: int = 1, head_dim: int = 2) -> Path:
    """A configuration of the smallest cache there is, if no other is asked for, and a tokenizer of two
    letters a token. A token's KV has 8 bytes a head and dimension."""
    from tokenizers import Tokenizer, decoders, models

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2, "head_dim": head_dim,
        "intermediate_size": 2, "num_attention_heads": kv_heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": context, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = [a + b + c for a in _LETTERS for b in _LETTERS for c in "xy"][:VOCAB]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _run_worker() -> int:
    import uvloop

    from services.common.processes.child_protocol import run_child
    from services.worker.front.process import serve

    program = (sys.executable, "-m", "bench.cluster.fake_engine", "engine")
    return run_child(WorkerConfig, partial(serve, engine_program=program), uvloop.new_event_loop)


def _run_engine() -> int:
    from services.worker.engine import assembly
    from services.worker.engine import process as engine_process

    assembly.decode_loop = decode_loop  # type: ignore[attr-defined]
    return engine_process.main(load)


if __name__ == "__main__":
    code = {"worker": _run_worker, "engine": _run_engine}[sys.argv[1]]()
    sys.stderr.flush()
    os._exit(code)  # as services.worker.engine.main does
