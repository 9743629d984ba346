"""The product in CUDA C++: against plain torch on the host and on a GPU; what it refuses, anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.device.cuda_runtime import CudaError
from baton.device.cuda_source import can_compile, compile_source
from baton.engine.forward.layers.linear import run_product, space_needed
from baton.engine.forward.products.scratch import Scratch
from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm import wide_product as module
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.gpu.gemm.wide_product import (
    EPILOGUES,
    WideTuning,
    runs_here,
    wide_product,
    wide_source,
    wide_space_needed,
)
from baton.engine.kernels.gpu.step.row_ops import norm_rows
from baton.engine.kernels.reference.row_ops import gated, rms_norm
from baton.engine.model.layers.linear import Linear, Product
from tests.engine.kernels.gpu.gemm.host.cluster_function import ClusterFunction, host_map
from tests.support.host_kernels import needs_compiler

KIND = torch.bfloat16
PLAIN, RESIDUAL, SWIGLU = EPILOGUES


def zeros(*shape: int, kind: torch.dtype = KIND) -> Tensor:
    return torch.zeros(*shape, dtype=kind)


@pytest.mark.parametrize(
    ("out", "x", "weight", "tuning"),
    [
        (zeros(4, 16), zeros(4, 64), zeros(30, 64), WideTuning()),
        (zeros(5, 16), zeros(4, 64), zeros(32, 64), WideTuning()),
        (zeros(4, 16), zeros(4, 60), zeros(32, 60), WideTuning()),
        (zeros(4, 16), zeros(4, 64), zeros(32, 64, kind=torch.float16), WideTuning()),
        (*(zeros(*s, kind=torch.float32) for s in ((4, 16), (4, 64), (32, 64))), WideTuning()),
        (zeros(4, 16), zeros(64, 4).t(), zeros(32, 64), WideTuning()),
        (zeros(4, 16), zeros(4, 64), zeros(32, 64), WideTuning(columns=136)),
        (zeros(4, 16), zeros(4, 64), zeros(32, 64), WideTuning(x_stages=4)),
        (zeros(4, 16), zeros(4, 128), zeros(32, 128), WideTuning(splits=2)),
    ],
    ids=["odd", "rows", "unaligned", "kinds", "float32", "strided", "columns", "memory", "splits"],
)
def test_what_does_not_fit(out: Tensor, x: Tensor, weight: Tensor, tuning: WideTuning) -> None:
    with pytest.raises(ValueError, match=r"fit|dtypes|contiguous|columns|shared memory|splits"):
        wide_product(out, x, weight, SWIGLU, tuning)


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        (WideTuning(columns=24), "columns"),
        (WideTuning(columns=272), "columns"),
        (WideTuning(256, 4, 6), "shared memory"),
        (WideTuning(64, splits=0), "splits"),
        (WideTuning(64, splits=4), "splits"),  # of 192, 64 at a time
        (WideTuning(64, splits=3), "need a space of 49152 elements and 4 tiles"),
        (WideTuning(64, splits=3, x_sharers=4), "need a space of 98304 elements and 8 tiles"),
        (WideTuning(64, x_sharers=3), "x_sharers"),
        (WideTuning(64, 1, 6), "two stages"),
        (WideTuning(64, 6, 1), "two stages"),
    ],
)
def test_tilings_that_do_not_fit(tuning: WideTuning, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wide_product(zeros(4, 16), zeros(4, 192), zeros(16, 192), PLAIN, tuning)


@pytest.mark.parametrize(
    ("m", "n", "tuning", "needed"),
    [
        (256, 4096, WideTuning(256, 4, 5, 4), (4 * 256 * 4096, 16 * 4)),
        (192, 4096, WideTuning(192, 4, 6, 3), (22 * 3 * 256 * 192, 22 * 4)),
        (257, 128, WideTuning(128, splits=2), (2 * 2 * 256 * 128, 2 * 4)),
        (256, 14336, WideTuning(), (0, 0)),
        (128, 4096, WideTuning(128, 6, 8, 4, 2), (16 * 4 * 128 * 256, 16 * 4)),
        (65, 4096, WideTuning(96, 7, 9, 3, 4), (11 * 3 * 128 * 384, 11 * 8)),
        (129, 130, WideTuning(64, splits=2, x_sharers=2), (4 * 2 * 128 * 128, 4 * 4)),
    ],
)
def test_the_space_that_splits_need(m: int, n: int, tuning: WideTuning, needed: tuple[int, int]) -> None:
    assert wide_space_needed(m, n, tuning) == needed


def test_the_space_of_a_pass_holds_what_a_choice_needs() -> None:
    tuning = WideTuning(64, splits=2)
    weight = Linear(zeros(256, 8), None)
    assert space_needed(300, Product("down", weight, RESIDUAL), tuning) == wide_space_needed(300, 256, tuning)
    assert space_needed(300, Product("gate_up", weight, SWIGLU), WideTuning()) == (0, 0)


def test_a_product_with_a_bias_is_the_librarys() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    out = torch.zeros(3, 6)
    scratch = Scratch(3, 8, 36, (0, 0), torch.device("cpu"), torch.float32)
    run_product(out, x, Product("qkv", Linear(weight, bias)), WideTuning(16), scratch)
    torch.testing.assert_close(out, x @ weight.t() + bias)
    with pytest.raises(ValueError, match="dtypes"):
        run_product(out, x, Product("qkv", Linear(weight, None)), WideTuning(16), scratch)


@pytest.mark.gpu
def test_compiler_errors_are_reported() -> None:
    assert can_compile()
    with pytest.raises(CudaError, match="nonsense"):
        compile_source('extern "C" __global__ void f() { nonsense; }', "sm_90a")


def normal(*shape: int, seed: int, kind: torch.dtype = KIND, device: str = "cuda") -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(kind)


def expected_of(x: Tensor, weight: Tensor, epilogue: Epilogue, before: Tensor) -> Tensor:
    product = x.float() @ weight.float().t()
    if epilogue is SWIGLU:
        return gated(product.to(x.dtype).float(), SWIGLU)
    return product + before.float() if epilogue is RESIDUAL else product


def check(
    m: int, n: int, k: int, tuning: WideTuning, epilogue: Epilogue, kind: torch.dtype, device: str
) -> None:
    # What stands behind the rows must not reach them.
    buffer = normal(m + 300, k, seed=m + n, kind=kind, device=device)
    buffer[m:] = float("nan")
    double = 2 if epilogue is SWIGLU else 1
    x, weight = buffer[:m], normal(n * double, k, seed=k, kind=kind, device=device) * k**-0.5
    before = normal(m, n, seed=n, kind=kind, device=device)
    out = torch.full((m + 1, n), 7.0, device=device, dtype=kind)
    space = SplitSpace(*wide_space_needed(m, n, tuning), torch.device(device))
    found = []
    for _ in range(3):  # again, as its barriers, turns and counts begin anew
        out[:m] = before if epilogue is RESIDUAL else float("nan")
        space.partial.fill_(float("nan"))
        wide_product(out[:m], x, weight, epilogue, tuning, space)
        found.append(out[:m].clone())
        assert not space.arrived.any(), "the counts are left as they were found"
    torch.testing.assert_close(
        found[0].float(), expected_of(x, weight, epilogue, before), rtol=0.02, atol=0.02
    )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert bool((out[m:] == 7.0).all())


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "tuning", "epilogue", "early"),
    [
        pytest.param(130, 50, 200, WideTuning(16, 2, 3), SWIGLU, False, marks=pytest.mark.slow),
        (300, 66, 456, WideTuning(32, 3, 2, 2), RESIDUAL, True),
        (128, 82, 328, WideTuning(16, 3, 3, 1, 2), SWIGLU, False),
        pytest.param(65, 70, 520, WideTuning(16, 2, 4, 3, 2), RESIDUAL, True, marks=pytest.mark.slow),
        pytest.param(100, 130, 328, WideTuning(32, 3, 2, 2, 4), RESIDUAL, False, marks=pytest.mark.slow),
        (1, 18, 72, WideTuning(16, 2, 2, 2, 4), PLAIN, True),
        pytest.param(140, 34, 264, WideTuning(8, 2, 2, 1, 4), SWIGLU, False, marks=pytest.mark.slow),
        pytest.param(96, 100, 640, WideTuning(32, 4, 6, 1, 4), PLAIN, True, marks=pytest.mark.slow),
    ],
)
def test_on_the_host(
    m: int,
    n: int,
    k: int,
    tuning: WideTuning,
    epilogue: Epilogue,
    early: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three launches, in random orders of threads; two clusters at most, which take several tiles each."""
    function = ClusterFunction(wide_source(tuning, epilogue), tmp_path, early=early)
    monkeypatch.setattr(module, "wide_function", lambda *_: function)
    monkeypatch.setattr(module, "multiprocessors", lambda _: 2 * tuning.cluster)
    monkeypatch.setattr(module, "tensor_map", host_map)
    check(m, n, k, tuning, epilogue, KIND, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k", "tuning", "epilogue"),
    [
        (256, 14336, 4096, WideTuning(), SWIGLU),
        (192, 14336, 4096, WideTuning(), SWIGLU),
        (256, 14336, 4096, WideTuning(128, 3, 5), SWIGLU),
        (129, 2048, 1024, WideTuning(96, 4, 6), SWIGLU),
        (1, 112, 64, WideTuning(), SWIGLU),
        (200, 1000, 200, WideTuning(), SWIGLU),
        (130, 114, 72, WideTuning(8, 2, 2), SWIGLU),
        (700, 6000, 520, WideTuning(), SWIGLU),
        (256, 4096, 14336, WideTuning(256, 4, 5, 4), RESIDUAL),
        (192, 4096, 14336, WideTuning(192, 4, 6, 3), RESIDUAL),
        (256, 4096, 4096, WideTuning(128, 4, 9, 2), RESIDUAL),
        (256, 6144, 4096, WideTuning(192, 4, 6, 2), PLAIN),
        (256, 20000, 1024, WideTuning(256, 4, 5), PLAIN),
        (700, 6002, 520, WideTuning(224, 4, 5), RESIDUAL),
        (300, 514, 520, WideTuning(256, 4, 5, 2), PLAIN),
        (129, 130, 328, WideTuning(16, 2, 2, 3), RESIDUAL),
        (64, 34, 256, WideTuning(32, 3, 4, 4), RESIDUAL),
        (1, 18, 72, WideTuning(16, 2, 2, 2), PLAIN),
        # More items than clusters fit on the chip.
        (256, 8704, 512, WideTuning(128, 4, 9, 2), RESIDUAL),
        (700, 6144, 1024, WideTuning(192, 4, 6, 3), PLAIN),
        # Multiprocessors that share x.
        (128, 14336, 4096, WideTuning(112, 5, 5, 1, 2), SWIGLU),
        (96, 14336, 4096, WideTuning(112, 5, 5, 1, 4), SWIGLU),
        (127, 14336, 4096, WideTuning(128, 4, 5, 1, 4), SWIGLU),
        (65, 1000, 200, WideTuning(96, 5, 6, 1, 2), SWIGLU),
        (1, 114, 64, WideTuning(8, 2, 2, 1, 4), SWIGLU),
        (128, 4096, 14336, WideTuning(128, 6, 8, 4, 2), RESIDUAL),
        (128, 4096, 14336, WideTuning(128, 6, 8, 4, 4), RESIDUAL),
        (100, 4096, 14336, WideTuning(64, 8, 12, 2, 4), RESIDUAL),
        (64, 4096, 4096, WideTuning(64, 8, 12, 2, 2), RESIDUAL),
        (128, 6144, 4096, WideTuning(96, 7, 9, 2, 4), PLAIN),
        (96, 6144, 4096, WideTuning(96, 7, 9, 3, 2), PLAIN),
        (127, 6144, 4096, WideTuning(48, 8, 16, 1, 4), PLAIN),
        (65, 130, 328, WideTuning(16, 2, 2, 3, 4), RESIDUAL),
        (127, 514, 520, WideTuning(256, 4, 5, 2, 2), PLAIN),
        (128, 20000, 1024, WideTuning(256, 4, 5, 1, 2), PLAIN),
        (1, 18, 72, WideTuning(16, 2, 2, 2, 4), PLAIN),
        (300, 6002, 520, WideTuning(96, 7, 9, 2, 4), RESIDUAL),
        (128, 20000, 512, WideTuning(64, 8, 12, 2, 4), RESIDUAL),
    ],
)
def test_against_plain_torch(
    m: int, n: int, k: int, tuning: WideTuning, epilogue: Epilogue, kind: torch.dtype
) -> None:
    assert runs_here()
    check(m, n, k, tuning, epilogue, kind, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "tuning"), [(256, WideTuning()), *((128, WideTuning(112, 5, 5, 1, sharers)) for sharers in (2, 4))]
)
def test_it_waits_for_the_norm_in_front(m: int, tuning: WideTuning) -> None:
    """The kernel runs in a graph, where its weights are asked for while the norm still runs; the buffer
    between is spoilt."""
    n, k = 14336, 4096
    weight = normal(2 * n, k, seed=1) * k**-0.5
    x, gain = torch.zeros(m, k, device="cuda", dtype=KIND), torch.ones(k, device="cuda", dtype=KIND)
    normed, out = torch.zeros_like(x), torch.zeros(m, n, device="cuda", dtype=KIND)

    def run() -> None:
        normed.fill_(float("nan"))
        norm_rows(normed, x, Norm(gain, 1e-5))
        wide_product(out, normed, weight, SWIGLU, tuning)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    for seed in range(20):
        x.copy_(normal(m, k, seed=seed))
        graph.replay()
        expected = expected_of(rms_norm(x, gain, 1e-5), weight, SWIGLU, out)
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "shapes"),
    [
        (256, (WideTuning(256, 4, 5, 4), WideTuning(128, 4, 9, 2), WideTuning(192, 4, 6, 3))),
        (128, (WideTuning(128, 6, 8, 4, 4), WideTuning(64, 8, 12, 2, 2), WideTuning(96, 7, 9, 3, 2))),
    ],
)
def test_products_that_share_a_space_follow_one_another(m: int, shapes: tuple[WideTuning, ...]) -> None:
    """The products run in a graph, as layers do: each may begin early, and adds to what the ones in front of
    it stored."""
    n = 4096
    weights = [normal(n, n, seed=seed) * n**-0.5 for seed in range(4)]
    needs = [wide_space_needed(m, n, tuning) for tuning in shapes]
    elements, tiles = (max(sizes) for sizes in zip(*needs, strict=True))
    space = SplitSpace(elements, tiles, torch.device("cuda"))
    start, hidden = torch.zeros(m, n, device="cuda", dtype=KIND), torch.zeros(m, n, device="cuda", dtype=KIND)
    normed, gain = torch.zeros_like(hidden), torch.ones(n, device="cuda", dtype=KIND)

    def run() -> None:
        hidden.copy_(start)
        for layer in range(12):
            norm_rows(normed, hidden, Norm(gain, 1e-5))
            wide_product(hidden, normed, weights[layer % 4], RESIDUAL, shapes[layer % 3], space)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(20):
        start.copy_(normal(m, n, seed=seed))
        graph.replay()
        expected = start.clone()
        for layer in range(12):
            product = rms_norm(expected, gain, 1e-5).float() @ weights[layer % 4].float().t()
            expected = (expected.float() + product).to(KIND)
        torch.testing.assert_close(hidden.float(), expected.float(), rtol=0.05, atol=0.1)
    assert not space.arrived.any()
