"""The widest product in CUDA C++: against plain torch on a GPU; what it refuses, anywhere."""

from __future__ import annotations

import pytest
import torch

from baton.device.cuda_runtime import CudaError
from baton.device.cuda_source import can_compile, compile_source
from baton.engine.kernels.gpu.row_ops import norm_rows
from baton.engine.kernels.gpu.wide_swiglu import WideTuning, runs_here, wide_swiglu
from baton.engine.kernels.rms_norm import rms_norm
from baton.engine.kernels.swiglu import swiglu

KIND = torch.bfloat16


def zeros(*shape: int, kind: torch.dtype = KIND) -> torch.Tensor:
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
    ],
    ids=["odd", "rows", "unaligned", "kinds", "float32", "strided", "columns", "memory"],
)
def test_what_does_not_fit(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tuning: WideTuning
) -> None:
    with pytest.raises(ValueError, match=r"fit|dtypes|contiguous|columns|shared memory"):
        wide_swiglu(out, x, weight, tuning)


@pytest.mark.gpu
def test_the_compilers_words_are_told() -> None:
    assert can_compile()
    with pytest.raises(CudaError, match="nonsense"):
        compile_source('extern "C" __global__ void f() { nonsense; }', "sm_90a")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k", "tuning"),
    [
        (256, 14336, 4096, WideTuning()),
        (192, 14336, 4096, WideTuning()),
        (256, 14336, 4096, WideTuning(128, 3, 5)),
        (129, 2048, 1024, WideTuning(96, 4, 6)),
        (1, 112, 64, WideTuning()),
        (200, 1000, 200, WideTuning()),
        (130, 114, 72, WideTuning(8, 2, 2)),
        (700, 6000, 520, WideTuning()),
    ],
)
def test_against_plain_torch(m: int, n: int, k: int, tuning: WideTuning, kind: torch.dtype) -> None:
    assert runs_here()
    generator = torch.Generator("cuda").manual_seed(m + n + k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(kind)

    # What stands behind the rows must not reach them.
    buffer = normal(m + 300, k)
    buffer[m:] = float("nan")
    x, weight = buffer[:m], normal(2 * n, k) * k**-0.5
    out = torch.full((m + 1, n), 7.0, device="cuda", dtype=kind)
    for _ in range(3):  # again, as its barriers and turns begin anew
        out[:m] = 0.0
        wide_swiglu(out[:m], x, weight, tuning)
    expected = swiglu((x.float() @ weight.float().t()).to(kind).float())
    torch.testing.assert_close(out[:m].float(), expected, rtol=0.02, atol=0.02)
    assert bool((out[m:] == 7.0).all())


@pytest.mark.gpu
def test_it_waits_for_the_norm_in_front() -> None:
    """In a graph, where its weights are asked for while the norm still runs; the buffer between is spoilt."""
    m, n, k = 256, 14336, 4096
    weight = torch.randn(2 * n, k, device="cuda", dtype=KIND) * k**-0.5
    x, gain = torch.zeros(m, k, device="cuda", dtype=KIND), torch.ones(k, device="cuda", dtype=KIND)
    normed, out = torch.zeros_like(x), torch.zeros(m, n, device="cuda", dtype=KIND)

    def run() -> None:
        normed.fill_(float("nan"))
        norm_rows(normed, x, gain, 1e-5)
        wide_swiglu(out, normed, weight)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    for seed in range(20):
        x.copy_(torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        graph.replay()
        expected = swiglu((rms_norm(x, gain, 1e-5).float() @ weight.float().t()).to(KIND).float())
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.05)
