"""The streamed product in CUDA C++: on the host and on a GPU, against the dequantised matrix; refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.device.cuda_source import CudaFunction
from baton.engine.forward.layers.linear import run_product, space_needed
from baton.engine.forward.products.scratch import Scratch
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm import streamed_product as module
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.gpu.gemm.streamed_product import (
    StreamedTuning,
    streamed_fits,
    streamed_product,
    streamed_source,
    streamed_space_needed,
)
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.reference.row_ops import gated
from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.layers.linear import Linear, Product
from baton.engine.model.quantization.quantize import quantize
from tests.engine.kernels.gpu.gemm.host.function import HostFunction
from tests.support.host_kernels import needs_compiler

BF16 = torch.bfloat16
PLAIN, RESIDUAL, SWIGLU, GEGLU = Epilogue
INT4, INT4_ROWS = WeightFormat("int4", scale_columns=128), WeightFormat("int4")
INT4_ZEROS = WeightFormat("int4", scale_columns=256, zeros=True)
Case = tuple[WeightFormat, int, int, int, bool, Epilogue, StreamedTuning]

# format, rows of x, results, columns, bias, epilogue, tiles
SMALL: list[Case] = [
    (INT4, 5, 32, 256, False, PLAIN, StreamedTuning(8, 1, 2, 1, 1, 1, 2, 2)),
    (INT4, 12, 32, 768, False, GEGLU, StreamedTuning(16, 1, 2, 2, 2, 1, 3, 3)),
    (INT4, 70, 64, 328, True, RESIDUAL, StreamedTuning(64, 2, 2, 2, 1, 1, 2, 4)),
    (INT4_ROWS, 3, 32, 136, False, PLAIN, StreamedTuning(8, 1, 1, 2, 1, 3, 4, 4)),
    (INT4_ZEROS, 33, 80, 640, True, SWIGLU, StreamedTuning(32, 1, 2, 4, 1, 2, 1, 3)),
]
LARGE: list[Case] = [
    (INT4, 16, 14336, 4096, False, SWIGLU, StreamedTuning(16, 1, 7, 2, 1, 1, 1, 4)),
    (INT4, 64, 14336, 4096, False, SWIGLU, StreamedTuning(64, 1, 4, 1, 1, 1, 2, 3)),
    (INT4, 16, 4096, 14336, False, RESIDUAL, StreamedTuning(16, 2, 4, 2, 1, 4, 3, 3)),
    (INT4, 100, 4096, 4096, True, RESIDUAL, StreamedTuning(64, 2, 4, 1, 1, 2, 2, 4)),
]


def name_of(case: Case) -> str:
    weight_format, m, n, k, *_ = case
    return f"{weight_format.name}-{m}-{n}-{k}"


def check(case: Case, device: str) -> None:
    weight_format, m, n, k, has_bias, epilogue, tuning = case
    double = 2 if epilogue.gated else 1
    draw = torch.Generator().manual_seed(m + n + k)
    dense = torch.randn(double * n, k, generator=draw) * k**-0.5
    weight = quantize(dense.to(device), weight_format)
    x = torch.randn(m, k, generator=draw).to(device, BF16)
    bias = torch.randn(double * n, generator=draw).to(device, BF16) if has_bias else None
    out = torch.randn(m, n, generator=draw).to(device, BF16)
    sums = x.double() @ weight.dequantized(torch.float32).double().t()
    if bias is not None:
        sums += bias.double()
    if epilogue is RESIDUAL:
        sums += out.double()
    expected = gated(sums.to(BF16).float(), epilogue) if epilogue.gated else sums.float()
    elements, tiles = streamed_space_needed(m, n, tuning, epilogue)
    space = SplitSpace(elements, tiles, torch.device(device)) if tiles else None
    if space is not None:
        space.partial.fill_(float("nan"))
    # A second time in the same space.
    for _ in range(2 if tiles else 1):
        result = out.clone()
        streamed_product(result, x, weight, bias, epilogue, tuning, space)
        torch.testing.assert_close(result.float(), expected, rtol=2**-7, atol=2e-2)
        error = (result.float() - expected).norm() / expected.norm()
        assert error < 3e-3, "more than the rounding of results"
    if space is not None:
        assert not space.arrived.any()


@needs_compiler
@pytest.mark.parametrize(
    "number", [1, 2, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 4))]
)
def test_on_the_host(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product runs with either order of blocks, and with copies that come early and late."""

    def function(
        tuning: StreamedTuning,
        epilogue: Epilogue,
        weight_format: WeightFormat,
        bias: bool,
        device: int,
    ) -> HostFunction:
        source = streamed_source(tuning, epilogue, weight_format, bias)
        nbytes = tuning.shared_bytes(epilogue)
        return HostFunction(source, tmp_path, nbytes, late=number % 3 > 0, turned=number % 2 > 0)

    monkeypatch.setattr(module, "streamed_function", function)
    check(SMALL[number], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=map(name_of, [*SMALL, *LARGE]))
def test_on_a_gpu(case: Case) -> None:
    check(case, "cuda")


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("weight", "dtype", "fits"),
    [
        (zeros(64, 128), BF16, False),
        (QuantizedWeight.empty(WeightFormat("int8"), 64, 128, "cpu"), BF16, False),
        (QuantizedWeight.empty(INT4, 64, 136, "cpu"), BF16, True),
        (QuantizedWeight.empty(INT4, 48, 128, "cpu"), BF16, False),
        (QuantizedWeight.empty(INT4, 64, 128, "cpu"), torch.float16, False),
        (QuantizedWeight.empty(INT4_ZEROS, 64, 136, "cpu"), BF16, True),
        (QuantizedWeight.empty(WeightFormat("int4", scale_columns=64), 64, 128, "cpu"), BF16, False),
    ],
)
def test_what_it_is_for(weight: Weight, dtype: torch.dtype, fits: bool) -> None:
    assert streamed_fits(weight, dtype) is fits


@pytest.mark.parametrize(
    ("out", "x", "tuning", "words"),
    [
        (zeros(4, 64), zeros(4, 64), StreamedTuning(), "do not fit"),
        (zeros(5, 64), zeros(4, 128), StreamedTuning(), "do not fit"),
        (zeros(4, 64), zeros(128, 4).t(), StreamedTuning(), "contiguous"),
        (zeros(4, 64, dtype=torch.float32), zeros(4, 128), StreamedTuning(), "out torch.float32"),
        (zeros(4, 64), zeros(4, 128), StreamedTuning(rows=12), "cannot copy"),
        (zeros(4, 64), zeros(4, 128), StreamedTuning(row_warps=3, pieces=2), "cannot copy"),
        (zeros(4, 64), zeros(4, 128), StreamedTuning(64, 1, 4, 8, 1), "shared memory"),
        (zeros(4, 64), zeros(4, 128), StreamedTuning(splits=2), "need a space of 2048 elements and 1 tiles"),
    ],
)
def test_what_does_not_fit(out: Tensor, x: Tensor, tuning: StreamedTuning, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        streamed_product(out, x, QuantizedWeight.empty(INT4, 64, 128, "cpu"), None, PLAIN, tuning)


def test_the_space_of_a_pass_holds_what_a_choice_needs() -> None:
    tuning = StreamedTuning(16, 1, 2, splits=3)
    for epilogue, halves in ((PLAIN, 1), (SWIGLU, 2)):
        product = Product("gate_up", Linear(zeros(80 * halves, 32), None), epilogue)
        needed = streamed_space_needed(17, 80, tuning, epilogue)
        assert space_needed(17, product, tuning) == needed == (2 * 3 * 3 * halves * 16 * 32, 2 * 3)


def test_a_weight_that_it_is_not_for_is_the_librarys() -> None:
    x, weight, out = torch.randn(3, 8), torch.randn(6, 8), torch.zeros(3, 6)
    scratch = Scratch(3, 8, 36, (0, 0), torch.device("cpu"), torch.float32)
    run_product(out, x, Product("qkv", Linear(weight, None)), StreamedTuning(), scratch)
    torch.testing.assert_close(out, x @ weight.t())


@pytest.mark.gpu
def test_a_function_is_compiled_once() -> None:
    arguments = (StreamedTuning(), PLAIN, INT4, False, 0)
    function = module.streamed_function(*arguments)
    assert isinstance(function, CudaFunction)
    assert module.streamed_function(*arguments) is function
