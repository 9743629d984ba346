"""Keys and values as codes: those that a kernel writes are the reference's, bit for bit, on a GPU where there
is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.gpu.attention.write_kv import write_kv
from baton.engine.kernels.reference.kv_codes import quantise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, BLOCK = 64, 64
# Of bfloat16: one of each kind of mantissa, subnormal ones, those whose reciprocal is none, and large ones.
SCALES = [1.0, 1.5, 1.9921875, 1.0078125, 0.34, 2**-20, 2**-60, 1.5 * 2**-61, 2**-126, 2**-131, 1e30]


def written(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, DIM] as keys and values, which no rotation turns → codes and scales [rows, 2, ...] of both."""
    rows = len(x)
    blocks = -(-rows // BLOCK)
    cache = torch.zeros(1 + blocks, 1, 2, 1, BLOCK, DIM, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.zeros(1 + blocks, 1, 1, BLOCK, 2, dtype=torch.bfloat16, device=DEVICE)
    write_kv(
        torch.cat([torch.zeros_like(x), x, x], 1).to(DEVICE),
        cache,
        0,
        torch.arange(1, 1 + blocks, dtype=torch.int32, device=DEVICE)[None],
        (torch.ones(rows, DIM // 2, device=DEVICE), torch.zeros(rows, DIM // 2, device=DEVICE)),
        torch.tensor([rows], device=DEVICE),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        torch.arange(rows, dtype=torch.int32, device=DEVICE),
        Heads(1, 1, DIM, 0.1, 1e-5),
        kv_scales=scales,
    )
    codes = cache[1:, 0, :, 0].view(torch.uint8).transpose(1, 2).reshape(-1, 2, DIM)
    return codes[:rows].cpu(), scales[1:, 0, 0].view(-1, 2)[:rows].cpu()


def near_ties(scale: float) -> Tensor:
    """Vectors of this scale, of numbers around those that lie in the middle between two codes."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = ((codes[:-1] + codes[1:]) / 2 * scale).float().view(torch.int32)
    around = (middles[:, None] + torch.arange(-4, 5, dtype=torch.int32)).view(torch.float32).flatten()
    rows = around[: len(around) // (DIM - 1) * (DIM - 1)].view(-1, DIM - 1)
    return torch.cat([torch.full((len(rows), 1), 448 * scale), rows], 1)


@pytest.mark.parametrize("scale", SCALES)
def test_around_ties(scale: float) -> None:
    same(near_ties(float(torch.tensor(scale).bfloat16())))


@pytest.mark.parametrize("magnitude", [1e-40, 1e-36, 1e-20, 1e-3, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_vectors(magnitude: float, dtype: torch.dtype) -> None:
    """Also a vector of zeros, and one whose numbers are far apart."""
    x = torch.randn(9, DIM, generator=torch.Generator().manual_seed(7)).mul(magnitude).to(dtype).float()
    x[5] = 0
    x[6] *= torch.logspace(0, -12, DIM)
    same(x + 0.0)  # the rotation may make 0 of -0


def same(x: Tensor) -> None:
    codes, scales = written(x)
    expected, expected_scales = quantise(x)
    for plane in range(2):
        assert codes[:, plane].equal(expected.view(torch.uint8))
        assert scales[:, plane].equal(expected_scales)
