"""Random requests in mode `exact`, batched and churning, against each of them run alone.

What is injected: cancels at random tokens, blocks for a few output tokens only, and fewer blocks than the
slots need, so that sequences are set aside in the host's memory and come back. In full on a GPU; on a CPU
a few, by the plain-torch steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.output_ring import Finish
from services.worker.engine.decode import block_allocation
from tests.engine.crowd import Answer, Crowd, Request
from tests.engine.local_engine import CONFIG, LocalEngine
from tests.support.sampling.random_sampling import random_features, random_limits, random_params

VOCAB = int(CONFIG["vocab_size"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Size:
    requests: int
    slots: int
    blocks: int
    longest_prompt: int
    longest_output: int
    reserve: int
    graph: bool


REDUCED = Size(16, 6, 40, 24, 40, 4, graph=False)
MEDIUM = Size(24, 6, 40, 24, 40, 4, graph=False)
FULL = Size(500, 72, 850, 60, 64, 2, graph=True)
PARTS = 4


@pytest.fixture(autouse=True)
def _small_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come for 8 tokens at a time, as late as they may."""
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)


def random_requests(draw: random.Random, size: Size) -> list[Request]:
    """Every kind of parameter, alone and together; half of them plain, so that batches change their graph."""
    made = []
    for _ in range(size.requests):
        features = random_features(draw) if draw.random() < 0.5 else frozenset[str]()
        params = random_params(draw, features, VOCAB)
        if not features and draw.random() < 0.5:
            params = SamplingParams(draw.choice((0.5, 1.0)), seed=draw.getrandbits(64))
        prompt = tuple(draw.choices(range(VOCAB), k=draw.randint(1, size.longest_prompt)))
        length = draw.randint(2, size.longest_output)
        cancel = draw.randint(1, length) if draw.random() < 0.2 else None
        made.append(Request(prompt, params, random_limits(draw, features, VOCAB, length), cancel))
    return made


def alone(engine: LocalEngine, request: Request) -> Answer:
    """The request without others beside it, all its blocks from the beginning, and not cancelled."""
    key = engine.start(
        request.prompt,
        max_tokens=request.limits.max_tokens,
        sampling=request.params,
        stop=request.limits.stop_token_ids,
        min_tokens=request.limits.min_tokens,
    )
    engine.run(key)
    engine.slots.release(*key)
    engine.pools.release(engine.tables.pop(key))
    return Answer(engine.output.pop(key), engine.logprobs.pop(key), engine.finish.pop(key))


def check(request: Request, got: Answer, wanted: Answer) -> None:
    if got.finish is Finish.CANCELLED:
        assert request.cancel_after is not None
        assert request.cancel_after <= len(got.tokens)
        assert got.tokens == wanted.tokens[: len(got.tokens)]
    else:
        assert got.tokens == wanted.tokens, request
        assert got.finish is wanted.finish
    assert [one is None for one in got.logprobs] == [request.params.logprobs is None] * len(got.tokens)
    for reported, its in zip(got.logprobs, wanted.logprobs, strict=False):
        if reported is not None and its is not None:
            assert reported.logprob == pytest.approx(its.logprob, abs=1e-5)
            assert [token for token, _ in reported.top] == [token for token, _ in its.top]


def prove(folder: Path, size: Size, seed: int, cache_dtype: str = "float32") -> str:
    draw = random.Random(seed)
    requests = random_requests(draw, size)
    how: dict[str, Any] = {
        "device": DEVICE if size.graph else "cpu",
        "graph": size.graph,
        "chunk": 256 if size.graph else 16,
        "cache_dtype": cache_dtype,
    }
    many = LocalEngine(folder / "model", slots=size.slots, blocks=size.blocks, **how)
    crowd = Crowd(many, reserve=size.reserve, host_blocks=4 * size.blocks)
    answers = crowd.run(requests, draw, join=0.9)
    counts = crowd.counts(answers)
    crowd.assert_all_free()
    one = LocalEngine(folder / "model", slots=1, blocks=128, **how)
    for request, answer in zip(requests, answers, strict=True):
        check(request, answer, alone(one, request))
    assert one.pools.free == one.pools.total
    # What was injected took effect.
    assert counts.at_once >= min(size.slots, 64), counts
    assert counts.allocations > size.requests, counts
    assert counts.swapped_out > size.requests // 50, counts
    assert counts.preempted == 0, counts
    assert counts.cancelled > size.requests // 20, counts
    tokens = sum(len(answer.tokens) for answer in answers)
    return f"{len(requests)} requests, {tokens} tokens, {counts}, held rows {many.reader.stalled_rows}"


@pytest.mark.parametrize(
    ("size", "cache_dtype"),
    [
        (REDUCED, "float32"),
        pytest.param(MEDIUM, "float32", marks=pytest.mark.slow),
        pytest.param(MEDIUM, "float8_e4m3fn", marks=pytest.mark.slow),
    ],
    ids=["reduced", "medium", "medium, cache in fp8"],
)
def test_a_few_random_requests(tmp_path: Path, size: Size, cache_dtype: str) -> None:
    print(prove(tmp_path, size, seed=1, cache_dtype=cache_dtype))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_two_thousand_random_requests_on_a_gpu(tmp_path: Path, part: int) -> None:
    print(f"\nPROOF requests part {part}: {prove(tmp_path, FULL, seed=100 + part)}")


@pytest.mark.gpu
@pytest.mark.slow
def test_five_hundred_random_requests_with_a_cache_in_fp8_on_a_gpu(tmp_path: Path) -> None:
    print(f"\nPROOF requests, KV in fp8: {prove(tmp_path, FULL, seed=200, cache_dtype='float8_e4m3fn')}")
