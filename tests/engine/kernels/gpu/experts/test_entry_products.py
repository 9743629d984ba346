"""The products of few rows with their experts, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.experts.entry_products import add_down_entries, gate_up_entries
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
from baton.engine.kernels.reference.experts import mix
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.kernels.weight_stack import WeightStack
from baton.engine.model.quantization.quantize import quantize
from tests.engine.forced import relative_rms
from tests.engine.kernels.gpu.experts.routings import as_ids, normal, routings
from tests.engine.kernels.gpu.experts.test_experts import CODES, Mixture

# Tiles that end within a row of W.
TUNING = GemvTuning(rows=8, width=32)


def by_entries(
    mixture: Mixture, hidden: Tensor, x: Tensor, ids: Tensor, weights: Tensor, tuning: GemvTuning | None,
    gate: Epilogue = Epilogue.SWIGLU,
) -> Tensor:  # fmt: skip
    inner = x.new_full((ids.numel(), mixture.down.shape[2]), torch.nan)
    out = hidden.clone()
    gate_up_entries(inner, x, ids, mixture.gate_up, gate, tuning)
    add_down_entries(out, inner, ids, weights, mixture.down, tuning)
    return out


# Few tiles of a row, loaded at once, and so many that they are loaded in turn.
@pytest.mark.parametrize(
    ("form", "hidden", "inner"),
    [*((form, 96, 64) for form in (None, *CODES)), (CODES[0], 16, 1056)],
    ids=str,
)
def test_entries_give_what_the_reference_gives(form: WeightFormat | None, hidden: int, inner: int) -> None:
    rows, top_k, experts = 2, 2, 5
    mixture = Mixture.random(experts, hidden, inner, torch.float32, form)
    x, stream, weights = (
        normal(rows, hidden, seed=3),
        normal(rows, hidden, seed=4),
        normal(rows, top_k, seed=5),
    )
    for name in ("all to the same", "some with none"):
        ids = as_ids(routings(rows, top_k, experts)[name])
        found = by_entries(mixture, stream, x, ids, weights, TUNING)
        expected = stream + mix(x, ids.long(), weights, mixture.gate_up, mixture.down, Epilogue.SWIGLU)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4, msg=name)
        assert torch.equal(found[ids[:, 0] < 0], stream[ids[:, 0] < 0]), name


@pytest.mark.parametrize("gate", [Epilogue.SWIGLU, Epilogue.GEGLU])
def test_odd_widths_and_each_gate(gate: Epilogue) -> None:
    mixture = Mixture.random(5, 40, 20, torch.float32)
    x, stream, weights = normal(2, 40, seed=3), normal(2, 40, seed=4), normal(2, 3, seed=5)
    ids = as_ids(torch.tensor([[4, 0, 2], [1, 2, 3]]))
    expected = stream + mix(x, ids.long(), weights, mixture.gate_up, mixture.down, gate)
    found = by_entries(mixture, stream, x, ids, weights, TUNING, gate)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_that_no_row_takes_are_not_read() -> None:
    mixture = Mixture.random(5, 40, 20, torch.float32)
    x, stream, weights = normal(2, 40, seed=3), normal(2, 40, seed=4), normal(2, 2, seed=5)
    ids = as_ids(torch.tensor([[3, 1], [-1, -1]]))
    clean = by_entries(mixture, stream, x, ids, weights, None)
    for stack in (mixture.gate_up, mixture.down):
        for expert in (0, 2, 4):
            matrix = stack.matrix(expert)
            assert isinstance(matrix, Tensor)
            matrix.fill_(torch.nan)
    x[1] = torch.nan
    found = by_entries(mixture, stream, x, ids, weights, None)
    assert torch.equal(found, clean)
    assert bool(found.isfinite().all())


def test_what_does_not_fit_is_refused() -> None:
    mixture = Mixture.random(3, 64, 32, torch.float32)
    ids, weights = as_ids(torch.tensor([[0, 1]])), normal(1, 2)
    with pytest.raises(ValueError, match="do not fit"):
        gate_up_entries(normal(2, 31), normal(1, 64), ids, mixture.gate_up, Epilogue.SWIGLU)
    with pytest.raises(ValueError, match="do not fit"):
        gate_up_entries(normal(2, 32), normal(1, 64), ids, mixture.gate_up, Epilogue.PLAIN)
    with pytest.raises(ValueError, match="do not fit"):
        add_down_entries(normal(1, 63), normal(2, 32), ids, weights, mixture.down)
    with pytest.raises(ValueError, match="contiguous"):
        add_down_entries(normal(1, 64), normal(32, 2).mT, ids, weights, mixture.down)
    blocks = WeightStack(quantize(normal(3 * 48, 64), WeightFormat("fp8", 32, 64)), 3)
    with pytest.raises(ValueError, match="no kernel for experts of 48 rows in fp8-32x64"):
        gate_up_entries(normal(2, 24), normal(1, 64), ids, blocks, Epilogue.SWIGLU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form", [None, WeightFormat("fp8"), WeightFormat("fp8", 128, 128), FORMATS["int4"]], ids=str
)
@pytest.mark.parametrize(
    "shape", [(4, 8, 32, 2048, 768), (1, 2, 3, 4096, 14336)], ids=["qwen3-30b-a3b", "mixtral-8x7b"]
)
def test_entries_at_full_width(form: WeightFormat | None, shape: tuple[int, int, int, int, int]) -> None:
    rows, top_k, experts, hidden, inner = shape
    mixture = Mixture.random(experts, hidden, inner, torch.bfloat16, form)
    x, stream = normal(rows, hidden, seed=3, dtype=torch.bfloat16), torch.zeros(rows, hidden)
    weights = normal(rows, top_k, seed=5)
    for name, routing in routings(rows, top_k, experts).items():
        ids = as_ids(routing)
        expected = mix(x, ids.long(), weights, mixture.gate_up, mixture.down, Epilogue.SWIGLU)
        found = by_entries(mixture, stream.to(x), x, ids, weights, None)
        assert relative_rms(found.float(), expected.float()) < 0.02, name
        assert torch.equal(found, by_entries(mixture, stream.to(x), x, ids, weights, None)), name
