"""Log-probabilities of the raw logits, of the token drawn and the likeliest, into the ring's records.

A program a chunk lists its own best as one integer each, logit above index, so that the largest is the
likeliest and of equals the lowest; a program a row takes the best of the lists. Sums are in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.sampling.sampler_rows import (
    FEATURES,
    LOGPROB_COUNT,
    LOGPROBS_BIT,
    int_of,
    key_of,
    value_of,
)
from baton.engine.kernels.gpu.step.step_kernels import HEAD
from baton.engine.shared_memory.logprob_records import MAX_LOGPROBS

_BEST = triton.next_power_of_2(MAX_LOGPROBS)
_NOTHING = tl.constexpr(-(1 << 63))


@triton.jit
def _list_best(
    logits, peaks, sums, lists, records, row_slot, row_place, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row)
    if (tl.load(row_place + row) >= 0) & ((int_of(records, slot, FEATURES) & LOGPROBS_BIT) != 0):
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        there = at < VOCAB
        x = tl.load(logits + row.to(tl.int64) * VOCAB + at, mask=there, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, 0)
        place = row * CHUNKS + chunk
        tl.store(peaks + place, peak)
        weight = tl.exp(x.to(tl.float64) - peak.to(tl.float64))
        tl.store(sums + place, tl.sum(tl.where(x > float("-inf"), weight, 0.0), 0))
        ranked = (key_of(x).to(tl.int64) << 32) | (0xFFFFFFFF - at.to(tl.int64))
        ranked = tl.where(there, ranked, _NOTHING)
        for n in range(0, int_of(records, slot, LOGPROB_COUNT)):
            best = tl.max(ranked, 0)
            tl.store(lists + place * BEST + n, best)
            ranked = tl.where(ranked == best, _NOTHING, ranked)


@triton.jit
def _write_records(
    logits, peaks, sums, lists, records, row_slot, row_place, row_drawn, control, ring_records,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, POWER: tl.constexpr, BEST: tl.constexpr,
    CAPACITY: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """`ring_records`: the ring's records as int32, of TOP alternatives each."""
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    behind = tl.load(row_place + row)
    if (behind >= 0) & ((int_of(records, slot, FEATURES) & LOGPROBS_BIT) != 0):
        c = tl.arange(0, POWER)
        some = c < CHUNKS
        peaks_of = tl.load(peaks + row * CHUNKS + c, mask=some, other=float("-inf")).to(tl.float64)
        peak = tl.max(peaks_of, 0)
        parts = tl.load(sums + row * CHUNKS + c, mask=some, other=0.0) * tl.exp(peaks_of - peak)
        whole = peak + tl.log(tl.sum(parts, 0))
        count = tl.minimum(int_of(records, slot, LOGPROB_COUNT), tl.minimum(TOP, VOCAB))
        position = tl.load(control + HEAD) + behind
        record = ring_records + (position % CAPACITY) * (4 + 2 * TOP)
        lap = position // CAPACITY + 1
        tl.store(record, lap.to(tl.int32))
        tl.store(record + 1, (lap >> 32).to(tl.int32))
        tl.store(record + 2, count)
        drawn = tl.load(row_drawn + row)
        chosen = tl.load(logits + row.to(tl.int64) * VOCAB + drawn).to(tl.float64) - whole
        tl.store(record + 3, chosen.to(tl.float32).to(tl.int32, bitcast=True))
        b = tl.arange(0, BEST)
        mask = some[:, None] & (b < count)[None, :]
        ranked = tl.load(lists + (row * CHUNKS + c[:, None]) * BEST + b[None, :], mask=mask, other=_NOTHING)
        for n in range(0, count):
            best = tl.max(tl.max(ranked, 1), 0)
            value = value_of((best >> 32).to(tl.int32)).to(tl.float64) - whole
            tl.store(record + 4 + n, (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32))
            tl.store(record + 4 + TOP + n, value.to(tl.float32).to(tl.int32, bitcast=True))
            ranked = tl.where(ranked == best, _NOTHING, ranked)


class BestPlaces:
    """Scratch with the largest logit of each chunk of each row, the sum of exponentials relative to it, and
    the chunk's best tokens, packed."""

    def __init__(self, rows: int, vocab: int, chunk: int, device: torch.device) -> None:
        shape = rows, triton.cdiv(vocab, chunk)
        self.peaks = torch.zeros(shape, dtype=torch.float32, device=device)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.lists = torch.zeros(*shape, _BEST, dtype=torch.int64, device=device)


def write_logprobs(
    ring_records: Tensor,
    logits: Tensor,
    row_drawn: Tensor,
    rows: tuple[Tensor, Tensor],
    records: Tensor,
    control: Tensor,
    places: BestPlaces,
    ring: tuple[int, int],
    chunk: int,
) -> None:
    """Writes the records of the rows that ask for logprobs, where their words will stand.

    logits [R, V] raw; row_drawn [R] int32; `rows`: slot and place of each, [R] int32; `ring_records`: the
    ring's records as int32; `ring`: how many words it has, and alternatives a record.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, chunk)
    if places.peaks.shape[1] != chunks or places.peaks.shape[0] < count:
        raise ValueError(f"the places are {tuple(places.peaks.shape)}, the logits {tuple(logits.shape)}")
    scratch = places.peaks, places.sums, places.lists
    _list_best[(count, chunks)](
        logits, *scratch, records, *rows, VOCAB=vocab, CHUNK=chunk, CHUNKS=chunks, BEST=_BEST, num_warps=8
    )
    _write_records[(count,)](
        logits, *scratch, records, *rows, row_drawn, control, ring_records,
        VOCAB=vocab, CHUNKS=chunks, POWER=triton.next_power_of_2(chunks), BEST=_BEST,
        CAPACITY=ring[0], TOP=ring[1], num_warps=4,
    )  # fmt: skip
