"""The same chunks through the plain pass and through that of the kernels, each over a cache of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence as Run
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel
from baton.engine.model.weights import random_weights
from baton.engine.plan.step_plan import Chunk, step_of
from baton.engine.prefill.attention_plan import KeySplit, LibraryRule
from baton.engine.prefill.gpu_pass import PrefillPass
from baton.engine.prefill.reference_pass import ReferencePass
from baton.engine.sequence import Limits, SamplingParams, Sequence
from tests.engine.local_engine import CONFIG

# As the true one, in small: every way to cut a chunk within a few dozen tokens.
SMALL_RULE = LibraryRule(
    step=8, least_rows=6, least_alone=6, least_prefix=16, least_pairs=1, key_sizes=(32, 16)
)
SMALL_SPLIT = KeySplit(programs=24, least_keys=6, rows=40, granularity=4)
SMALL_TUNING = PromptTuning(queries=32, tile=16, warps=4, stages=2)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases and a tied head": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "query and key norm": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 10},
    "windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 10,
        "query_pre_attn_scalar": 30,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
    },
    "mixture": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}


def scattered_sequences(lengths: Run[int], blocks: Run[int], groups: int, vocab_size: int) -> list[Sequence]:
    """Sequences of random tokens with these lengths and numbers of blocks; the blocks are at random places in
    every cache group."""
    generator = torch.Generator().manual_seed(1)
    shuffled = [(1 + torch.randperm(sum(blocks), generator=generator)).tolist() for _ in range(groups)]
    sequences = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        sequence = Sequence(tuple(tokens), length, SamplingParams(), Limits(1))
        first = sum(blocks[:number])
        sequence.blocks = tuple(tuple(group[first : first + blocks[number]]) for group in shuffled)
        sequences.append(sequence)
    return sequences


class BothPasses:
    """`chunks` are given as (sequence, first position, rows), of sequences numbered from 0."""

    def __init__(
        self,
        folder: Path,
        family: str = "llama",
        *,
        rule: LibraryRule | None = SMALL_RULE,
        split: KeySplit = SMALL_SPLIT,
        block_tokens: int = 4,
        lengths: Run[int] = (128,) * 4,
        most_rows: int = 128,
        layers: int = 1,
        device: str = "cpu",
        cache_dtype: str = "float32",
    ) -> None:
        settings = {**CONFIG, "num_hidden_layers": layers, **FAMILIES[family]}
        (folder / "config.json").write_text(json.dumps(settings))
        config = load_config(folder)
        layout = config.layout(block_tokens, cache_dtype)
        weights = random_weights(config, 3, torch.device(device), torch.float32)
        precision = Precision.of(torch.float32, getattr(torch, cache_dtype))
        model = Model(config, weights, layout, device, precision)
        blocks = [-(-length // block_tokens) for length in lengths]
        self.caches = [KVCache(layout, 1 + sum(blocks), device) for _ in range(2)]
        self.plain = ReferencePass(ReferenceModel(model), self.caches[0])
        self.kernels = PrefillPass(model, self.caches[1], most_rows, rule, SMALL_TUNING, split)
        self.sequences = scattered_sequences(lengths, blocks, len(layout.groups), config.vocab_size)

    def run(self, chunks: Run[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """→ logits [N, vocab] of the plain pass and of the kernels."""
        pieces = step_of(Chunk(self.sequences[number], start, count) for number, start, count in chunks)
        return (
            self.plain.logits(self.plain.forward(pieces)),
            self.kernels.logits(self.kernels.forward(pieces)),
        )

    def check(self, *steps: Run[tuple[int, int, int]]) -> None:
        """Runs one step after the other; logits and caches are the same after each."""
        for chunks in steps:
            plain, mine = self.run(chunks)
            torch.testing.assert_close(mine, plain, rtol=2e-4, atol=2e-4)
            for theirs, ours in zip(self.caches[0].groups, self.caches[1].groups, strict=True):
                torch.testing.assert_close(ours[1:], theirs[1:], rtol=2e-4, atol=2e-4)

    def check_rounded(self, *steps: Run[tuple[int, int, int]]) -> None:
        """`check` of a cache of codes: here and there a sum's last bit decides to which side an element is
        rounded, and the differences that this makes are all there are."""
        for chunks in steps:
            plain, mine = self.run(chunks)
            assert (mine - plain).square().mean().sqrt() < 0.01 * plain.std()
        for theirs, ours in zip(self.caches[0].groups, self.caches[1].groups, strict=True):
            same = theirs[1:].contiguous().view(torch.uint8) == ours[1:].contiguous().view(torch.uint8)
            assert same.float().mean() > 0.99
