"""Greedy and temperature-only draws: the largest of (logit / temperature + Gumbel noise) of each row.

The same numbers as `baton.engine.sampling.reference`: noise is Philox(seed, position, purpose, vocabulary
index) in float64; temperature 0 takes the largest logit; of equals the lowest index wins. A row's vocabulary
is cut into chunks, a program each; `reduce` takes the best of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import clock_ns
from baton.engine.kernels.gpu.step.step_kernels import CLOCK_LINES, CLOCK_WIDTH, RECORD_WORDS, REPLAYS
from baton.engine.kernels.reference.philox import PURPOSE_DRAW
from baton.engine.shared_memory.mailbox import field_offset

CHUNK = 8192
_QUADS = 512
_TEMPERATURE = tl.constexpr(field_offset("temperature") // 4)
_SEED = tl.constexpr(field_offset("seed") // 8)
PURPOSE = tl.constexpr(PURPOSE_DRAW)
NOWHERE = tl.constexpr((1 << 31) - 1)


@triton.jit
def gumbel_noise(word):
    """A word of random bits → standard Gumbel noise, float64."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sample_simple(
    logits,
    control,
    clocks,
    row_slot,
    row_position,
    temperatures,
    seeds,
    best,
    best_at,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    QUADS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if (row == 0) & (chunk == 0):
        # The head's product has ended.
        tl.store(clocks + (tl.load(control + REPLAYS) % CLOCK_LINES) * CLOCK_WIDTH + 1, clock_ns())
    slot = tl.load(row_slot + row)
    # Both are columns of the slots' records.
    temperature = tl.load(temperatures + slot * RECORD_WORDS)
    mine = logits + row.to(tl.int64) * VOCAB
    place = row * CHUNKS + chunk
    if temperature > 0:
        seed = tl.load(seeds + slot * (RECORD_WORDS // 2))
        # The token drawn stands behind the one that was read.
        position = tl.load(row_position + row) + 1
        highest = tl.full((), float("-inf"), tl.float64)
        at = tl.full((), NOWHERE, tl.int32)
        # A few quads at a time: the noise is long code, and each element of a thread's share repeats it.
        for start in range(0, CHUNK // 4, QUADS):
            quad = chunk * (CHUNK // 4) + start + tl.arange(0, QUADS)
            peak, place_of_peak = _drawn(mine, quad, temperature, seed, position, VOCAB)
            at = tl.where(peak > highest, place_of_peak, at)
            highest = tl.maximum(highest, peak)
        tl.store(best + place, highest)
        tl.store(best_at + place, at)
    else:
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        scores = tl.load(mine + i, mask=i < VOCAB, other=float("-inf")).to(tl.float32)
        peak = tl.max(scores, 0)
        tl.store(best + place, peak.to(tl.float64))
        # Where no score is a number, the peak is that of the places beyond the vocabulary.
        tl.store(best_at + place, tl.min(tl.where((scores == peak) & (i < VOCAB), i, NOWHERE), 0))


@triton.jit
def _drawn(mine, quad, temperature, seed, position, VOCAB: tl.constexpr):
    """The largest noisy score of some quads of tokens, and where it stands, the first of equals."""
    zero = tl.zeros_like(quad)
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero + PURPOSE, zero)
    divisor = temperature.to(tl.float64)
    s0 = _scores(mine, quad * 4, VOCAB) / divisor + gumbel_noise(w0)
    s1 = _scores(mine, quad * 4 + 1, VOCAB) / divisor + gumbel_noise(w1)
    s2 = _scores(mine, quad * 4 + 2, VOCAB) / divisor + gumbel_noise(w2)
    s3 = _scores(mine, quad * 4 + 3, VOCAB) / divisor + gumbel_noise(w3)
    return first_peak(s0, s1, s2, s3, quad)


@triton.jit
def first_peak(s0, s1, s2, s3, quad):
    """The largest score of some quads of tokens, and the lowest token that has it."""
    peak = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 0)
    at = tl.where(s3 == peak, quad * 4 + 3, NOWHERE)
    at = tl.where(s2 == peak, quad * 4 + 2, at)
    at = tl.where(s1 == peak, quad * 4 + 1, at)
    at = tl.where(s0 == peak, quad * 4, at)
    return peak, tl.min(at, 0)


@triton.jit
def _scores(mine, at, VOCAB: tl.constexpr):
    return tl.load(mine + at, mask=at < VOCAB, other=float("-inf")).to(tl.float64)


@triton.jit
def best_of(best, best_at, row, CHUNKS: tl.constexpr, CHUNKS_POWER: tl.constexpr):
    """The token with the largest score of a row's chunks, the lowest of several; 0 where none has a score,
    so that numbers gone wrong name no token beyond the vocabulary."""
    c = tl.arange(0, CHUNKS_POWER)
    score = tl.load(best + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    at = tl.load(best_at + row * CHUNKS + c, mask=c < CHUNKS, other=NOWHERE)
    token = tl.min(tl.where(score == tl.max(score, 0), at, NOWHERE), 0)
    return tl.where(token == NOWHERE, 0, token)


@triton.jit
def _reduce(best, best_at, row_drawn, CHUNKS: tl.constexpr, CHUNKS_POWER: tl.constexpr):
    row = tl.program_id(0)
    tl.store(row_drawn + row, best_of(best, best_at, row, CHUNKS, CHUNKS_POWER))


def sample_places(rows: int, vocab: int, device: torch.device, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Allocates the scratch for each chunk's best: values and indices [rows, chunks]."""
    shape = rows, triton.cdiv(vocab, chunk)
    return (
        torch.zeros(shape, dtype=torch.float64, device=device),
        torch.zeros(shape, dtype=torch.int32, device=device),
    )


def sample_simple(
    row_drawn: Tensor,
    logits: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    records: Tensor,
    control: Tensor,
    clocks: Tensor,
    places: tuple[Tensor, Tensor],
) -> None:
    """logits [R, V] → row_drawn [R] int32, by the parameters in the slots' records [slots, 128] uint8.

    row_slot, row_position [R] int32, the position that of the token read. Raises ValueError where `places`
    (`sample_places`) are of another vocabulary.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    if places[0].shape[1] != chunks or places[0].shape[0] < rows:
        raise ValueError(f"the places are {tuple(places[0].shape)}, the logits {tuple(logits.shape)}")
    temperatures = records.view(torch.float32).view(-1)[_TEMPERATURE.value :]
    seeds = records.view(torch.int64).view(-1)[_SEED.value :]
    _sample_simple[(rows, chunks)](
        logits,
        control,
        clocks,
        row_slot,
        row_position,
        temperatures,
        seeds,
        *places,
        VOCAB=vocab,
        CHUNK=CHUNK,
        QUADS=_QUADS,
        CHUNKS=chunks,
        num_warps=8,
    )
    _reduce[(rows,)](
        *places, row_drawn, CHUNKS=chunks, CHUNKS_POWER=triton.next_power_of_2(chunks), num_warps=1
    )
