"""Decode steps on two GPUs and four give the tokens of one, and none once a GPU has come too late. To be run
with CUDA_MODULE_LOADING=EAGER, as `make prove-gpus` does: engines of several devices have it."""

from __future__ import annotations

import random
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.decode.gpu_group import gpu_group
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.model.weight_formats import weight_formats
from baton.engine.parallel.exchange import ExchangeTimeoutError
from baton.engine.sequence import SamplingParams
from tests.engine.executor.test_ranks_in_steps import SHAPE, VOCAB, starts
from tests.engine.local_engine import LocalEngine, Start
from tests.engine.model.quantization.packing import FORMATS
from tests.engine.parallel.test_decode_on_ranks import CASES, DIVIDED, first_decoded
from tests.support.checkpoints import FAMILIES
from tests.support.four_gpus import NEEDS_FOUR
from tests.support.gpu_sleep import sleep_on_stream
from tests.support.sampling.random_sampling import random_params

pytestmark = pytest.mark.multigpu

GREEDY, DRAWN = SamplingParams(), SamplingParams(0.9, seed=11)
DEADLINE_S = 0.4
# Clock cycles of a kernel that sleeps for longer than that and a quarter more, at up to 2 GHz.
LATE_CYCLES = 1_400_000_000


def engines(folder: Path, ranks: int = 2, **options: object) -> tuple[LocalEngine, LocalEngine]:
    """The same model on one GPU and on several, both by graphs."""
    one = LocalEngine(folder, device="cuda", graph=True, **options)  # type: ignore[arg-type]
    return one, LocalEngine(folder, device="cuda", graph=True, ranks=ranks, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_families_decode_as_on_one_gpu(tmp_path: Path, name: str, numerics: str) -> None:
    folder, draw = CASES[name].make(tmp_path / "model"), random.Random(name)
    prompts = [draw.choices(range(250), k=length) for length in (1, 3, 17, 40, 64)]
    outputs = []
    for engine in engines(folder, checkpoint=True, slots=5, blocks=256, numerics=numerics):
        keys = [
            engine.start(prompt, max_tokens=40, sampling=DRAWN if number % 2 else GREEDY)
            for number, prompt in enumerate(prompts)
        ]
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fp8 by tensor", "fp8 by channel", "fp8 by block"])
def test_weights_in_fp8(tmp_path: Path, name: str, dtype: str) -> None:
    """Products in bfloat16 are of codes of a rank's rows, whose scales are its own: then logprobs are as near
    to those of the same weights in float32 as one GPU's."""
    shape = {"hidden_size": 192, "intermediate_size": 192, "num_key_value_heads": 4}
    source = FAMILIES[0].make(tmp_path / "source", **shape)
    packed, _ = next(one for one in FORMATS if one.name == name).write(source, tmp_path / "fp8")
    options: dict[str, Any] = {"checkpoint": True, "slots": 2, "formats": weight_formats}
    wanted = first_decoded(LocalEngine(packed, **options))
    errors = []
    for engine in engines(packed, **options, dtype=dtype, numerics="fast"):
        found = first_decoded(engine)
        common = found.keys() & wanted.keys()
        assert len(common) >= 25
        errors.append(sum((found[token] - wanted[token]) ** 2 for token in common) / len(common))
    print(f"\nPROOF {name}, {dtype}: mean square errors of logprobs on one and on two GPUs {errors}")
    assert errors[1] < (1e-6 if dtype == "float32" else 1.5 * errors[0])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=NEEDS_FOUR)], ids=["two", "four"])
def test_requests_with_every_feature(tmp_path: Path, ranks: int) -> None:
    """500 requests, of which 24 run at a time: as many buckets of rows."""
    requests, found = starts(500), []
    for engine in engines(tmp_path / "model", ranks, slots=24, blocks=600, changes=SHAPE):
        outputs, logprobs = [], []
        for first in range(0, len(requests), 24):
            keys = engine.start_many(requests[first : first + 24])
            outputs += engine.run(*keys)
            logprobs += [engine.logprobs[key] for key in keys]
            for key in keys:
                engine.slots.release(*key)
                engine.pools.release(engine.tables.pop(key))
        found.append((outputs, logprobs))
    (outputs, logprobs), (mine, my_logprobs) = found
    assert mine == outputs
    for one, other in zip(chain(*logprobs), chain(*my_logprobs), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)


def test_bfloat16_is_as_near_as_its_roundings(tmp_path: Path) -> None:
    """The first token that is decoded, whose input is the same: logprobs of it and of others."""
    draw = random.Random(3)
    prompts = [tuple(draw.choices(range(VOCAB), k=draw.randint(1, 40))) for _ in range(24)]
    sampling = SamplingParams(logprobs=20)
    found = []
    for engine in engines(
        tmp_path / "model", slots=24, blocks=600, dtype="bfloat16", numerics="fast", changes=SHAPE
    ):
        keys = engine.start_many([Start(prompt, 3, sampling, forced=5) for prompt in prompts])
        engine.run(*keys)
        found.append([engine.logprobs[key][1] for key in keys])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        mine, theirs = dict(other.top), dict(one.top)
        common = mine.keys() & theirs.keys()
        assert len(common) >= 15
        for token in common:
            assert mine[token] == pytest.approx(theirs[token], abs=0.15)


@pytest.mark.parametrize("late", [0, 1])
def test_a_gpu_that_sleeps_past_the_deadline(tmp_path: Path, late: int) -> None:
    """The step that it misses is not published, nor any behind it; the watchdog names who waited."""
    engine = LocalEngine(
        tmp_path / "model", device="cuda", graph=True, ranks=2, slots=2, changes=SHAPE,
        group=lambda models, rows, prompt_rows: gpu_group(models, rows, prompt_rows, DEADLINE_S),
    )  # fmt: skip
    loop = engine.decode
    assert isinstance(loop, GraphDecodeLoop)
    draw = random.Random(late)
    params = random_params(draw, frozenset(), VOCAB)
    key = engine.start([5, 6, 7], max_tokens=200, sampling=params)
    while len(engine.output[key]) < 5:
        engine.step()
    settle(loop)
    engine.read()
    assert not loop.device_hung()
    output = list(engine.output[key])
    queue = loop.queue if late == 0 else loop.followers[0].queue
    with torch.cuda.stream(queue.stream):
        sleep_on_stream(LATE_CYCLES)
    began = time.monotonic()
    for _ in range(3):
        engine.step()
    settle(loop)
    assert time.monotonic() - began < 10 * DEADLINE_S + 2
    engine.read()
    assert engine.output[key] == output
    assert key not in engine.finish
    with pytest.raises(ExchangeTimeoutError) as caught:
        loop.device_hung()
    assert (caught.value.timeout.rank, caught.value.timeout.peer) == (1 - late, late)


def settle(loop: GraphDecodeLoop) -> None:
    """Waits until all devices are idle."""
    for queue in (loop.queue, *(follower.queue for follower in loop.followers)):
        queue.drain()
    loop.observe()
