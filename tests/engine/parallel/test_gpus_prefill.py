"""Prefill steps on two GPUs give the tokens of one, and none once a GPU has come too late. To be run with
CUDA_MODULE_LOADING=EAGER, as `make prove-gpus` does: engines of several devices have it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from baton.engine.decode.gpu_group import gpu_group
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.model.weight_formats import weight_formats
from baton.engine.parallel.exchange import ExchangeTimeoutError
from bench.engine_driver import take
from tests.engine.executor.test_ranks_in_steps import SHAPE, VOCAB, starts
from tests.engine.local_engine import LocalEngine, Start
from tests.engine.parallel.test_decode_on_ranks import CASES, DIVIDED
from tests.engine.parallel.test_gpus_decode import DEADLINE_S, LATE_CYCLES, settle
from tests.engine.parallel.test_prefill_on_ranks import (
    DRAWN,
    GREEDY,
    add,
    distance,
    first_logprobs,
    fp8_folder,
)
from tests.support.gpu_sleep import sleep_on_stream

pytestmark = pytest.mark.multigpu


def engines(folder: Path, **options: Any) -> tuple[LocalEngine, LocalEngine]:
    """The same model on one GPU and on two, both by kernels."""
    given = {"device": "cuda", "graph": True, "prompts": "graphs", **options}
    return LocalEngine(folder, **given), LocalEngine(folder, ranks=2, **given)


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("prompts", ["graphs", "eager", "started"])
def test_families_compute_prompts_as_on_one_gpu(tmp_path: Path, name: str, prompts: str) -> None:
    """The families run in float32, where sums that are rounded otherwise change no token."""
    folder, draw = CASES[name].make(tmp_path / "model"), random.Random(name)
    lengths, outputs = (1, 3, 17, 40, 64), []
    texts = [draw.choices(range(250), k=length) for length in lengths]
    for engine in engines(folder, checkpoint=True, slots=5, blocks=256, chunk=48, prompts=prompts):
        keys = engine.start_many([Start(tuple(text), 20) for text in texts])
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


def test_requests_with_every_feature(tmp_path: Path) -> None:
    """240 requests, of which 24 run at a time; a dozen is decoded while another dozen's prompts come."""
    requests, found = starts(240), []
    for engine in engines(tmp_path / "model", slots=24, blocks=600, changes=SHAPE, chunk=64):
        outputs = []
        for first in range(0, len(requests), 24):
            keys = engine.start_many(requests[first : first + 12])
            keys += engine.start_many(requests[first + 12 : first + 24])
            outputs += engine.run(*keys)
            for key in keys:
                engine.slots.release(*key)
                engine.pools.release(engine.tables.pop(key))
        found.append(outputs)
    assert found[0] == found[1]


@pytest.mark.parametrize("mixed", ["graphs", "eager"])
def test_decode_steps_join_on_both(tmp_path: Path, mixed: str) -> None:
    """Prompts of up to three steps are computed while 20 sequences are decoded."""
    draw, outputs = random.Random(mixed), []
    texts = [tuple(draw.choices(range(VOCAB), k=draw.randint(1, 150))) for _ in range(24)]
    both = engines(tmp_path / "model", slots=24, blocks=1200, changes=SHAPE, chunk=64, mixed=mixed)
    for engine in both:
        keys = engine.start_many(
            [Start(text[:9], 40, DRAWN if number % 2 else GREEDY) for number, text in enumerate(texts[:20])]
        )
        for text in texts[20:]:
            keys.append(engine.start(text, max_tokens=5))
        assert engine.mixed_steps > 4
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


def test_prompts_of_thousands_of_tokens(tmp_path: Path) -> None:
    """Prompts take several steps, in graphs and beyond them; few rows share the keys of many tokens."""
    draw, outputs = random.Random(5), []
    texts = [tuple(draw.choices(range(VOCAB), k=length)) for length in (5000, 2049, 700, 90)]
    changes = SHAPE | {"max_position_embeddings": 8192}
    options: dict[str, Any] = {"blocks": 700, "block_tokens": 16, "longest": 5100, "chunk": 2048}
    for engine in engines(tmp_path / "model", changes=changes, **options):
        keys = engine.start_many([Start(text, 8) for text in texts])
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


def test_bfloat16_is_as_near_as_its_roundings(tmp_path: Path) -> None:
    """The first token's logprobs, and others', differ from those in float32 as one GPU's do."""
    draw = random.Random(3)
    texts = [tuple(draw.choices(range(VOCAB), k=draw.randint(1, 60))) for _ in range(24)]
    size: dict[str, Any] = {"changes": SHAPE, "slots": 24, "blocks": 600}
    options: dict[str, Any] = {"dtype": "bfloat16", "numerics": "fast", "chunk": 512}
    exact, one, two = (
        first_logprobs(engine, texts)
        for engine in (
            LocalEngine(tmp_path / "model", **size),
            *engines(tmp_path / "model", **size, **options),
        )
    )
    errors = distance(exact, one), distance(exact, two)
    print(f"\nPROOF errors of logprobs in bfloat16, RMS: {errors[0]:.4f} on one GPU, {errors[1]:.4f} on two")
    assert errors[1] < 1.2 * errors[0] + 0.01


@pytest.mark.parametrize("prompts", ["graphs", "eager"])
@pytest.mark.parametrize("name", ["fp8 by tensor", "fp8 by channel", "fp8 by block"])
def test_weights_in_fp8(tmp_path: Path, name: str, prompts: str) -> None:
    """Products are of codes of a GPU's rows, whose scales are its own: as near to the reference as one's."""
    draw = random.Random(name)
    texts = [tuple(draw.choices(range(250), k=length)) for length in range(1, 41, 4)]
    options: dict[str, Any] = {"dtype": "bfloat16", "numerics": "fast", "chunk": 256, "prompts": prompts}
    size: dict[str, Any] = {"checkpoint": True, "slots": 10, "blocks": 256, "formats": weight_formats}
    packed = fp8_folder(tmp_path, name)
    exact, one, two = (
        first_logprobs(engine, texts)
        for engine in (LocalEngine(packed, **size), *engines(packed, **size, **options))
    )
    assert distance(exact, two) < 1.2 * distance(exact, one) + 0.01


@pytest.mark.parametrize("prompts", ["graphs", "eager"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_gpu_that_sleeps_past_the_deadline(
    tmp_path: Path, late: int, prompts: Literal["graphs", "eager"]
) -> None:
    """The prompt that it misses has no first token, nor one behind it; the watchdog names who waited."""
    engine = LocalEngine(
        tmp_path / "model", device="cuda", graph=True, ranks=2, slots=2, changes=SHAPE, prompts=prompts,
        group=lambda models, rows, prompt_rows: gpu_group(models, rows, prompt_rows, DEADLINE_S),
    )  # fmt: skip
    loop = engine.decode
    assert isinstance(loop, GraphDecodeLoop)
    key = engine.start([5, 6, 7], max_tokens=200, sampling=DRAWN)
    while len(engine.output[key]) < 5:
        engine.step()
    settle(loop)
    engine.read()
    output = list(engine.output[key])
    queue = loop.queue if late == 0 else loop.followers[0].queue
    with torch.cuda.stream(queue.stream):
        sleep_on_stream(LATE_CYCLES)
    began = time.monotonic()
    for prompt in ((1, 2, 3), (4, 5)):
        add(engine, prompt, sampling=GREEDY)
        engine.executor.step_prompts()
        engine.step()
    assert engine.prefill.under_way
    for rank in range(2):
        torch.cuda.synchronize(rank)
    assert time.monotonic() - began < 10 * DEADLINE_S + 2
    settle(loop)
    engine.read()
    assert take(engine.executor) == []
    assert engine.output[key] == output
    with pytest.raises(ExchangeTimeoutError) as caught:
        engine.prefill.device_hung()
    assert (caught.value.timeout.rank, caught.value.timeout.peer) == (1 - late, late)


def test_times(tmp_path: Path) -> None:
    """Prints, with `-s`, milliseconds of a step of 1,024 rows on one GPU and on two, as graphs and not."""
    shape = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    }  # fmt: skip
    text = tuple(n % 32000 for n in range(1024))
    options: dict[str, Any] = {"blocks": 40, "block_tokens": 64, "longest": 1100, "chunk": 1024, "slots": 1}
    ways: tuple[Literal["graphs", "eager"], ...] = "graphs", "eager"
    for prompts in ways:
        for ranks, engine in enumerate(
            engines(tmp_path / "model", changes=shape, dtype="bfloat16", prompts=prompts, **options), 1
        ):
            took, host = [], engine.prefill.host_s
            for _ in range(6):
                sequence = add(engine, text)
                began = time.perf_counter()
                engine.compute()
                took.append(round((time.perf_counter() - began) * 1e3, 2))
                engine.scheduler.remove(sequence)
                assert sequence.blocks is not None
                engine.pools.release(sequence.blocks)
            host_ms = (engine.prefill.host_s - host) / 6 * 1e3
            print(f"{prompts}, {ranks} GPUs: {sorted(took)[2]} ms of {took}, host {host_ms:.2f} ms a step")
            del engine
            torch.cuda.empty_cache()
