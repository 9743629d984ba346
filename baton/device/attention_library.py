"""Attention by the vendor's library (cuDNN, through torch), over keys and values in one run of memory.

cuDNN builds a plan for every new shape, and keeps it for good: tens to hundreds of milliseconds on the host.
So whoever calls it does so at start, with each of a few shapes and the strides that are to come, and later
with no other. A CPU's twin, which float32 has on a GPU too, needs no plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)


class AttentionLibrary:
    """Calls of one model's heads on one device; all from one thread: plans are the
    thread's."""

    def __init__(self, scale: float, device: torch.device, dtype: torch.dtype) -> None:
        self._scale = scale
        self._fused = device.type == "cuda" and dtype in HALF_DTYPES

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """query [B, heads, R, dim]; key, value [B, kv heads, K, dim] → [B, heads, R, dim] in the dtype, and
        each row's natural logarithm of its sum of exponentials [B, heads, R] float32.

        The last dimension is dense, the rest may be strided; on a GPU the result lies row by row, heads
        beside one another, if the query does. Raises RuntimeError where the library refuses.
        """
        if not self._fused:
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
