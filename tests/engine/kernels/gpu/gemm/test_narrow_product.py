"""The product of few rows in CUDA C++: against plain torch on a GPU; what it refuses, anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.narrow_product import NarrowTuning, narrow_product
from baton.engine.kernels.gpu.gemm.wide_product import EPILOGUES, runs_here
from baton.engine.kernels.gpu.step.row_ops import norm_rows
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.tuning.candidates import BUCKETS, candidates
from tests.engine.kernels.gpu.gemm.test_wide_product import KIND, expected_of, normal, zeros

PLAIN, RESIDUAL, SWIGLU = EPILOGUES


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        (NarrowTuning(rows=20), "rows"),
        (NarrowTuning(rows=136), "rows"),
        (NarrowTuning(groups=5), "groups"),
        (NarrowTuning(halves=1), "halves|tiles of W, SWIGLU"),
        (NarrowTuning(splits=9), "splits"),
        (NarrowTuning(splits=4), "splits"),  # of 192, 64 at a time
        (NarrowTuning(stages=6), "shared memory"),
        (NarrowTuning(stages=1), "shared memory"),
    ],
)
def test_tilings_that_do_not_fit(tuning: NarrowTuning, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        narrow_product(zeros(4, 16), zeros(4, 192), zeros(32, 192), SWIGLU, tuning)


def test_tensors_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        narrow_product(zeros(4, 16), zeros(4, 64), zeros(30, 64), SWIGLU)
    with pytest.raises(ValueError, match="dtypes"):
        narrow_product(zeros(4, 16), zeros(4, 64), zeros(16, 64, kind=torch.float16))


CASES = [
    (48, 14336, 4096, NarrowTuning(), SWIGLU),
    (33, 14336, 4096, NarrowTuning(48, 1, 2), SWIGLU),
    (96, 14336, 4096, NarrowTuning(96, 2, 2, 1, 4), SWIGLU),
    (5, 130, 72, NarrowTuning(8, 1, 2, 1, 4), SWIGLU),
    (70, 200, 200, NarrowTuning(32, 2, 2, 1, 4), SWIGLU),
    (48, 14336, 4096, NarrowTuning(48, 2, 2, 2), SWIGLU),
    (48, 6144, 4096, NarrowTuning(48, 1, 1, 1, 7), PLAIN),
    (64, 6144, 4096, NarrowTuning(64, 1, 1, 2, 7), PLAIN),
    (24, 4096, 4096, NarrowTuning(24, 2, 1, 4, 8), RESIDUAL),
    (48, 4096, 14336, NarrowTuning(48, 1, 2, 4), RESIDUAL),
    (128, 4096, 14336, NarrowTuning(128, 1, 1, 8, 7), RESIDUAL),
    (40, 4096, 14336, NarrowTuning(40, 3, 1, 5, 5), RESIDUAL),
    (48, 128256, 4096, NarrowTuning(48, 1, 2), PLAIN),
    (3, 18, 72, NarrowTuning(16, 1, 1, 2, 4), PLAIN),
    (129, 514, 520, NarrowTuning(64, 4, 1, 3, 4), RESIDUAL),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k", "tuning", "epilogue"), CASES)
def test_against_plain_torch(
    m: int, n: int, k: int, tuning: NarrowTuning, epilogue: Epilogue, kind: torch.dtype
) -> None:
    assert runs_here()
    # What stands behind the rows must not reach them.
    buffer = normal(m + 300, k, seed=m + n, kind=kind)
    buffer[m:] = float("nan")
    x, weight = buffer[:m], normal(n * (2 if epilogue is SWIGLU else 1), k, seed=k, kind=kind) * k**-0.5
    before = normal(m, n, seed=n, kind=kind)
    out = torch.full((m + 1, n), 7.0, device="cuda", dtype=kind)
    found = []
    for _ in range(3):
        out[:m] = before
        narrow_product(out[:m], x, weight, epilogue, tuning)
        found.append(out[:m].clone())
    torch.testing.assert_close(
        found[0].float(), expected_of(x, weight, epilogue, before), rtol=0.02, atol=0.02
    )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert bool((out[m:] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [bucket for bucket in BUCKETS if 1 < bucket <= 128])
def test_all_candidates_compile_and_agree(rows: int) -> None:
    from baton.engine.model.modules import Linear, Product

    for name, n, k, epilogue in (("gate_up", 1024, 512, SWIGLU), ("down", 512, 1024, RESIDUAL)):
        weight = normal(n * (2 if epilogue is SWIGLU else 1), k, seed=k) * k**-0.5
        product = Product(name, Linear(weight, None), epilogue)
        x, before = normal(rows, k, seed=rows), normal(rows, n, seed=n)
        for tuning in candidates(product, rows):
            if isinstance(tuning, NarrowTuning):
                out = before.clone()
                narrow_product(out, x, weight, epilogue, tuning)
                expected = expected_of(x, weight, epilogue, before)
                torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_layers_follow_one_another_in_a_graph() -> None:
    """Each may begin early, and adds to what the ones in front of it stored; the buffer between is spoilt."""
    m, n = 48, 4096
    shapes = (NarrowTuning(48, 1, 1, 4, 7), NarrowTuning(48, 2, 1, 2, 8), NarrowTuning(48, 1, 2, 1, 5))
    weights = [normal(n, n, seed=seed) * n**-0.5 for seed in range(4)]
    start, hidden = torch.zeros(m, n, device="cuda", dtype=KIND), torch.zeros(m, n, device="cuda", dtype=KIND)
    normed, gain = torch.zeros_like(hidden), torch.ones(n, device="cuda", dtype=KIND)

    def run() -> None:
        hidden.copy_(start)
        for layer in range(12):
            norm_rows(normed, hidden, Norm(gain, 1e-5))
            narrow_product(hidden, normed, weights[layer % 4], RESIDUAL, shapes[layer % 3])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(20):
        start.copy_(normal(m, n, seed=seed))
        graph.replay()
        expected: Tensor = start.clone()
        for layer in range(12):
            product = rms_norm(expected, gain, 1e-5).float() @ weights[layer % 4].float().t()
            expected = (expected.float() + product).to(KIND)
        torch.testing.assert_close(hidden.float(), expected.float(), rtol=0.05, atol=0.1)
