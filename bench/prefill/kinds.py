"""Classifies kernels of a prefill pass by name. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KINDS = (
    ("attention, paged", r"^_prompt_attention"),
    ("attention, library", r"cudnn|sdpa|flash|fmha"),
    ("attention, joined", r"^_absorb|^_join_parts|^_gather_prefix"),
    ("q, k, v: rotary and cache", r"^_prompt_qkv"),
    ("norm", r"^_norm"),
    ("activation", r"^_gated"),
    ("embedding", r"^_embed|^_rotary"),
    ("products", r"gemm|nvjet|cutlass|xmma|splitk|cublas"),
    ("copies", r"memcpy|memset|copy|fill|elementwise"),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, or `other`."""
    name = kernel.strip()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def budget(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums (name, milliseconds) of kernels by kind, the largest first."""
    sums: dict[str, float] = {}
    for name, took in kernels:
        kind = kind_of(name)
        sums[kind] = sums.get(kind, 0.0) + took
    return {kind: round(took, 3) for kind, took in sorted(sums.items(), key=lambda item: -item[1])}
