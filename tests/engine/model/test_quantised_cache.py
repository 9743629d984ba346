"""The reference forward pass over a cache of e4m3 codes: what it computes, and what it does not depend on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.kernels.reference.kv_codes import quantise, restore
from tests.engine.passes import Passes
from tests.support.checkpoints import FAMILIES, Case
from tests.support.fewer import each_value_once
from tests.support.reference import load_reference, reference_logits
from tests.support.rounded_kv import round_keys_and_values

FP8 = torch.float8_e4m3fn
WINDOWS = next(case for case in FAMILIES if case.name == "qwen2-mixed-windows")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("case", "dtype"), each_value_once([FAMILIES[0], WINDOWS], [torch.float32, torch.bfloat16]), ids=str
)
def test_chunks_and_steps_equal_the_whole_bitwise(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """A row attends to what the cache holds, of its own chunk too, so the chunks do not matter."""
    folder, prompt = case.make(tmp_path), prompt_of(150)
    (whole,) = Passes(folder, dtype, cache_dtype=FP8).run([(0, 0, prompt)])
    for block_tokens, chunk in ((16, 1), (8, 37), (5, 16)):
        passes = Passes(folder, dtype, block_tokens=block_tokens, cache_dtype=FP8)
        for first in range(0, len(prompt), chunk):
            (logits,) = passes.run([(0, first, prompt[first : first + chunk])])
            assert torch.equal(logits, whole[first : first + chunk]), (block_tokens, chunk, first)


def test_logits_equal_transformers_with_rounded_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt = FAMILIES[0].make(tmp_path), prompt_of(120)
    (logits,) = Passes(folder, torch.float32, cache_dtype=FP8).run([(0, 0, prompt)])
    reference = load_reference(folder, torch.float32)
    unquantised = reference_logits(reference, prompt)
    round_keys_and_values(monkeypatch)
    expected = reference_logits(reference, prompt)
    # Here and there a sum's last bit decides to which side an element is rounded.
    error = (logits - expected).square().mean().sqrt() / (unquantised - expected).square().mean().sqrt()
    assert error < 0.1


def test_a_cache_holds_what_quantisation_yields(tmp_path: Path) -> None:
    folder, prompt = FAMILIES[0].make(tmp_path), prompt_of(40)
    passes, plain = (Passes(folder, torch.float32, cache_dtype=kind) for kind in (FP8, None))
    for each in (passes, plain):
        each.run([(0, 0, prompt)])
    group, scales = passes.cache.groups[0], passes.cache.scales[0]
    assert scales is not None
    first = passes.tables[0][0, :2]
    expected = plain.cache.groups[0][first][:, 0]  # of the first layer, whose input no cache has touched
    codes, their_scales = quantise(expected)
    assert torch.equal(group[first][:, 0].view(torch.uint8), codes.view(torch.uint8))
    ours = scales[first][:, 0].movedim(-1, 1)  # [blocks, planes, heads, tokens]
    assert torch.equal(ours, their_scales)
    restored = restore(group[first][:, 0], ours, torch.float32)
    largest = expected.abs().amax(-1, keepdim=True)
    assert ((restored - expected).abs() <= (expected.abs() / 15).clamp(min=largest / 448 / 512)).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-5, 1.0, 3e4, 1e30])
def test_quantisation_keeps_its_precision_at_any_magnitude(magnitude: float) -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(3)) * magnitude
    codes, scales = quantise(x)
    restored = restore(codes, scales, torch.float32)
    assert float((restored - x).double().norm() / x.double().norm()) < 0.03
    largest = x.abs().amax(-1)
    assert ((restored.abs().amax(-1) - largest).abs() <= largest / 250).all()  # the scale's rounding


def test_zeros_and_ties_of_quantisation() -> None:
    codes, scales = quantise(torch.zeros(2, 8))
    assert not codes.float().any()
    assert (scales == 1).all()
    row = torch.tensor([[448.0, 1.0625, 1.1875, -1.0625, 2.0**-10, 3 * 2.0**-10, -0.0, 464.0 / 464 * 448]])
    codes, scales = quantise(row)
    assert float(scales) == 1
    assert codes.float().tolist() == [[448.0, 1.0, 1.25, -1.0, 0.0, 2.0**-8, -0.0, 448.0]]
