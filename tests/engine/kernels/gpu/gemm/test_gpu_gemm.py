"""The products of a decode step and what lies between them, against the plain-torch kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gemv
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, skinny_linear, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.gpu.step.row_ops import embed, gated_rows, norm_rows, rotary_rows
from baton.engine.kernels.reference.row_ops import gated, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE)


def reference(x: Tensor, w: Tensor, bias: Tensor | None, epilogue: Epilogue, before: Tensor) -> Tensor:
    product = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    if epilogue is Epilogue.RESIDUAL:
        product += before
    if epilogue.gated:
        return gated(product.float(), epilogue)
    return product.float()


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("n", "k", "bias", "norm"), [(37, 100, True, False), (16, 256, False, True), (5, 48, True, True)]
)
def test_gemv(n: int, k: int, bias: bool, norm: bool, epilogue: Epilogue) -> None:
    double = 2 if epilogue.gated else 1
    x, w, gain = normal(1, k, seed=1), normal(double * n, k, seed=2), normal(k, seed=3)
    b = normal(double * n, seed=4) if bias else None
    out = normal(1, n, seed=5)
    normed = rms_norm(x, gain, 1e-5) if norm else x
    expected = reference(normed, w, b, epilogue, out)
    gemv(out, x, w, b, epilogue, Norm(gain, 1e-5) if norm else None, GemvTuning(rows=8, width=64))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "bias"),
    [(1, 40, 64, 1, False), (17, 70, 100, 3, True), (5, 64, 256, 2, False), (3, 33, 40, 4, True)],
)
def test_skinny_linear(m: int, n: int, k: int, splits: int, bias: bool, epilogue: Epilogue) -> None:
    double = 2 if epilogue.gated else 1
    x, w = normal(m, k, seed=1), normal(double * n, k, seed=2)
    b = normal(double * n, seed=4) if bias else None
    out = normal(m, n, seed=5)
    expected = reference(x, w, b, epilogue, out)
    tuning = SkinnyTuning(rows=16, columns=64, width=32, splits=splits, stages=2)
    space = SplitSpace(*split_space_needed(m, n, tuning, epilogue), torch.device(DEVICE))
    skinny_linear(out, x, w, b, epilogue, tuning, space)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not space.arrived.any(), "the meeting places are left as they were found"


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("m", "rows", "k", "splits", "bias"),
    [
        (65, 96, 100, 3, True),
        (80, 80, 64, 1, False),
        (80, 96, 64, 1, True),
        (96, 96, 128, 2, False),
        (100, 96, 40, 1, False),
        (113, 48, 100, 2, True),
        (30, 96, 64, 2, False),
    ],
)
def test_skinny_linear_of_two_tiles_of_x(
    m: int, rows: int, k: int, splits: int, bias: bool, epilogue: Epilogue
) -> None:
    double, n = 2 if epilogue.gated else 1, 70
    x, w = normal(m, k, seed=1), normal(double * n, k, seed=2)
    b = normal(double * n, seed=4) if bias else None
    out = normal(m, n, seed=5)
    expected = reference(x, w, b, epilogue, out)
    tuning = SkinnyTuning(rows=rows, columns=64, width=32, splits=splits, stages=2)
    space = SplitSpace(*split_space_needed(m, n, tuning, epilogue), torch.device(DEVICE))
    space.partial.fill_(torch.nan)
    skinny_linear(out, x, w, b, epilogue, tuning, space)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not space.arrived.any(), "the meeting places are left as they were found"
    assert not space.partial.isnan().any(), "no more memory is asked for than is used"


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("m", "tuning"),
    [
        (33, SkinnyTuning(48, 64, 128, 1, 5)),
        (48, SkinnyTuning(48, 128, 64, 2, 5, 8)),
        (65, SkinnyTuning(96, 64, 128, 1, 4)),
        (96, SkinnyTuning(96, 64, 128, 2, 3)),
        (96, SkinnyTuning(96, 128, 64, 4, 5, 8)),
        (80, SkinnyTuning(80, 128, 64, 1, 4, 8)),
    ],
    ids=str,
)
def test_skinny_linear_of_two_tiles_of_x_on_matrix_units(
    m: int, tuning: SkinnyTuning, epilogue: Epilogue
) -> None:
    double, n, k = 2 if epilogue.gated else 1, 1000, 2048
    x, w = normal(m, k, seed=1).bfloat16(), (normal(double * n, k, seed=2) * 0.05).bfloat16()
    b, out = normal(double * n, seed=4).bfloat16(), normal(m, n, seed=5).bfloat16()
    expected = reference(x, w, b, epilogue, out).bfloat16()
    space = SplitSpace(*split_space_needed(m, n, tuning, epilogue), torch.device(DEVICE))
    skinny_linear(out, x, w, b, epilogue, tuning, space)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert not space.arrived.any()


@pytest.mark.gpu
def test_a_row_has_one_result_in_either_tile_of_x() -> None:
    x, w = normal(96, 4096, seed=1).bfloat16(), normal(256, 4096, seed=2).bfloat16()
    together, alone = torch.empty(2, 96, 256, device=DEVICE, dtype=torch.bfloat16)
    tuning = SkinnyTuning(rows=96, columns=64, width=128)
    skinny_linear(together, x, w, tuning=tuning)
    for row in (7, 63, 64, 95):
        skinny_linear(alone[:1], x[row : row + 1], w, tuning=tuning)
        assert torch.equal(alone[0], together[row])


def test_a_row_of_a_skinny_product_depends_on_nothing_else() -> None:
    x, w = normal(19, 96, seed=1), normal(70, 96, seed=2)
    tuning = SkinnyTuning(rows=16, columns=64, width=32, splits=2)
    space = SplitSpace(*split_space_needed(19, 70, tuning, Epilogue.PLAIN), torch.device(DEVICE))
    together, alone = torch.empty(19, 70, device=DEVICE), torch.empty(1, 70, device=DEVICE)
    skinny_linear(together, x, w, tuning=tuning, space=space)
    for row in (0, 7, 18):
        skinny_linear(alone, x[row : row + 1].contiguous(), w, tuning=tuning, space=space)
        assert torch.equal(alone[0], together[row])


def test_products_refuse_what_does_not_fit() -> None:
    x, w = normal(2, 32, seed=1), normal(8, 32, seed=2)
    with pytest.raises(ValueError, match="do not fit"):
        gemv(normal(2, 8, seed=3), x, w)
    with pytest.raises(ValueError, match="do not fit"):
        skinny_linear(normal(2, 9, seed=3), x, w)
    with pytest.raises(ValueError, match="contiguous"):
        skinny_linear(normal(2, 8, seed=3), normal(32, 2, seed=1).t(), w)
    with pytest.raises(ValueError, match="need a space"):
        skinny_linear(normal(2, 8, seed=3), x, w, tuning=SkinnyTuning(splits=2))
    for rows in (8, 24, 72, 112):
        with pytest.raises(ValueError, match="no tile of x"):
            skinny_linear(normal(2, 8, seed=3), x, w, tuning=SkinnyTuning(rows))


@pytest.mark.parametrize("width", [48, 100])
def test_rows_between_products(width: int) -> None:
    x, gain = normal(3, 2 * width, seed=1), normal(2 * width, seed=2)
    out, half = torch.empty_like(x), torch.empty(3, width, device=DEVICE)
    norm_rows(out, x, Norm(gain, 1e-5))
    torch.testing.assert_close(out, rms_norm(x, gain, 1e-5), rtol=1e-5, atol=1e-6)
    norm_rows(out, x, Norm(gain, 1e-5), adds=True)
    torch.testing.assert_close(out, 2 * rms_norm(x, gain, 1e-5), rtol=1e-5, atol=1e-6)
    for epilogue in (Epilogue.SWIGLU, Epilogue.GEGLU):
        gated_rows(half, x, epilogue)
        torch.testing.assert_close(half, gated(x, epilogue), rtol=1e-5, atol=1e-6)


def test_embedding_and_rotary_tables() -> None:
    embedding, frequencies = normal(11, 40, seed=1), 1.0 / 10 ** torch.arange(3, device=DEVICE)
    token = torch.tensor([3, 10, 0], dtype=torch.int32, device=DEVICE)
    position = torch.tensor([0, 7, 1000], dtype=torch.int32, device=DEVICE)
    hidden = torch.empty(3, 40, device=DEVICE)
    cos, sin = torch.empty(2, 3, 3, device=DEVICE)
    embed(hidden, (cos, sin), token, position, embedding, frequencies, 1.5)
    angles = position[:, None].float() * frequencies
    assert torch.equal(hidden, embedding[token.long()])
    torch.testing.assert_close(cos, angles.cos() * 1.5, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * 1.5, rtol=1e-5, atol=1e-5)
    again = torch.empty(2, 3, 3, device=DEVICE)
    rotary_rows((again[0], again[1]), position, frequencies, 1.5)
    assert torch.equal(again[0], cos)
    assert torch.equal(again[1], sin)
    embed(hidden, (cos, sin), token, position, embedding, frequencies, 1.5, 6.5)
    assert torch.equal(hidden, embedding[token.long()] * 6.5)
    frequencies[1] = 0  # a pair of dimensions that is not rotated
    rotary_rows((again[0], again[1]), position, frequencies, 1.5)
    assert torch.equal(again[0][:, 1], torch.ones_like(cos[:, 1]))
    assert torch.equal(again[0][:, 2], cos[:, 2])
    assert not again[1][:, 1].any()
