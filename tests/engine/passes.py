"""A model with its cache and block tables, driven directly: what tests of the model side run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.memory.kv_cache import KVCache
from baton.engine.memory.split_cache import SplitKVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel, Rows
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_ranks
from baton.model_spec.split import splits

# (sequence, first position, token ids)
Piece = tuple[int, int, Sequence[int]]


class Passes:
    """Runs pieces of up to `sequences` sequences. Their blocks are dealt out in a shuffled order."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        block_tokens: int = 16,
        sequences: int = 8,
        length: int = 512,
        cache_dtype: torch.dtype | None = None,
        quantization: str | None = None,
        quantize_head: bool = False,
        ranks: int = 1,
    ) -> None:
        """`cache_dtype`: where it is not `dtype`. `ranks`: devices among which the model is divided."""
        config, cache_dtype = load_config(folder), cache_dtype or dtype
        cache_name = str(cache_dtype).removeprefix("torch.")
        layout = config.layout(block_tokens, cache_name)
        per_sequence = -(-length // block_tokens)
        formats = weight_formats(config, quantization, quantize_head=quantize_head)
        self.weights = load_ranks(config, folder, ["cpu"] * ranks, dtype, formats=formats)
        precision, parts = Precision.of(dtype, cache_dtype), [config.of_rank(s) for s in splits(ranks)]
        self.models = [
            Model(part, weights, part.layout(block_tokens, cache_name), "cpu", precision)
            for part, weights in zip(parts, self.weights, strict=True)
        ]
        self.model = ReferenceModel(*self.models)
        caches = [KVCache(model.layout, 1 + sequences * per_sequence, "cpu") for model in self.models]
        self.memory = SplitKVCache(layout, caches)
        self.cache = caches[0]
        generator = torch.Generator().manual_seed(block_tokens)
        self.tables = [
            1 + torch.randperm(sequences * per_sequence, generator=generator).view(sequences, per_sequence)
            for _ in layout.groups
        ]

    def run(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """One forward pass over the pieces packed in this order → each piece's logits [tokens, vocab]."""
        starts = [0]
        for _, _, ids in pieces:
            starts.append(starts[-1] + len(ids))
        rows = Rows(
            token_ids=torch.tensor([token for _, _, ids in pieces for token in ids]),
            positions=torch.cat([torch.arange(first, first + len(ids)) for _, first, ids in pieces]),
            query_start=starts,
            block_tables=tuple(table[[sequence for sequence, _, _ in pieces]] for table in self.tables),
        )
        logits = self.model.logits(self.model.forward(rows, self.memory))
        return [logits[start:end] for start, end in itertools.pairwise(starts)]

    def greedy(self, sequence: int, prompt: Sequence[int], count: int, chunk: int = 64) -> list[int]:
        """Prefill in chunks and decode one token a pass."""
        for first in range(0, len(prompt), chunk):
            logits = self.run([(sequence, first, prompt[first : first + chunk])])[0]
        output = [int(logits[-1].argmax())]
        while len(output) < count:
            position = len(prompt) + len(output) - 1
            output.append(int(self.run([(sequence, position, output[-1:])])[0][0].argmax()))
        return output
