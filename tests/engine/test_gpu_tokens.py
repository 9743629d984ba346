"""Greedy tokens of the graph's steps in float32 are those that transformers chooses, for every family.

Batches of many sizes start together with mixed lengths and shrink as their sequences end, so every bucket of
rows is used. In full on a GPU; on a CPU one family in Triton's interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engine.local_engine import LocalEngine, Start
from tests.support.checkpoints import FAMILIES, MIXTURES, VOCAB_SIZE, Case
from tests.support.reference import load_reference
from tests.support.tie_rule import Ask, Verdict, judge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST_TIES = 1e-3
BY_NAME = {case.name: case for case in FAMILIES}


@dataclass(frozen=True)
class Size:
    batches: tuple[int, ...]
    longest_prompt: int
    longest_output: int


REDUCED = Size((3,), 9, 4)
FULL = Size((1, 2, 3, 7, 20, 64, 150, 256), 200, 32)


class Steps:
    """Runs asks on one engine, all of them at once."""

    def __init__(self, folder: Path, size: Size, numerics: str) -> None:
        longest, block = size.longest_prompt + size.longest_output, 16
        self.engine = LocalEngine(
            folder,
            checkpoint=True,
            slots=max(size.batches),
            blocks=1 + max(size.batches) * -(-longest // block),
            block_tokens=block,
            chunk=2048,
            device=DEVICE,
            graph=True,
            numerics=numerics,
            longest=longest,
        )

    def run(self, asks: Sequence[Ask], forced: Sequence[tuple[int, ...]]) -> list[list[int]]:
        engine = self.engine
        # Prefill draws the first; a slot, once admitted, draws one more at least.
        starts = [
            Start(ask.prompt, max_tokens=max(ask.count, len(before) + 2), emitted=before)
            for ask, before in zip(asks, forced, strict=True)
        ]
        keys = engine.start_many(starts)
        assert len(keys) == len(starts)
        outputs = engine.run(*keys)
        for key in keys:
            engine.slots.release(*key)
            engine.pools.release(engine.tables.pop(key))
        return [
            output[: ask.count - len(before)]
            for output, ask, before in zip(outputs, asks, forced, strict=True)
        ]


def prove(folder: Path, size: Size, numerics: str, seed: int) -> Verdict:
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is no float32"
    assert not torch.backends.cuda.matmul.allow_tf32
    steps = Steps(folder, size, numerics)
    model = load_reference(folder, torch.float32).to(DEVICE)
    draw, verdict = random.Random(seed), Verdict(0, 0, ())
    for batch in size.batches:
        asks = [
            Ask(
                tuple(draw.choices(range(VOCAB_SIZE), k=draw.randint(1, size.longest_prompt))),
                draw.randint(2, size.longest_output),
            )
            for _ in range(batch)
        ]
        verdict += judge(model, asks, steps.run)
    assert steps.engine.pools.free == steps.engine.pools.total
    assert not verdict.wrong, verdict
    assert verdict.ties <= MOST_TIES * verdict.tokens, verdict
    return verdict


@pytest.mark.parametrize("name", ["llama-3-kv-heads"])
def test_a_few_tokens_of_one_family(tmp_path: Path, name: str) -> None:
    prove(BY_NAME[name].make(tmp_path, seed=3), REDUCED, "exact", seed=1)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("case", [*FAMILIES, *MIXTURES], ids=str)
def test_tokens_of_every_family_on_a_gpu(tmp_path: Path, case: Case, numerics: str) -> None:
    verdict = prove(case.make(tmp_path, seed=3), FULL, numerics, seed=1)
    print(f"\nPROOF tokens {case} {numerics}: {verdict.tokens} tokens, {verdict.ties} ties, 0 wrong")
