"""Bitmasks of tokens as tensors: token t is bit t % 32 of word t // 32."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed_tokens(words: Tensor, vocab_size: int) -> Tensor:
    """words [B, V / 32 rounded up] int32 → [B, V] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = words[:, :, None] >> shifts & 1
    return bits.view(words.shape[0], -1)[:, :vocab_size].bool()
