"""The graph's steps against the plain-torch ones: on a GPU at length, in Triton's interpreter a few steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.output_ring import Finish
from bench.engine_driver import decode_step
from tests.engine.local_engine import LocalEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 4, 5, 16, 17, 33)]
GREEDY, DRAWN = SamplingParams(), SamplingParams(0.9, seed=2**63 + 11)
FILTERED = SamplingParams(0.9, 20, 0.95, seed=7)
Key = tuple[int, int]


def graph(folder: Path, **options: object) -> LocalEngine:
    return LocalEngine(folder / "model", device=DEVICE, graph=True, **options)  # type: ignore[arg-type]


def plain(folder: Path, **options: object) -> LocalEngine:
    return LocalEngine(folder / "model", device=DEVICE, **options)  # type: ignore[arg-type]


def test_joins_draws_and_a_cancel(tmp_path: Path) -> None:
    """Greedy, drawn by the quicker graph, drawn by the other; one joins while two run; one is cancelled."""
    expected = plain(tmp_path)
    wanted = [
        expected.run(expected.start(PROMPTS[n], max_tokens=4, sampling=sampling))[0]
        for n, sampling in ((3, GREEDY), (1, DRAWN), (4, FILTERED))
    ]
    engine = graph(tmp_path, slots=4)
    keys = [engine.start(PROMPTS[3], max_tokens=4), engine.start(PROMPTS[1], max_tokens=4, sampling=DRAWN)]
    engine.step()
    engine.step()
    cancelled = engine.start(PROMPTS[2], max_tokens=30)
    engine.decode.cancel(*cancelled)
    outputs = engine.run(*keys, cancelled)
    assert outputs[:2] == wanted[:2]
    assert engine.finish[cancelled] is Finish.CANCELLED
    assert len(engine.output[cancelled]) == 1
    assert engine.run(engine.start(PROMPTS[4], max_tokens=4, sampling=FILTERED)) == wanted[2:]
    assert not engine.step()


def test_logprobs_of_the_admitted_token_stand_before_its_word(tmp_path: Path) -> None:
    """The step's first kernel writes that record; those behind it are the sampler's."""
    reported = []
    for engine in (plain(tmp_path, slots=1), graph(tmp_path, slots=1)):
        key = engine.start(PROMPTS[2], max_tokens=2, sampling=SamplingParams(0.8, logprobs=3, seed=5))
        engine.run(key)
        reported.append(engine.logprobs[key])
    (first, second), (mine, my_second) = reported
    assert mine == first
    assert my_second is not None
    assert second is not None
    assert [token for token, _ in my_second.top] == [token for token, _ in second.top]
    assert my_second.logprob == pytest.approx(second.logprob, abs=1e-4)


def test_growing_and_being_moved(tmp_path: Path) -> None:
    """One is held, given blocks, and ends as if it had had them; another is moved, and cancelled too late."""
    expected = plain(tmp_path)
    (wanted,) = expected.run(expected.start(PROMPTS[2], max_tokens=5))
    engine = graph(tmp_path, slots=2, ring_slots=64)  # an engine may have fewer than there is room for
    growing = engine.start(PROMPTS[2], max_tokens=5, capacity=len(PROMPTS[2]) + 1)
    moved = engine.start(PROMPTS[1], max_tokens=20)
    while engine.reader.stalled_rows == 0:
        engine.step()
    number = engine.decode.stall(*growing)
    while not engine.decode.applied(number):
        engine.step()
    engine.decode.preempt(*moved)
    engine.decode.cancel(*moved)
    engine.extend(moved, len(PROMPTS[1]) + 19, len(PROMPTS[1]) + 19)
    engine.decode.extend(*growing, engine.tables[growing], (0,), len(PROMPTS[2]) + 4)
    assert engine.run(growing, moved)[0] == wanted
    assert engine.finish[moved] is Finish.PREEMPTED
    assert 1 < len(engine.output[moved]) < 20
    assert not engine.step()


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_tokens_are_the_plain_steps(tmp_path: Path, numerics: str) -> None:
    for sampling in (
        GREEDY,
        DRAWN,
        FILTERED,
        SamplingParams(0.8, repetition_penalty=1.2, logprobs=3, seed=5),
    ):
        outputs = []
        for make, options in ((plain, {}), (graph, {"numerics": numerics})):
            engine = make(tmp_path, slots=7, blocks=128, **options)
            keys = [engine.start(prompt, max_tokens=40, sampling=sampling) for prompt in PROMPTS]
            outputs.append(engine.run(*keys))
        assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_in_mode_exact_a_token_never_depends_on_its_neighbours(tmp_path: Path, dtype: str) -> None:
    """200 requests that join and leave at random, through every bucket up to 24."""
    draw = random.Random(5)
    requests = [
        (
            [draw.randrange(97) for _ in range(draw.randrange(1, 40))],
            draw.randrange(2, 30),
            SamplingParams(draw.choice((0.0, 0.8)), seed=draw.randrange(1 << 64)),
        )
        for _ in range(200)
    ]
    one = graph(tmp_path, slots=1, dtype=dtype)
    alone = []
    for prompt, length, sampling in requests:
        key = one.start(prompt, max_tokens=length, sampling=sampling)
        alone += one.run(key)
        one.slots.release(*key)
        one.pools.release(one.tables.pop(key))
    many = graph(tmp_path, slots=24, blocks=600, dtype=dtype)
    assert churn(many, requests, draw) == alone
    assert many.slots.free == 24
    assert many.pools.free == many.pools.total


def churn(
    engine: LocalEngine, requests: list[tuple[list[int], int, SamplingParams]], draw: random.Random
) -> list[list[int]]:
    """Runs all, each as soon as a slot is free, with cancels of others between; outputs in their order."""
    running: dict[Key, int] = {}
    outputs: list[list[int]] = [[] for _ in requests]
    waiting = list(enumerate(requests))
    while waiting or running:
        while waiting and engine.slots.free and draw.random() < 0.6:
            number, (prompt, length, sampling) = waiting.pop(0)
            running[engine.start(prompt, max_tokens=length, sampling=sampling)] = number
        if engine.slots.free and draw.random() < 0.2:
            key = engine.start([1, 2, 3], max_tokens=50)
            running[key] = -1
            engine.decode.cancel(*key)
        engine.step()
        for key in [key for key in running if key in engine.finish]:
            number = running.pop(key)
            if number >= 0:
                outputs[number] = engine.output[key]
            engine.slots.release(*key)
            engine.pools.release(engine.tables.pop(key))
            del engine.finish[key], engine.output[key]
    return outputs


@pytest.mark.gpu
def test_a_row_without_a_block_is_held(tmp_path: Path) -> None:
    engine = graph(tmp_path)
    held = engine.start(PROMPTS[2], max_tokens=10, capacity=len(PROMPTS[2]) + 2)
    engine.run(engine.start(PROMPTS[1], max_tokens=10))
    assert held not in engine.finish
    assert len(engine.output[held]) == 3
    assert engine.reader.stalled_rows > 0
    engine.extend(held, len(PROMPTS[2]) + 2, len(PROMPTS[2]) + 9)
    engine.run(held)
    assert len(engine.output[held]) == 10


@pytest.mark.gpu
def test_a_late_reader_stops_the_steps_and_loses_nothing(tmp_path: Path) -> None:
    whole = plain(tmp_path, slots=1, blocks=128)
    expected = whole.run(whole.start(PROMPTS[1], max_tokens=100))
    late = graph(tmp_path, slots=1, blocks=128)
    key = late.start(PROMPTS[1], max_tokens=100)
    settle(late)
    assert late.reader.full_steps > 0
    steps = late.reader.steps
    settle(late)
    assert late.reader.steps == steps
    late.read()
    assert late.run(key) == expected


def settle(engine: LocalEngine) -> None:
    """Steps, unread, until nothing moves."""
    for _ in range(400):
        decode_step(engine.decode)
        torch.cuda.synchronize()
    assert not decode_step(engine.decode)


@pytest.mark.gpu
def test_many_laps_of_the_ring(tmp_path: Path) -> None:
    """Some 64 laps of mailbox and ring: no word is lost, doubled, torn or out of order."""
    engine = graph(tmp_path, slots=2, blocks=128)
    (expected,) = engine.run(engine.start(PROMPTS[1], max_tokens=60))
    engine.slots.release(0, 1)
    engine.pools.release(engine.tables.pop((0, 1)))
    for _ in range(140):
        key = engine.start(PROMPTS[1], max_tokens=60)
        assert engine.run(key) == [expected]
        engine.slots.release(*key)
        engine.pools.release(engine.tables.pop(key))
