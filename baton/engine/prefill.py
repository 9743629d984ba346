"""The prefill step: schedule, run, sample what is complete."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from baton.engine.cache import KVCache
from baton.engine.decoder import Decoder, Rows
from baton.engine.logprob_records import Logprobs
from baton.engine.prefill_sampling import draw_first, prompt_logprobs
from baton.engine.prefill_scheduler import Chunk, PrefillScheduler
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A computed chunk, and the first output token where it was its sequence's last and a token is drawn.

    `logprobs`: the token's, where asked for. `prompt_logprobs`: those of the prompt's tokens from
    chunk.start + 1 on, where asked for.
    """

    chunk: Chunk
    token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()


class PrefillLoop:
    """Runs the chunks that the scheduler picks, packed into one batch a step."""

    def __init__(self, decoder: Decoder, cache: KVCache, scheduler: PrefillScheduler) -> None:
        self._decoder = decoder
        self._cache = cache
        self.scheduler = scheduler
        self.prompts_run = 0
        self.tokens_run = 0
        # Of the steps since the host last knew that all was computed.
        self._units_since = self._seconds_since = 0.0

    def step(self) -> list[ChunkResult]:
        """Computes the next chunks; empty when there is nothing to do."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        begun = time.perf_counter()
        hidden = self._decoder.forward(self._rows(chunks), self._cache)
        results = self._results(chunks, hidden)
        self._measure(chunks, results, time.perf_counter() - begun)
        for chunk in chunks:
            self.scheduler.computed(chunk)
            self.tokens_run += chunk.count
            self.prompts_run += chunk.is_last
        return results

    def _measure(self, chunks: list[Chunk], results: list[ChunkResult], seconds: float) -> None:
        """Tells the scheduler how long chunks take. A GPU computes while the host goes on, until a token is
        read; with that token all steps before have ended too."""
        cost = self.scheduler.cost
        self._seconds_since += seconds
        self._units_since += sum(cost.of(chunk.start, chunk.count) for chunk in chunks)
        read = any(result.token is not None for result in results)
        if read or self._cache.groups[0].device.type == "cpu":
            cost.took(self._units_since, self._seconds_since)
            self._units_since = self._seconds_since = 0.0

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

    def _results(self, chunks: list[Chunk], hidden: torch.Tensor) -> list[ChunkResult]:
        """hidden [N, hidden] of the chunks' rows, packed in their order."""
        drawn = self._draw(chunks, hidden)
        results, start = [], 0
        for index, chunk in enumerate(chunks):
            token, logprobs = drawn.get(index, (None, None))
            of_prompt: list[Logprobs] = []
            if chunk.sequence.prompt_logprobs:
                rows = hidden[start : start + chunk.count]
                of_prompt = prompt_logprobs(rows, self._decoder.logits, chunk.sequence, chunk.start)
            results.append(ChunkResult(chunk, token, logprobs, tuple(of_prompt)))
            start += chunk.count
        return results

    def _draw(self, chunks: list[Chunk], hidden: torch.Tensor) -> dict[int, tuple[int, Logprobs | None]]:
        """The first token of every sequence whose last chunk this was, by index in `chunks`."""
        last_rows, lasts, row = [], [], -1
        for index, chunk in enumerate(chunks):
            row += chunk.count
            if chunk.is_last and chunk.sequence.draws:
                last_rows.append(row)
                lasts.append(index)
        if not lasts:
            return {}
        logits = self._decoder.logits(hidden[torch.tensor(last_rows, device=hidden.device)])
        drawn = draw_first(logits, [chunks[index].sequence for index in lasts])
        return dict(zip(lasts, drawn, strict=True))


def _block_tables(sequences: list[Sequence], device: torch.device) -> tuple[torch.Tensor, ...]:
    tables = []
    held = [sequence.blocks for sequence in sequences if sequence.blocks is not None]
    for group in zip(*held, strict=True):
        width = max(len(blocks) for blocks in group)
        padded = [list(blocks) + [0] * (width - len(blocks)) for blocks in group]
        tables.append(torch.tensor(padded, dtype=torch.int64, device=device))
    return tuple(tables)
