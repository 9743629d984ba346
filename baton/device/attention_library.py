"""Attention by cuDNN (through torch), over contiguous keys and values.

cuDNN builds a plan for every new shape, which takes tens to hundreds of milliseconds on the host, and keeps
it for good. So callers warm it up at start with the few shapes and strides they will use, and use no others.
The plain implementation, used on a CPU and for float32, needs no plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)


def library_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """query [B, heads, R, dim]; key, value [B, kv heads, K, dim] → output [B, heads, R, dim] of the same
    dtype, and the log-sum-exp of each row's scores [B, heads, R] float32.

    The last dimension must be contiguous; others may be strided. On a GPU the output has the query's layout.
    All calls must come from one thread, to which plans belong. RuntimeError where the library refuses.
    """
    if not (query.is_cuda and query.dtype in HALF_DTYPES):
        return plain_attention(query, key, value, scale, causal=causal)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(query.shape[:3])


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The reference of `library_attention`, in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(group, 1).to(wide) for t in (key, value))
    scores = query.to(wide) @ keys.transpose(2, 3) * scale
    if causal:
        unseen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ values
    # cuDNN's layout: [B, R, heads, dim] in memory.
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.float()
