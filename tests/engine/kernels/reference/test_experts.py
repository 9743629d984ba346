"""The router and the sum of experts, against their definitions, for every kind of routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.quantized_weight import dense
from baton.engine.kernels.reference.experts import NO_EXPERT, mix, route
from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.kernels.weight_stack import WeightStack
from baton.engine.model.quantization.quantize import quantize

EXPERTS, HIDDEN, INNER = 5, 24, 12
SHAPES = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def stacks() -> dict[str, WeightStack]:
    return {
        name: WeightStack(random(EXPERTS * rows, columns, seed=rows), EXPERTS)
        for name, (rows, columns) in SHAPES.items()
    }


def routings(rows: int) -> dict[str, Tensor]:
    """Experts of each row, two of EXPERTS."""
    even = torch.arange(rows)
    return {
        "all to one": torch.tensor([[3, 1]]).repeat(rows, 1),
        "each to another": torch.stack((even % EXPERTS, (even + 2) % EXPERTS), 1),
        "one expert with none": torch.stack((even % 2, 3 + even % 2), 1),
        "rows with none": torch.where(even[:, None] % 3 == 0, NO_EXPERT, torch.tensor([[4, 0]])),
    }


@pytest.mark.parametrize("rows", [1, 2, 17, 256])
def test_each_row_gets_the_weighted_sum_of_its_experts(rows: int, stacks: dict[str, WeightStack]) -> None:
    x, weights = random(rows, HIDDEN), random(rows, 2, seed=1).abs().float()
    for name, ids in routings(rows).items():
        found = mix(x, ids, weights, **stacks, gate=Epilogue.SWIGLU)
        expected = torch.zeros_like(x)
        for row in range(rows):
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                if expert != NO_EXPERT:
                    gate, up = (dense(stacks["gate_up"].matrix(expert), x.dtype) @ x[row]).chunk(2)
                    inner = torch.nn.functional.silu(gate) * up
                    expected[row] += weight * (dense(stacks["down"].matrix(expert), x.dtype) @ inner)
        assert torch.allclose(found, expected, rtol=0, atol=1e-11), name
        assert torch.equal(found, mix(x, ids, weights, **stacks, gate=Epilogue.SWIGLU))
        by_row = [
            mix(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], **stacks, gate=Epilogue.SWIGLU)
            for i in range(min(rows, 20))
        ]
        assert torch.equal(found[:20], torch.cat(by_row)), name


def test_experts_that_no_row_takes_are_not_read(stacks: dict[str, WeightStack]) -> None:
    x, ids = random(8, HIDDEN), torch.tensor([[3, 1], [NO_EXPERT, NO_EXPERT]] * 4)
    clean = mix(x, ids, torch.ones(8, 2), **stacks, gate=Epilogue.GEGLU)
    for stack in stacks.values():
        for expert in (0, 2, 4):
            dense(stack.matrix(expert), x.dtype).fill_(torch.nan)
    assert torch.equal(mix(x, ids, torch.ones(8, 2), **stacks, gate=Epilogue.GEGLU), clean)
    assert not bool(clean[1::2].any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalise", [True, False])
def test_the_router_takes_the_largest_shares(normalise: bool, dtype: torch.dtype) -> None:
    x, router = random(33, HIDDEN).to(dtype), random(EXPERTS, HIDDEN, seed=2).to(dtype)
    ids, weights = route(x, router, 3, normalise=normalise)
    shares = (x.double() @ router.double().t()).softmax(-1)
    best = shares.topk(3)
    assert torch.equal(ids, best.indices)
    expected = best.values / best.values.sum(-1, keepdim=True) if normalise else best.values
    assert weights.dtype is torch.float32
    assert torch.allclose(weights.double(), expected, rtol=1e-5)


def test_of_equal_experts_the_lower_is_taken() -> None:
    router = random(1, HIDDEN).repeat(EXPERTS, 1)
    router[1] = 0
    ids, _ = route(router[:1].repeat(40, 1), router, 3, normalise=True)
    assert torch.equal(ids, torch.tensor([[0, 2, 3]]).repeat(40, 1))


@pytest.mark.parametrize(
    "weight_format",
    [WeightFormat("fp8"), WeightFormat("fp8", 12, 8), WeightFormat("int4", scale_columns=128)],
    ids=lambda weight_format: weight_format.name,
)
def test_a_quantised_stack_has_the_matrices_of_its_codes(weight_format: WeightFormat) -> None:
    codes = quantize(random(EXPERTS * 24, HIDDEN), weight_format)
    stack, whole = WeightStack(codes, EXPERTS), codes.dequantized(torch.float32).view(EXPERTS, 24, HIDDEN)
    assert stack.shape == (EXPERTS, 24, HIDDEN)
    for number in range(EXPERTS):
        matrix = stack.matrix(number)
        assert not isinstance(matrix, Tensor)
        assert torch.equal(matrix.dequantized(torch.float32), whole[number])
        assert matrix.codes.untyped_storage().data_ptr() == codes.codes.untyped_storage().data_ptr()
