"""A model that several devices divide among them: the same text as `transformers` and, up to the order of
sums, as on one device."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.reference.linear import linear
from baton.engine.model import reference
from baton.engine.model.families.registry import load_config
from baton.engine.model.layers.linear import Product, reference_product
from baton.engine.model.tensors import tensor_specs
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_ranks, load_weights, random_ranks, random_weights
from baton.model_spec.split import splits
from tests.engine.model.quantization.packing import FORMATS
from tests.engine.passes import Passes, Piece
from tests.support.checkpoints import FAMILIES, Case
from tests.support.reference import greedy_matches, load_reference

EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 128}
# Biases and a tied head; two cache groups; norms of heads; norms of results; projections stored fused.
QUICK = ("llama-tied-biases", "qwen2-mixed-windows", "gemma3-biases", "phi3-partial")
CASES = [
    case if case.name in QUICK[1::2] else pytest.param(case, marks=pytest.mark.slow) for case in FAMILIES
]
BIASES, WINDOWS, NORMS, FUSED = (next(case for case in FAMILIES if case.name == name) for name in QUICK)
PROMPT = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_text_equals_transformers_on_any_number_of_devices(case: Case, tmp_path: Path) -> None:
    folder = case.make(tmp_path, **EIGHT)
    outputs = [
        Passes(folder, torch.float32, ranks=ranks).greedy(0, PROMPT, 16, chunk=32) for ranks in (1, 2, 4, 8)
    ]
    assert all(output == outputs[0] for output in outputs)
    greedy_matches(load_reference(folder, torch.float32), PROMPT, outputs[0])
    assert len(set(outputs[0])) > 5


@pytest.mark.parametrize("case", FAMILIES, ids=str)
@pytest.mark.slow
def test_text_equals_transformers_with_the_heads_that_a_family_has(case: Case, tmp_path: Path) -> None:
    folder = case.make(tmp_path)
    config, truth = load_config(folder), load_reference(folder, torch.float32)
    sizes = config.num_heads, config.num_kv_heads, config.intermediate_size
    for ranks in range(2, config.num_kv_heads + 1):
        if not any(size % ranks for size in sizes):
            greedy_matches(truth, PROMPT, Passes(folder, torch.float32, ranks=ranks).greedy(0, PROMPT, 16))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (BIASES, torch.float32),
        (NORMS, torch.bfloat16),
        (FUSED, torch.float32),
        *(
            pytest.param(case, dtype, marks=pytest.mark.slow)
            for case, dtype in (
                (BIASES, torch.bfloat16),
                (NORMS, torch.float32),
                (FUSED, torch.bfloat16),
                (WINDOWS, torch.float32),
            )
        ),
    ],
    ids=str,
)
def test_ranks_have_the_bits_of_one_device_whose_sums_are_split(
    case: Case, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = case.make(tmp_path, **EIGHT)
    for ranks in (2, 8):
        with monkeypatch.context() as patched:
            divided(patched, ranks)
            (expected,) = Passes(folder, dtype).run([(0, 0, PROMPT)])
        (found,) = Passes(folder, dtype, ranks=ranks).run([(0, 0, PROMPT)])
        assert torch.equal(found, expected)


def divided(patched: pytest.MonkeyPatch, ranks: int) -> None:
    """Has one device compute the products that ranks divide by columns as ranks do: each part for itself,
    rounded, then the sum of all in order."""

    def product(one: Product, x: Tensor) -> Tensor:
        if one.name not in ("output", "down"):
            return reference_product(one, x)
        weight, bias = one.linear.weight, one.linear.bias
        assert isinstance(weight, Tensor)
        total = torch.zeros(())
        for number, columns in enumerate(torch.arange(weight.shape[1]).chunk(ranks)):
            part = linear(x[:, columns], weight[:, columns], None if number else bias)
            total = total + part.float()
        return total.to(x.dtype)

    for module in ("attention", "mlp"):
        patched.setattr(f"baton.engine.model.layers.{module}.reference_product", product)


def in_turn(passes: Passes, pieces: list[Piece]) -> Tensor:
    """The logits of pieces, each of a pass of its own."""
    return torch.cat([passes.run([piece])[0] for piece in pieces])


@pytest.mark.parametrize("case", [BIASES, WINDOWS, FUSED], ids=str)
def test_a_rank_reads_nothing_of_another(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights, keys and values of the other ranks are NaN while a rank computes. The second half of the
    prompt reads keys and values that the first one wrote."""
    folder = case.make(tmp_path, **EIGHT)
    pieces: list[Piece] = [(0, 0, PROMPT[:40]), (0, 40, PROMPT[40:])]
    expected = in_turn(Passes(folder, torch.float32, ranks=4), pieces)
    passes, inner, numbers = Passes(folder, torch.float32, ranks=4), reference.rank_pass, itertools.count()
    results: list[Tensor] = []
    owned = [
        [*(t for t in weights.values() if isinstance(t, Tensor)), *cache.groups]
        for weights, cache in zip(passes.weights, passes.memory.ranks, strict=True)
    ]

    def alone(*args: Any) -> Generator[Tensor, Tensor, Tensor]:
        rank, one = next(numbers) % 4, inner(*args)
        others = [tensor for number, tensors in enumerate(owned) if number != rank for tensor in tensors]
        total = None
        while True:
            kept = [tensor.clone() for tensor in others]
            for tensor in others:
                tensor.fill_(torch.nan)
            try:
                partial = next(one) if total is None else one.send(total)
            except StopIteration as end:
                results.append(end.value)
                return results[-1]
            finally:
                for tensor, values in zip(others, kept, strict=True):
                    tensor.copy_(values)
            total = yield partial

    monkeypatch.setattr(reference, "rank_pass", alone)
    assert torch.equal(in_turn(passes, pieces), expected)
    assert len(results) == 8
    for first, *others in (results[:4], results[4:]):
        assert all(torch.equal(other, first) for other in others)
    assert len({tensor.untyped_storage().data_ptr() for tensors in owned for tensor in tensors}) > 4


@pytest.mark.parametrize("case", [BIASES, WINDOWS, FUSED], ids=str)
@pytest.mark.parametrize("drawn", [False, True], ids=["stored", "drawn"])
def test_the_parts_of_all_ranks_are_the_whole(case: Case, drawn: bool, tmp_path: Path) -> None:
    folder = case.make(tmp_path, num_key_value_heads=4)
    config = load_config(folder)
    for count in (2, 4):
        devices = ["cpu"] * count
        if drawn:
            whole = random_weights(config, 5, "cpu", torch.float32)
            ranks = random_ranks(config, 5, devices, torch.float32)
        else:
            whole = load_weights(config, folder, "cpu", torch.float32)
            ranks = load_ranks(config, folder, devices, torch.float32)
        for spec in tensor_specs(config):
            mine = whole[spec.name]
            assert isinstance(mine, Tensor)
            found = torch.full_like(mine, torch.nan)
            for split, weights in zip(splits(count), ranks, strict=True):
                tensor = weights.get(spec.name)
                if not isinstance(tensor, Tensor):
                    assert spec.name.endswith("bias")  # added once, by the first rank
                    assert not split.is_first
                    continue
                part, first = spec.part(split), 0
                for run in part.rows:
                    columns = part.columns or range(mine[0].numel())
                    place = found.view(len(mine), -1)[run.start : run.stop, columns.start : columns.stop]
                    place.copy_(tensor[first : first + len(run)].view(len(run), -1))
                    first += len(run)
            assert torch.equal(found, mine), spec.name


def test_a_vocabulary_that_does_not_divide_has_a_shorter_last_part(tmp_path: Path) -> None:
    for case in (WINDOWS, BIASES):  # a head of its own, and one that is the embedding
        folder = case.make(tmp_path / case.name, num_key_value_heads=4, vocab_size=323)
        passes = Passes(folder, torch.float32, ranks=4)
        assert [len(model.config.head_rows) for model in passes.models] == [81, 81, 81, 80]
        assert [model.head.outputs for model in passes.models] == [81, 81, 81, 80]
        (logits,) = passes.run([(0, 0, PROMPT)])
        (expected,) = Passes(folder, torch.float32).run([(0, 0, PROMPT)])
        assert logits.shape == (70, 323)
        assert float((logits - expected).abs().max()) < 1e-3


@pytest.mark.parametrize("case", [BIASES, FUSED], ids=str)
def test_quantised_parts_have_the_codes_and_scales_of_the_whole(case: Case, tmp_path: Path) -> None:
    folder = case.make(tmp_path, num_key_value_heads=4)
    config = load_config(folder)
    formats = weight_formats(config, "fp8", quantize_head=True)
    whole = load_weights(config, folder, "cpu", torch.float32, formats=formats)
    for loaded, ranks in (
        (whole, load_ranks(config, folder, ["cpu"] * 2, torch.float32, formats=formats)),
        (
            random_weights(config, 5, "cpu", torch.float32, formats=formats),
            random_ranks(config, 5, ["cpu"] * 2, torch.float32, formats=formats),
        ),
    ):
        for spec in tensor_specs(config, own_head=True):
            mine = loaded[spec.name]
            if not isinstance(mine, QuantizedWeight):
                continue
            for split, weights in zip(splits(2), ranks, strict=True):
                part, found = spec.part(split), weights[spec.name]
                assert isinstance(found, QuantizedWeight)
                expected = mine.part(part.rows, part.columns)
                assert torch.equal(found.dequantized(torch.float32), expected.dequantized(torch.float32))
                assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("fp8 by block", {"num_key_value_heads": 4}),
        # Keys and values of 48 rows, which end within a block of 32: their matrix has scales by row.
        ("fp8 by block", {"num_attention_heads": 8, "head_dim": 24}),
        ("fp8 by tensor", {}),
        pytest.param("fp8 by channel", {}, marks=pytest.mark.slow),
        pytest.param("fp8 with exceptions", {}, marks=pytest.mark.slow),
    ],
)
def test_published_quantised_checkpoints_are_divided(
    name: str, heads: dict[str, int], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 2, **heads}
    source = FAMILIES[0].make(tmp_path / "source", **sizes)
    folder, _ = next(one for one in FORMATS if one.name == name).write(source, tmp_path)
    passes, one = (Passes(folder, torch.float32, ranks=ranks) for ranks in (2, 1))
    (weights,) = one.weights
    for spec in tensor_specs(load_config(folder)):
        mine = weights[spec.name]
        for split, theirs in zip(splits(2), passes.weights, strict=True):
            part, found = spec.part(split), theirs[spec.name]
            if isinstance(mine, QuantizedWeight):
                assert isinstance(found, QuantizedWeight)
                expected = mine.part(part.rows, part.columns)
                assert torch.equal(found.dequantized(torch.float32), expected.dequantized(torch.float32))
    assert passes.greedy(0, PROMPT, 8) == one.greedy(0, PROMPT, 8)


def test_layouts_and_digests_do_not_know_the_split(tmp_path: Path) -> None:
    config = load_config(FAMILIES[0].make(tmp_path))
    assert config.of_rank(splits(1)[0]) == config
    part = config.of_rank(splits(2)[1])
    theirs, ours = (one.layout(16, "float32").groups[0].block_bytes for one in (part, config))
    assert 2 * theirs == ours
