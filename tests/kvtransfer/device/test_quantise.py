"""Rows in eight bits: as near as the format allows, and the same bits by reference and kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtransfer.device.quantise import EightBit, quantise, quantise_by_kernel, restore, restore_by_kernel
from tests.kvtransfer.support.kernels import DEVICE, on_kernel

KINDS = list(EightBit)


def rows(dtype: torch.dtype, count: int = 21, dim: int = 48) -> Tensor:
    """Rows of very different sizes, one of them zero, one of a single large element."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(count, dim, generator=generator) * torch.logspace(-4, 3, count)[:, None]
    found[2] = 0
    found[5, 1:] *= 1e-4
    return found.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_near_as_the_format_allows(kind: EightBit, dtype: torch.dtype) -> None:
    given = rows(dtype)
    codes, scales = quantise(given, kind)
    assert (codes.shape, codes.dtype, scales.shape) == (given.shape, torch.uint8, given.shape[:1])
    exact = restore(codes, scales, kind, torch.float16).double()
    step = scales.double()[:, None]
    allowed = given.double().abs() / 16 + step * 2**-10 if kind is EightBit.E4M3 else step / 2
    # Float16 rounds what was restored once more.
    slack = given.double().abs() * 2**-11 + 2.0**-24
    assert bool(((exact - given.double()).abs() <= allowed * 1.000001 + slack).all())
    largest = given.double().abs().amax(1)
    assert torch.allclose(exact.abs().amax(1), largest, rtol=2**-10, atol=2.0**-24)
    assert not exact[2].any()


@on_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [16, 48, 128])
def test_the_kernel_gives_the_same_bits(kind: EightBit, dtype: torch.dtype, dim: int) -> None:
    given = rows(dtype, dim=dim)
    codes, scales = quantise(given, kind)
    kernel_codes, kernel_scales = quantise_by_kernel(given.to(DEVICE), kind)
    assert torch.equal(kernel_scales.cpu(), scales)
    assert torch.equal(kernel_codes.cpu(), codes)
    again = restore_by_kernel(kernel_codes, kernel_scales, kind, dtype)
    expected = restore(codes, scales, kind, dtype)
    assert torch.equal(again.cpu().view(torch.uint8), expected.view(torch.uint8))


@on_kernel
def test_every_e4m3_code_comes_back() -> None:
    """All 254 that are numbers, and what lies between two of them goes to the even one."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    between = (values[:-1] + values[1:]) / 2
    # A row of its own each would be scaled: here the largest is 448, so the scale is 1.
    row = torch.cat([values, between])[None]
    expected, scales = quantise(row, EightBit.E4M3)
    assert scales.tolist() == [1.0]
    assert torch.equal(expected[0, : len(codes)].view(torch.float8_e4m3fn).float(), values)
    found, _ = quantise_by_kernel(row.to(DEVICE), EightBit.E4M3)
    assert torch.equal(found.cpu(), expected)


def test_other_dtypes() -> None:
    with pytest.raises(ValueError, match="float32"):
        restore(torch.zeros(1, 1, dtype=torch.uint8), torch.ones(1), EightBit.INT8, torch.float64)
