"""Steps whose tokens the full sampler draws: rows held for masks, and batches that change graphs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from baton.device.streams.graphs import Graph
from baton.engine.decode.graph_step import StepGraphs
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.output_ring import Finish
from tests.engine.local_engine import CONFIG, LocalEngine
from tests.engine.sampled_batch import mask_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = int(CONFIG["vocab_size"])
PROMPT = [7, 8, 9]
Key = tuple[int, int]


@pytest.fixture(params=["plain", "graph"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> LocalEngine:
    """Both back ends keep one contract."""
    graph = request.param == "graph"
    return LocalEngine(tmp_path / "model", slots=2, device=DEVICE if graph else "cpu", graph=graph)


def allow(engine: LocalEngine, key: Key, number: int, *tokens: int) -> None:
    """Writes the mask of a request's token `number`; the prompt is PROMPT."""
    engine.decode.write_masks([(*key, len(PROMPT) + number, mask_bits(tokens, VOCAB))])


def steps_until(engine: LocalEngine, key: Key, tokens: int) -> None:
    deadline = time.monotonic() + 20
    while len(engine.output[key]) < tokens:
        engine.step()
        assert time.monotonic() < deadline, "no token came"


def held_for_a_while(engine: LocalEngine, key: Key) -> bool:
    """Steps some; whether the request's rows were held and no token came."""
    before, reported = engine.reader.stalled_rows, len(engine.output[key])
    deadline = time.monotonic() + 20
    while engine.reader.stalled_rows == before and time.monotonic() < deadline:
        engine.step()
    return engine.reader.stalled_rows > before and len(engine.output[key]) == reported


def test_a_masked_row_is_held_until_the_mask_of_its_very_token_is_there(engine: LocalEngine) -> None:
    (free,) = engine.run(engine.start(PROMPT, max_tokens=4))
    engine.slots.release(0, 1)
    neighbour = engine.start([5, 6], max_tokens=9)
    key = engine.start(PROMPT, max_tokens=4, masked=True)
    steps_until(engine, key, 1)
    assert engine.output[key] == free[:1]
    assert held_for_a_while(engine, key)
    allow(engine, key, 2, 30)  # of the token after
    assert held_for_a_while(engine, key)
    engine.decode.write_masks(
        [(key[0], key[1] - 1, len(PROMPT) + 1, mask_bits((31,), VOCAB))]
    )  # another tenant's
    assert held_for_a_while(engine, key)
    allow(engine, key, 1, 30)
    steps_until(engine, key, 2)
    assert engine.output[key][1] == 30
    assert held_for_a_while(engine, key)
    allow(engine, key, 2, 11, 96)
    steps_until(engine, key, 3)
    assert engine.output[key][2] in (11, 96)
    allow(engine, key, 3, *range(VOCAB))
    engine.run(key, neighbour)
    assert engine.finish[key] is Finish.LENGTH
    assert len(engine.output[neighbour]) == 9


def test_no_token_is_outside_its_mask_however_late_the_masks_come(engine: LocalEngine) -> None:
    """A grammar of which token follows which; masks come before, while or after steps run that want them."""
    draw = random.Random(6)
    key = engine.start(PROMPT, max_tokens=5, masked=True, sampling=SamplingParams(1.5, seed=3))
    free = engine.start([5, 6], max_tokens=12)
    allowed: dict[int, set[int]] = {}
    while key not in engine.finish:
        known = len(engine.output[key])
        if known and known not in allowed:
            for _ in range(draw.choice((0, 0, 1, 3))):
                engine.step()
            allowed[known] = {(5 * engine.output[key][known - 1] + add) % VOCAB for add in range(3)}
            allow(engine, key, known, *allowed[known])
        engine.step()
    tokens = engine.output[key]
    assert len(tokens) == 5
    assert all(token in allowed[number] for number, token in enumerate(tokens) if number)
    engine.run(free)
    assert len(engine.output[free]) == 12


@pytest.mark.slow
def test_masks_that_allow_all_change_no_token_and_a_held_row_can_be_cancelled(engine: LocalEngine) -> None:
    drawn = SamplingParams(0.9, 40, 0.9, seed=5)
    (free,) = engine.run(engine.start(PROMPT, max_tokens=4, sampling=drawn))
    engine.slots.release(0, 1)
    key = engine.start(PROMPT, max_tokens=9, sampling=drawn, masked=True)
    for number in range(1, 4):
        steps_until(engine, key, number)
        allow(engine, key, number, *range(VOCAB))
    steps_until(engine, key, 4)
    assert engine.output[key] == free
    engine.decode.cancel(*key)
    engine.run(key)
    assert engine.finish[key] is Finish.CANCELLED
    assert not engine.step()


def test_a_mask_of_another_width_is_refused(engine: LocalEngine) -> None:
    with pytest.raises(ValueError, match="4 words"):
        engine.decode.write_masks([(0, 1, 3, np.zeros(3, dtype=np.uint32))])


class Counted:
    """A graph that counts its replays."""

    def __init__(self, graph: Graph, counts: dict[str, int], name: str) -> None:
        self._graph, self._counts, self._name = graph, counts, name
        counts.setdefault(name, 0)

    def __call__(self) -> None:
        self._counts[self._name] += 1
        self._graph()


def counted(engine: LocalEngine) -> dict[str, int]:
    """Replays from now on, of the graphs that pick and those that sample."""
    counts: dict[str, int] = {}
    loop = cast(GraphDecodeLoop, engine.decode)
    for bucket, graphs in loop.graphs.items():
        loop.graphs[bucket] = StepGraphs(
            Counted(graphs.simple, counts, "simple"), Counted(graphs.samples, counts, "samples")
        )
    return counts


def test_a_batch_changes_graphs_as_requests_come_and_go(tmp_path: Path) -> None:
    drawn, filtered = SamplingParams(0.9, seed=3), SamplingParams(0.8, 30, 0.9, seed=4, logprobs=2)
    outputs = []
    for options in ({"device": DEVICE, "graph": True}, {}):
        engine = LocalEngine(tmp_path / "model", slots=2, **options)  # type: ignore[arg-type]
        counts = counted(engine) if options else {}
        long = engine.start(PROMPT, max_tokens=9, sampling=drawn)
        steps_until(engine, long, 3)
        short = engine.start([4], max_tokens=3, sampling=filtered)
        outputs.append(engine.run(long, short))
        if options:
            assert counts["simple"] >= 4
            assert counts["samples"] >= 2
    assert outputs[0] == outputs[1]
