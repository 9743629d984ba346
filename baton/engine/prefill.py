"""The prefill step: schedule, run, sample what is complete."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.cache import KVCache
from baton.engine.decoder import Decoder, Rows
from baton.engine.prefill_scheduler import Chunk, PrefillScheduler
from baton.engine.sampling import Sampling, sample
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A computed chunk, and the first output token where it was its sequence's last."""

    chunk: Chunk
    token: int | None


class PrefillLoop:
    """Runs the chunks that the scheduler picks, packed into one batch a step."""

    def __init__(self, decoder: Decoder, cache: KVCache, scheduler: PrefillScheduler) -> None:
        self._decoder = decoder
        self._cache = cache
        self.scheduler = scheduler
        self.prompts_run = 0
        self.tokens_run = 0

    def step(self) -> list[ChunkResult]:
        """Computes the next chunks; empty when there is nothing to do."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        hidden = self._decoder.forward(self._rows(chunks), self._cache)
        tokens = self._sample_last(chunks, hidden)
        for chunk in chunks:
            self.scheduler.computed(chunk)
            self.tokens_run += chunk.count
            self.prompts_run += chunk.is_last
        return [ChunkResult(chunk, tokens.get(index)) for index, chunk in enumerate(chunks)]

    def _rows(self, chunks: list[Chunk]) -> Rows:
        device = self._cache.groups[0].device
        tokens = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        starts = [0]
        for chunk in chunks:
            starts.append(starts[-1] + chunk.count)
        return Rows(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            query_start=starts,
            block_tables=_block_tables([chunk.sequence for chunk in chunks], device),
        )

    def _sample_last(self, chunks: list[Chunk], hidden: torch.Tensor) -> dict[int, int]:
        """The first token of every sequence whose last chunk this was, by index in `chunks`."""
        last_rows, lasts, row = [], [], -1
        for index, chunk in enumerate(chunks):
            row += chunk.count
            if chunk.is_last:
                last_rows.append(row)
                lasts.append(index)
        if not lasts:
            return {}
        sequences = [chunks[index].sequence for index in lasts]
        positions = torch.tensor([s.length for s in sequences], dtype=torch.int64, device=hidden.device)
        logits = self._decoder.logits(hidden[torch.tensor(last_rows, device=hidden.device)])
        tokens = sample(logits, _sampling(sequences, hidden.device), positions)
        return dict(zip(lasts, tokens.tolist(), strict=True))


def _block_tables(sequences: list[Sequence], device: torch.device) -> tuple[torch.Tensor, ...]:
    tables = []
    held = [sequence.blocks for sequence in sequences if sequence.blocks is not None]
    for group in zip(*held, strict=True):
        width = max(len(blocks) for blocks in group)
        padded = [list(blocks) + [0] * (width - len(blocks)) for blocks in group]
        tables.append(torch.tensor(padded, dtype=torch.int64, device=device))
    return tuple(tables)


def _sampling(sequences: list[Sequence], device: torch.device) -> Sampling:
    params = [sequence.sampling for sequence in sequences]
    signed = [p.seed - (1 << 64) if p.seed >= 1 << 63 else p.seed for p in params]
    return Sampling(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        seed=torch.tensor(signed, dtype=torch.int64, device=device),
    )
