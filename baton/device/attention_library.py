"""Attention by the vendor's library (cuDNN, through torch), over keys and values in one run of memory.

cuDNN builds a plan for every new shape, and keeps it for good: tens to hundreds of milliseconds on the host.
So a shape is made ready once, at start, and only those that are ready are ever run. A CPU's twin takes any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CallShape:
    """`batch` sequences of `rows` queries each over `keys` keys; causal: query i sees keys 0 to i."""

    batch: int
    rows: int
    keys: int
    causal: bool


class AttentionLibrary:
    """Calls of one model's heads on one device; all from one thread, to which the library's plans belong."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self._scale = scale
        self._on_gpu = device.type == "cuda"
        self._ready: set[CallShape] = set()

    def has(self, shape: CallShape) -> bool:
        """Whether a call of this shape runs at once."""
        return not self._on_gpu or shape in self._ready

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
        """Runs a call like those to come, strides included; False where the library refuses it."""
        if self._on_gpu:
            try:
                self.attend(query, key, value, causal=causal)
            except RuntimeError:
                return False
            self._ready.add(CallShape(query.shape[0], query.shape[2], key.shape[2], causal))
        return True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """query [B, heads, R, dim]; key, value [B, kv heads, K, dim] → [B, heads, R, dim] in the dtype, and
        each row's natural logarithm of its sum of exponentials [B, heads, R] float32.

        The last dimension is dense, the rest may be strided; on a GPU the result lies row by row, heads
        beside one another, if the query does.
        """
        if not self._on_gpu:
            return plain_attention(query, key, value, self._scale, causal=causal)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=self._scale
        )
        return out, lse.reshape(query.shape[:3])


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """`AttentionLibrary.attend` spelled out, in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(group, 1).to(wide) for t in (key, value))
    scores = query.to(wide) @ keys.transpose(2, 3) * scale
    if causal:
        unseen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ values
    # As the library lays it out: [B, R, heads, dim] in memory.
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.float()
