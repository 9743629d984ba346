"""Philox4x32-10 (Salmon et al. 2011), vectorised in torch: random bits as a function of where they are used.

A key and a counter give four 32-bit words; there is no state between draws. Words live in int64
tensors, so the same integers come out on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four counter words and two key words, int64 tensors below 2^32 that broadcast → four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps in int64; its bits are right all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, p1 & _MASK, _high(p0) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def seed_key(seed: Tensor) -> tuple[Tensor, Tensor]:
    """An int64 tensor with the bits of 64-bit seeds → the two key words, low one first."""
    return seed & _MASK, _high(seed)


def random_words(seed: Tensor, position: Tensor, purpose: int, count: int) -> Tensor:
    """Word i of row b is Philox(seed[b], counter (i // 4, position[b], purpose, 0)), word i % 4.

    seed, position: [B] int64 → [B, count] int64, values below 2^32.
    """
    quads = torch.arange(-(-count // 4), device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    counter = (quads[None], (position & _MASK)[:, None], zero + purpose, zero)
    low, high = seed_key(seed)
    words = torch.stack(philox(counter, (low[:, None], high[:, None])), dim=-1)
    return words.view(seed.shape[0], -1)[:, :count]


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _MASK


PURPOSE_DRAW = 0
