"""Outputs that `transformers` computes where keys and values are rounded to e4m3 with a scale for each token
and head: written a second time, from the format's definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

Floats = npt.NDArray[np.float64]
# The positive numbers of e4m3 from its definition; beside 448 there would be NaN.
_EXPONENTS, _MANTISSAS = np.arange(1, 16)[:, None], np.arange(8)[None, :]
E4M3 = np.concatenate(
    [np.arange(8) / 8 * 2.0**-6, ((1 + _MANTISSAS / 8) * 2.0 ** (_EXPONENTS - 7)).ravel()[:-1]]
)


def nearest(numbers: Floats, values: Floats) -> Floats:
    """Each number's nearest of these values, or its negative; of two as near the larger."""
    sizes = np.abs(numbers)
    above = np.searchsorted(values, sizes).clip(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    found: Floats = np.sign(numbers) * np.where(sizes - low < high - sizes, low, high)
    return found


def rounded(x: Tensor) -> Tensor:
    """x [..., dim] as codes of a scale (bfloat16) for each vector stand for it."""
    wide = x.double().cpu().numpy()
    largest = torch.from_numpy(np.abs(wide).max(-1, keepdims=True).astype(np.float32))
    scale = (largest / 448).bfloat16().double().numpy()
    return torch.from_numpy(nearest(wide / scale, E4M3) * scale).to(x)


def round_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama models of `transformers` with eager attention round them, until the test ends."""
    eager = modeling_llama.eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **kwargs: Any) -> Any:
        return eager(module, query, rounded(key), rounded(value), *others, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
