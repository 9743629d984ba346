"""Costs of formats for the demo model: perplexity of held-out conversations, and the error of its logits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.reference.linear import linear as plain_linear
from baton.engine.kernels.weight_format import FORMATS
from baton.engine.model.quantization.quantize import quantize
from models.demo_training.conversation import Row, RowMaker
from models.demo_training.evaluate import DEMO_MODEL
from tests.engine.passes import Passes

MAKER = RowMaker(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))
FP8 = torch.float8_e4m3fn
Sizes = tuple[tuple[int, int], tuple[int, int]]
# Short and long conversations, and the tokens of each.
REDUCED, FULL = ((1, 192), (1, 256)), ((40, 1024), (12, 3072))
SIZES = pytest.mark.parametrize(
    "sizes", [REDUCED, pytest.param(FULL, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)


@dataclass(frozen=True)
class Variant:
    """Formats of a run. `activations`: that of products' inputs, where GPUs multiply codes by codes; `head`:
    whether the head is quantised too."""

    cache: torch.dtype | None = None
    weights: str | None = None
    activations: str | None = None
    head: bool = False


EXACT = Variant()


@SIZES
def test_a_cache_in_fp8(sizes: Sizes) -> None:
    """Perplexity of the assistant's tokens, and of all, within 0.5 %."""
    check_cost(sizes, {"KV in fp8": (Variant(cache=FP8), 0.005)})


# With the perplexity that each may cost.
WEIGHTS = {
    "fp8, W8A8, KV in fp8": (Variant(FP8, "fp8", "fp8"), 0.005),
    "int4": (Variant(weights="int4"), 0.03),
    "fp8": (Variant(weights="fp8"), 0.005),
    "fp8, W8A8": (Variant(weights="fp8", activations="fp8"), 0.005),
    "int8": (Variant(weights="int8"), 0.005),
    "fp8, head too": (Variant(weights="fp8", head=True), 0.005),
    "fp8, head too, W8A8": (Variant(weights="fp8", activations="fp8", head=True), 0.005),
    "int8, head too": (Variant(weights="int8", head=True), 0.005),
    "int4, head too": (Variant(weights="int4", head=True), 0.03),
    "int8, W8A8": (Variant(weights="int8", activations="int8"), 0.005),
}


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (REDUCED, [*list(WEIGHTS)[:2], "int4, head too"]),
        pytest.param(FULL, list(WEIGHTS), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=["reduced", "full"],
)
def test_quantised_weights(sizes: Sizes, names: list[str]) -> None:
    """The perplexity rises by at most 0.5 % for codes of 8 bits, 3 % for those of 4."""
    check_cost(sizes, {name: WEIGHTS[name] for name in names})


def check_cost(sizes: Sizes, variants: Mapping[str, tuple[Variant, float]]) -> None:
    """Asserts that each variant's perplexity is higher than the unquantised model's by no more than its
    bound."""
    losses: dict[str, list[Tensor]] = {name: [] for name in ("exact", *variants)}
    errors: dict[str, list[Tensor]] = {name: [] for name in variants}
    answers = []
    for row in held_out(sizes):
        ids = row.ids.astype(int).tolist()
        answers.append(torch.from_numpy(row.answers[1:]))
        exact = logits_of(ids, EXACT)
        losses["exact"].append(losses_of(exact, ids))
        for name, (variant, _) in variants.items():
            logits = logits_of(ids, variant)
            losses[name].append(losses_of(logits, ids))
            errors[name].append((logits - exact).square().mean().sqrt() / exact.std())
    mine = torch.cat(answers)
    for part, chosen in (("answers", mine), ("all", torch.ones_like(mine))):
        mean = {name: float(torch.cat(found)[chosen].double().mean()) for name, found in losses.items()}
        for name, (_, most) in variants.items():
            more, error = math.expm1(mean[name] - mean["exact"]), float(torch.stack(errors[name]).mean())
            print(
                f"\nPROOF perplexity of {int(chosen.sum())} tokens, {part}: {math.exp(mean['exact']):.4f}, "
                f"{name} {more:+.3%}; RMS of logits {error:.4f} of their spread",
                end="",
            )
            assert more <= most, name
            assert error > 1e-4, f"{name} differs"


def held_out(sizes: Sizes) -> list[Row]:
    """Conversations of seeds that training never uses."""
    draw = random.Random("exam/perplexity")
    (short, short_length), (long, long_length) = sizes
    rows = [MAKER.short(draw, short_length) for _ in range(short)]
    return rows + [MAKER.long(draw, long_length, 1.0) for _ in range(long)]


def passes_of(variant: Variant, length: int) -> Passes:
    """The demo model in a variant's formats, for one sequence; activations are the caller's."""
    return Passes(
        DEMO_MODEL,
        torch.float32,
        sequences=1,
        length=length,
        cache_dtype=variant.cache,
        quantization=variant.weights,
        quantize_head=variant.head,
    )


def logits_of(ids: list[int], variant: Variant, passes: Passes | None = None) -> Tensor:
    """[len(ids), vocab]. `passes`: the variant's, whatever ran before."""
    passes = passes or passes_of(variant, len(ids))
    with codes_of_activations(variant.activations):
        return torch.cat([passes.run([(0, at, ids[at : at + 256])])[0] for at in range(0, len(ids), 256)])


def losses_of(logits: Tensor, ids: list[int]) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")


@contextmanager
def codes_of_activations(name: str | None) -> Iterator[None]:
    """Rounds the inputs of products with quantised weights to codes with a scale a row, within the block."""

    def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if name is not None and isinstance(weight, QuantizedWeight):
            x = quantize(x, FORMATS[name]).dequantized(x.dtype)
        return plain_linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.engine.model.reference.linear", linear)
        yield
