"""Products with quantised weights, against the dequantised matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gemv
from baton.engine.kernels.gpu.gemm.int4_gemv import int4_gemv
from baton.engine.kernels.gpu.gemm.int4_linear import int4_linear
from baton.engine.kernels.gpu.gemm.quantize_rows import quantize_digits, quantize_gated_rows, quantize_rows
from baton.engine.kernels.gpu.gemm.quantized_linear import quantized_linear
from baton.engine.kernels.gpu.gemm.row_codes_linear import row_codes_linear
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.reference.row_ops import gated, rms_norm
from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.quantization.quantize import quantize
from tests.engine.kernels.gpu.gemm.test_gpu_gemm import DEVICE, normal, reference

WEIGHT_FORMATS = [
    WeightFormat("fp8"),
    WeightFormat("fp8", 32, 64),
    WeightFormat("int8"),
    WeightFormat("int4"),
    WeightFormat("int4", scale_columns=32),
    WeightFormat("int4", scale_columns=64, zeros=True),
    WeightFormat("int4", scale_columns=128),
]
NAMES = [weight_format.name for weight_format in WEIGHT_FORMATS]


def matrix(weight_format: WeightFormat, rows: int, columns: int) -> Tensor:
    """On the host: the interpreter rounds to e4m3 in its own way."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS, ids=NAMES)
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "bias", "epilogue"),
    [
        (1, 40, 128, 1, False, Epilogue.PLAIN),
        (17, 70, 300, 3, True, Epilogue.RESIDUAL),
        (5, 64, 256, 2, False, Epilogue.SWIGLU),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_quantized_linear(
    weight_format: WeightFormat, m: int, n: int, k: int, splits: int, bias: bool, epilogue: Epilogue
) -> None:
    double = 2 if epilogue.gated else 1
    x, weight = normal(m, k, seed=1), quantize(matrix(weight_format, double * n, k).to(DEVICE), weight_format)
    b = normal(double * n, seed=4) if bias else None
    out = normal(m, n, seed=5)
    expected = reference(x, weight.dequantized(torch.float32), b, epilogue, out)
    width = 128 if weight_format.codes == "int4" else 64
    tuning = SkinnyTuning(rows=16, columns=32, width=width, splits=splits, stages=2)
    space = SplitSpace(*split_space_needed(m, n, tuning, epilogue), torch.device(DEVICE))
    quantized_linear(out, x, weight, b, epilogue, tuning, space)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "weight_format",
    [weight_format for weight_format in WEIGHT_FORMATS if weight_format.scale_rows == 1],
    ids=lambda weight_format: weight_format.name,
)
@pytest.mark.parametrize(
    ("n", "k", "bias", "norm", "epilogue"),
    [
        (37, 100, True, False, Epilogue.RESIDUAL),
        (16, 256, False, True, Epilogue.PLAIN),
        (5, 300, True, True, Epilogue.GEGLU),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_one_row(
    weight_format: WeightFormat, n: int, k: int, bias: bool, norm: bool, epilogue: Epilogue
) -> None:
    double = 2 if epilogue.gated else 1
    x, gain = normal(1, k, seed=1), normal(k, seed=3)
    weight = quantize(matrix(weight_format, double * n, k).to(DEVICE), weight_format)
    b = normal(double * n, seed=4) if bias else None
    out = normal(1, n, seed=5)
    normed = rms_norm(x, gain, 1e-5) if norm else x
    expected = reference(normed, weight.dequantized(torch.float32), b, epilogue, out)
    kernel = int4_gemv if weight_format.codes == "int4" else gemv
    kernel(out, x, weight, b, epilogue, Norm(gain, 1e-5) if norm else None, GemvTuning(rows=8, width=128))
    # Codes of int4 are summed beside a hundred times what they are.
    close = 5e-4 * max(1.0, float(expected.abs().max())) if weight_format.codes == "int4" else 1e-4
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=close)


@pytest.mark.parametrize(
    "weight_format",
    [weight_format for weight_format in WEIGHT_FORMATS if weight_format.codes == "int4"],
    ids=lambda weight_format: weight_format.name,
)
@pytest.mark.parametrize(("k", "width"), [(256, 512), (300, 128), (1024, 256)])
def test_one_row_of_bfloat16_by_int4(weight_format: WeightFormat, k: int, width: int) -> None:
    """x and the gains are read by fours."""
    x, gain = normal(1, k, seed=1).bfloat16(), normal(k, seed=3).bfloat16()
    weight, out = (
        quantize(matrix(weight_format, 24, k).to(DEVICE), weight_format),
        torch.empty(1, 24, device=DEVICE),
    )
    out = out.bfloat16()
    expected = reference(
        rms_norm(x.float(), gain.float(), 1e-5), weight.dequantized(torch.float32), None, Epilogue.PLAIN, out
    )
    int4_gemv(
        out, x, weight, None, Epilogue.PLAIN, Norm(gain, 1e-5), GemvTuning(rows=16, width=width, warps=2)
    )
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    "weight_format",
    [weight_format for weight_format in WEIGHT_FORMATS if weight_format.codes in ("fp8", "int8")],
    ids=lambda weight_format: weight_format.name,
)
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "bias", "norm", "epilogue"),
    [
        (17, 70, 300, 3, True, False, Epilogue.RESIDUAL),
        (5, 64, 256, 1, False, True, Epilogue.SWIGLU),
        (16, 40, 320, 1, False, True, Epilogue.PLAIN),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rows_that_become_codes_on_the_way(
    weight_format: WeightFormat,
    m: int,
    n: int,
    k: int,
    splits: int,
    bias: bool,
    norm: bool,
    epilogue: Epilogue,
) -> None:
    double = 2 if epilogue.gated else 1
    x, gain = normal(m, k, seed=1), normal(k, seed=3)
    x[1] = 0
    weight = quantize(matrix(weight_format, double * n, k).to(DEVICE), weight_format)
    b = normal(double * n, seed=4) if bias else None
    out = normal(m, n, seed=5)
    normed = rms_norm(x, gain, 1e-5) if norm else x
    matrix_of = weight.dequantized(torch.float32)
    exact = reference(normed, matrix_of, b, epilogue, out)
    tuning = SkinnyTuning(rows=16, columns=64, width=64, splits=splits, stages=2)
    space = SplitSpace(*split_space_needed(m, n, tuning, epilogue), torch.device(DEVICE))
    before = out.clone()
    # The twin in torch: codes with a scale for each row and 64 columns, of x times the gains.
    scaled = torch.nn.functional.pad(x * gain if norm else x, (0, -k % 64))
    tiles = scaled.cpu().view(-1, 64)
    codes = quantize(tiles, WeightFormat(weight_format.codes)).dequantized(torch.float32)
    coded = codes.view(scaled.shape)[:, :k].to(DEVICE)
    if norm:
        coded *= torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    twin = reference(coded, matrix_of, b, epilogue, before)
    row_codes_linear(out, x, weight, b, epilogue, Norm(gain, 1e-5) if norm else None, tuning, space)
    spread = exact.std()
    # A value between two codes may become either; the interpreter rounds all to e4m3 towards zero.
    truncated = weight_format.codes == "fp8" and DEVICE == "cpu"
    close, coarse = (0.12, 0.2) if truncated else (0.01, 0.06)
    assert float((out - twin).square().mean().sqrt() / spread) < close
    assert float((out - exact).square().mean().sqrt() / spread) < coarse


def test_row_codes_refuse_a_norm_in_splits() -> None:
    weight_format = WeightFormat("int8")
    x, out = normal(2, 128, seed=1), normal(2, 16, seed=2)
    weight = quantize(matrix(weight_format, 16, 128).to(DEVICE), weight_format)
    with pytest.raises(ValueError, match="2 splits"):
        row_codes_linear(
            out, x, weight, None, Epilogue.PLAIN, Norm(x[0], 1e-5), SkinnyTuning(width=64, splits=2)
        )


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS, ids=NAMES)
def test_in_bfloat16(weight_format: WeightFormat) -> None:
    """On a GPU codes become bfloat16 by moving bits."""
    x, out = (normal(rows, width, seed=rows).bfloat16() for rows, width in ((33, 256), (33, 96)))
    weight = quantize(matrix(weight_format, 96, 256).to(DEVICE), weight_format)
    expected = reference(x, weight.dequantized(torch.float32), None, Epilogue.PLAIN, out)
    tuning = SkinnyTuning(
        rows=32, columns=64, width=128 if weight_format.codes == "int4" else 64, splits=1, stages=3
    )
    quantized_linear(out, x, weight, None, Epilogue.PLAIN, tuning)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.gpu)], ids=str
)
def test_rows_become_codes(dtype: torch.dtype, norm: bool) -> None:
    x, gain = normal(5, 300, seed=1), normal(300, seed=2)
    x[2] = 0
    codes, scales = torch.empty_like(x, dtype=dtype), torch.empty(5, device=DEVICE)
    quantize_rows(codes, scales, x, Norm(gain, 1e-5) if norm else None)
    expected = rms_norm(x, gain, 1e-5) if norm else x
    step = (
        scales[:, None] * 0.5 if dtype is torch.int8 else expected.abs() * 2.0**-4 + scales[:, None] * 2**-10
    )
    assert bool(((codes.float() * scales[:, None] - expected).abs() <= step * 1.001).all())
    gate_up = normal(5, 600, seed=3)
    quantize_gated_rows(codes, scales, gate_up, Epilogue.SWIGLU)
    expected = gated(gate_up, Epilogue.SWIGLU)
    step = (
        scales[:, None] * 0.5 if dtype is torch.int8 else expected.abs() * 2.0**-4 + scales[:, None] * 2**-10
    )
    assert bool(((codes.float() * scales[:, None] - expected).abs() <= step * 1.001).all())


@pytest.mark.parametrize(
    "weight_format", [WeightFormat("fp8"), WeightFormat("int8")], ids=lambda weight_format: weight_format.name
)
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "epilogue"),
    [(17, 70, 300, 3, Epilogue.RESIDUAL), (5, 64, 256, 1, Epilogue.SWIGLU)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_codes_times_codes(
    weight_format: WeightFormat, m: int, n: int, k: int, splits: int, epilogue: Epilogue
) -> None:
    double = 2 if epilogue.gated else 1
    x = quantize(torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(DEVICE), weight_format)
    weight, out = (
        quantize(matrix(weight_format, double * n, k).to(DEVICE), weight_format),
        normal(m, n, seed=5),
    )
    expected = reference(x.dequantized(torch.float32), weight.dequantized(torch.float32), None, epilogue, out)
    tuning = SkinnyTuning(rows=16, columns=64, width=64, splits=splits, stages=2)
    space = SplitSpace(*split_space_needed(m, n, tuning, epilogue), torch.device(DEVICE))
    quantized_linear(out, x.codes, weight, None, epilogue, tuning, space, x.scales.view(-1))
    # A GPU's units keep 13 bits behind the point of the largest product of fp8 that they add up.
    close = (
        2**-12 * float(expected.abs().max()) if weight_format.codes == "fp8" and DEVICE == "cuda" else 1e-3
    )
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=close)


@pytest.mark.parametrize("norm", [False, True])
def test_rows_become_two_digits(norm: bool) -> None:
    x, gain = normal(5, 300, seed=1), normal(300, seed=2)
    x[2] = 0
    digits, scales = torch.empty(2, 5, 300, dtype=torch.int8, device=DEVICE), torch.empty(5, device=DEVICE)
    quantize_digits(digits, scales, x, Norm(gain, 1e-5) if norm else None)
    expected = rms_norm(x, gain, 1e-5) if norm else x
    high, low = digits.float()
    restored = (128 * high + low) * scales[:, None]
    torch.testing.assert_close(scales, expected.abs().amax(-1) / 16319, rtol=1e-5, atol=1e-30)
    assert bool(((restored - expected).abs() <= 0.501 * scales[:, None]).all())
    assert float(digits.float().abs().max()) == 127


@pytest.mark.parametrize(
    "weight_format",
    [weight_format for weight_format in WEIGHT_FORMATS if weight_format.codes == "int4"],
    ids=lambda weight_format: weight_format.name,
)
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "bias", "epilogue"),
    [
        (1, 40, 128, 1, False, Epilogue.PLAIN),
        (17, 70, 300, 3, True, Epilogue.RESIDUAL),
        (5, 64, 256, 2, False, Epilogue.SWIGLU),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_int4_by_digits(
    weight_format: WeightFormat, m: int, n: int, k: int, splits: int, bias: bool, epilogue: Epilogue
) -> None:
    double = 2 if epilogue.gated else 1
    x, weight = normal(m, k, seed=1), quantize(matrix(weight_format, double * n, k).to(DEVICE), weight_format)
    b = normal(double * n, seed=4) if bias else None
    out = normal(m, n, seed=5)
    digits, scales = torch.empty(2, m, k, dtype=torch.int8, device=DEVICE), torch.empty(m, device=DEVICE)
    quantize_digits(digits, scales, x)
    expected = reference(x, weight.dequantized(torch.float32), b, epilogue, out)
    tuning = SkinnyTuning(rows=16, columns=32, splits=splits, stages=2)
    space = SplitSpace(*split_space_needed(m, n, tuning, epilogue), torch.device(DEVICE))
    int4_linear(out, digits, scales, weight, b, epilogue, tuning, space)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
