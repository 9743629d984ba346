"""What formats cost the demo model: perplexity of held-out conversations, and the error of its logits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tokenizers import Tokenizer

from models.demo_training.conversation import Row, RowMaker
from models.demo_training.evaluate import DEMO_MODEL
from tests.engine.passes import Passes

MAKER = RowMaker(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))
FP8 = torch.float8_e4m3fn
# Short and long conversations, and the tokens of each.
REDUCED, FULL = ((1, 256), (1, 512)), ((40, 1024), (12, 3072))


def held_out(sizes: tuple[tuple[int, int], tuple[int, int]]) -> list[Row]:
    """Conversations of seeds that training never uses."""
    draw = random.Random("exam/perplexity")
    (short, short_length), (long, long_length) = sizes
    rows = [MAKER.short(draw, short_length) for _ in range(short)]
    return rows + [MAKER.long(draw, long_length, 1.0) for _ in range(long)]


@pytest.mark.parametrize(
    "sizes", [REDUCED, pytest.param(FULL, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_cache_in_fp8(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Perplexity of the assistant's tokens, and of all, within 0.5 %."""
    losses: dict[str, list[torch.Tensor]] = {"exact": [], "fp8": []}
    errors, answers = [], []
    for row in held_out(sizes):
        ids = row.ids.astype(int).tolist()
        targets = torch.tensor(ids[1:])
        answers.append(torch.from_numpy(row.answers[1:]))
        logits = {}
        for name, cache in (("exact", None), ("fp8", FP8)):
            passes = Passes(DEMO_MODEL, torch.float32, sequences=1, length=len(ids), cache_dtype=cache)
            logits[name] = torch.cat(
                [passes.run([(0, at, ids[at : at + 256])])[0] for at in range(0, len(ids), 256)]
            )
            losses[name].append(
                torch.nn.functional.cross_entropy(logits[name][:-1], targets, reduction="none")
            )
        errors.append((logits["fp8"] - logits["exact"]).square().mean().sqrt() / logits["exact"].std())
    mine = torch.cat(answers)
    for part, chosen in (("answers", mine), ("all", torch.ones_like(mine))):
        mean = {name: float(torch.cat(found)[chosen].double().mean()) for name, found in losses.items()}
        more = math.expm1(mean["fp8"] - mean["exact"])
        print(
            f"\nPROOF perplexity of {int(chosen.sum())} tokens, {part}: {math.exp(mean['exact']):.4f}, "
            f"KV in fp8 {more:+.3%}; RMS of logits {float(torch.stack(errors).mean()):.4f} of their spread",
            end="",
        )
        assert more <= 0.005
    assert torch.stack(errors).mean() > 1e-4, "the caches differ"
