from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.passes import Passes, Piece
from tests.support.checkpoints import FAMILIES, MIXTURES, Case
from tests.support.fewer import each_value_once
from tests.support.reference import greedy_matches, load_reference, reference_logits

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Against logits whose standard deviation is some units: float64 is equal but for the order of a few sums.
FLOAT64_TOLERANCE = 1e-9

Checkpoint = Callable[[Case], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made: dict[str, Path] = {}

    def make(case: Case) -> Path:
        if case.name not in made:
            made[case.name] = case.make(tmp_path_factory.mktemp(case.name))
        return made[case.name]

    return make


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("case", [*FAMILIES, *MIXTURES], ids=str)
def test_logits_of_a_prompt_equal_transformers(case: Case, checkpoint: Checkpoint) -> None:
    folder = checkpoint(case)
    prompt = prompt_of(203)
    (logits,) = Passes(folder, torch.float64).run([(0, 0, prompt)])
    expected = reference_logits(load_reference(folder), prompt)
    assert expected.std() > 0.5
    assert float((logits - expected).abs().max()) < FLOAT64_TOLERANCE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("lengths", "count"),
    [((65,), 12), pytest.param((1, 63, 64, 65, 150), 15, marks=pytest.mark.slow)],
    ids=["reduced", "full"],
)
@pytest.mark.parametrize("case", [*FAMILIES, *MIXTURES], ids=str)
def test_greedy_text_equals_transformers_and_varies(
    case: Case, lengths: tuple[int, ...], count: int, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(case)
    passes, reference = Passes(folder, torch.float64, block_tokens=8), load_reference(folder)
    for sequence, length in enumerate(lengths):
        prompt = prompt_of(length, seed=length)
        output = passes.greedy(sequence, prompt, count, chunk=32)
        greedy_matches(reference, prompt, output)
        assert len(set(output)) > 5


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *each_value_once([FAMILIES[0], FAMILIES[9]], DTYPES),
        *(
            pytest.param(case, dtype, marks=pytest.mark.slow)
            for case in (*FAMILIES[4:8], FAMILIES[10], MIXTURES[3])
            for dtype in DTYPES
        ),
    ],
    ids=str,
)
def test_chunks_and_steps_equal_the_whole_bitwise(
    case: Case, dtype: torch.dtype, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(case)
    prompt = prompt_of(90)
    (whole,) = Passes(folder, dtype).run([(0, 0, prompt)])
    for block_tokens, chunk in ((16, 1), (8, 37), (64, 64), (5, 16)):
        passes = Passes(folder, dtype, block_tokens=block_tokens)
        for first in range(0, len(prompt), chunk):
            (logits,) = passes.run([(0, first, prompt[first : first + chunk])])
            assert torch.equal(logits, whole[first : first + chunk]), (block_tokens, chunk, first)


@pytest.mark.parametrize(
    ("case", "dtype"),
    each_value_once([FAMILIES[0], FAMILIES[5], FAMILIES[6], FAMILIES[9], MIXTURES[3]], DTYPES),
    ids=str,
)
def test_rows_do_not_depend_on_their_company_bitwise(
    case: Case, dtype: torch.dtype, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(case)
    lengths = (1, 90, 33, 17, 130, 64)
    prompts = [prompt_of(length, seed=length) for length in lengths]
    alone = [Passes(folder, dtype).run([(i, 0, prompt)])[0] for i, prompt in enumerate(prompts)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        passes = Passes(folder, dtype)
        done = [0] * len(prompts)
        # Each pass takes a random mixture: single steps beside chunks, in a random order.
        while any(done[i] < lengths[i] for i in range(len(prompts))):
            pieces: list[Piece] = []
            for i in torch.randperm(len(prompts), generator=generator).tolist():
                size = (0, 1, 1, 20, 70)[int(torch.randint(5, (), generator=generator))]
                part = prompts[i][done[i] : done[i] + size]
                if part:
                    pieces.append((i, done[i], part))
            for (i, first, ids), logits in zip(pieces, passes.run(pieces) if pieces else [], strict=True):
                assert torch.equal(logits, alone[i][first : first + len(ids)]), (i, first, len(ids))
                done[i] += len(ids)


class ProductShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the shapes of the two matrices of every product, without the batch dimension."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[tuple[int, ...], ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot"):
            self.seen.add(tuple(tuple(arg.shape[-2:]) for arg in args[-2:]))
        return func(*args, **(kwargs or {}))


def test_every_product_has_the_same_shape_whatever_the_batch(checkpoint: Checkpoint) -> None:
    """The reason why the bitwise tests hold on any machine, not only where a library happens to be kind."""
    passes = Passes(checkpoint(FAMILIES[5]), torch.float32)
    seen = []
    for pieces in ([(0, 0, prompt_of(150))], [(0, 150, [7])], [(i, 0, [i]) for i in range(8)]):
        with ProductShapes() as shapes:
            passes.run(pieces)
        seen.append(shapes.seen)
    assert seen[0] == seen[1] == seen[2]
    # qkv, output, gate and up, down, head; scores and values.
    assert len(seen[0]) == 7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_outside_a_sequence_is_never_read(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    """Cache slots of others, of the future and behind the window may hold anything, NaN included."""
    folder = checkpoint(next(case for case in FAMILIES if case.name == "qwen2-mixed-windows"))
    prompt = prompt_of(70)
    (clean,) = Passes(folder, dtype).run([(0, 0, prompt)])
    passes = Passes(folder, dtype)
    for group in passes.cache.groups:
        group.fill_(torch.nan)
    passes.run([(0, 0, prompt[:50])])
    # Blocks that no row of the window will need again are given back: only the windowed group has them.
    windowed = next(i for i, g in enumerate(passes.cache.layout.groups) if g.window is not None)
    passes.cache.groups[windowed][passes.tables[windowed][0, 0]] = torch.nan
    passes.tables[windowed][0, 0] = 0
    (logits,) = passes.run([(0, 50, prompt[50:])])
    assert torch.equal(logits, clean[50:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_transformers(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    for case in (FAMILIES[0], FAMILIES[8], FAMILIES[10], MIXTURES[3]):
        folder = checkpoint(case)
        prompt = prompt_of(120)
        expected = reference_logits(load_reference(folder, torch.float32), prompt)
        (logits,) = Passes(folder, dtype).run([(0, 0, prompt)])
        theirs, ours = (
            (found.float() - expected).square().mean(-1)
            for found in (reference_logits(load_reference(folder, dtype), prompt), logits)
        )
        # A row that rounding gives to another expert is far off, in ours or in theirs.
        summary = torch.mean if case in FAMILIES else torch.median
        assert summary(ours).sqrt() <= 1.5 * summary(theirs).sqrt()
