"""Attention over a cache of codes on a GPU, in half precision: at the sizes of a model of 8B."""

from __future__ import annotations

import pytest
import torch

from baton.engine.kernels.gpu.attention.items import AttentionTuning, Heads, SplitPolicy
from tests.engine.kernels.gpu.attention.test_prompt_attention import attend
from tests.engine.kernels.gpu.attention.test_split_attention import run
from tests.engine.prompt_reference import PromptCase
from tests.engine.split_reference import AttentionCase

pytestmark = pytest.mark.gpu

LLAMA = Heads(32, 8, 128, 128**-0.5, 1e-5)
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 100.0])
def test_decode(dtype: torch.dtype, magnitude: float) -> None:
    heads, positions = LLAMA, [1119, 5, 700, 4000, 64]
    case = AttentionCase.random(heads, positions, block_tokens=64, device="cuda", dtype=dtype)
    case.cache[:, :, 1] *= magnitude
    case = case.quantised()
    expected, cache, scales = case.expected(1)
    found = run(case, SplitPolicy())
    error = (
        found.float() - expected.float()
    ).square().mean().sqrt() / expected.float().square().mean().sqrt()
    print(f"\nPROOF decode over codes, {dtype}, values of {magnitude}: relative error {error:.2e}")
    assert error < 5e-3
    assert torch.equal(case.cache.view(torch.uint8), cache.view(torch.uint8))
    assert case.kv_scales is not None
    assert scales is not None
    assert torch.equal(case.kv_scales, scales)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("spread", [1.0, 20.0], ids=["scores alike", "scores far apart"])
def test_decode_of_few_rows(kv_heads: int, rows: int, spread: float) -> None:
    """Rows have as many parts as fill a GPU, by the tuning of a step, with norms of queries and keys as in
    Qwen3."""
    heads = Heads(32, kv_heads, 128, spread * 128**-0.5, 1e-6)
    case = AttentionCase.random(
        heads, [1119] * rows, block_tokens=64, norms=True, device="cuda", dtype=torch.bfloat16
    ).quantised()
    expected, _, _ = case.expected(1)
    tuning = AttentionTuning.of(heads, rows, 132, quantised=True)
    found = run(case, SplitPolicy.filling(132, kv_heads, rows, tuning.resident, True), tuning=tuning)
    error = (
        found.float() - expected.float()
    ).square().mean().sqrt() / expected.float().square().mean().sqrt()
    print(f"\nPROOF decode over codes, {rows} rows, {kv_heads} KV heads, {spread}: error {error:.2e}")
    assert error < 4e-2


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prefill(dtype: torch.dtype, dim: int) -> None:
    heads = Heads(8, 2, dim, dim**-0.5, 1e-5)
    case = PromptCase.random(heads, [(0, 300), (130, 70)], block_tokens=64, device="cuda", dtype=dtype)
    case = case.quantised()
    out, lse = attend(case, case.spans())
    expected, sums = case.expected(1, case.spans())
    error = (out.double().cpu() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    print(f"\nPROOF prefill over codes, {dtype}, heads of {dim}: relative error {error:.2e}")
    assert error < 5e-3
    torch.testing.assert_close(lse.double().cpu(), sums, rtol=1e-3, atol=1e-3)
