"""A GPU that others hold in part, or for good: no kernel waits for a place that it has not, and a device that
ends no step is noticed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from baton.device.streams.cuda_stream import TorchStream
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, runs_here, wide_product, wide_space_needed
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.perf_model.row_times import RowTimes
from bench.engine_driver import finish, prefill_step, prompt_executor
from tests.engine.local_engine import LocalEngine
from tests.engine.occupant import Occupant

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu, pytest.mark.timeout(120)]

OCCUPIED_MS = 300
PROMPT = list(range(5, 22))


@pytest.mark.parametrize(
    ("m", "n", "tuning", "free"),
    [
        # 64 clusters, of which 16 add up a tile together; there is room for 8 at a time.
        (256, 512, WideTuning(128, 4, 9, 16), 16),
        # Down of an 8B model, as the table has it.
        (256, 4096, WideTuning(128, 4, 9, 2), 16),
        (256, 4096, WideTuning(128, 4, 9, 2), 64),
        (128, 4096, WideTuning(128, 6, 8, 4, 2), 16),
        (128, 4096, WideTuning(128, 6, 8, 4, 4), 64),
    ],
)
def test_a_split_product_ends_on_the_multiprocessors_that_are_free(
    m: int, n: int, tuning: WideTuning, free: int
) -> None:
    assert runs_here()
    k = 14336
    generator = torch.Generator("cuda").manual_seed(n)
    x, weight = (
        torch.randn(rows, k, generator=generator, device="cuda").bfloat16() * k**-0.5 for rows in (m, n)
    )
    x *= k**0.5
    before = torch.randn(m, n, generator=generator, device="cuda").bfloat16()
    space = SplitSpace(*wide_space_needed(m, n, tuning), torch.device("cuda"))
    alone, beside = before.clone(), before.clone()
    wide_product(alone, x, weight, Epilogue.RESIDUAL, tuning, space)
    torch.testing.assert_close(alone.float(), before + x.float() @ weight.float().t(), rtol=0.02, atol=0.02)
    torch.cuda.synchronize()

    count = torch.cuda.get_device_properties(x.device).multi_processor_count
    stream, ended = torch.cuda.Stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    occupant = Occupant(count - free, OCCUPIED_MS)
    began = time.monotonic()
    with torch.cuda.stream(stream):
        wide_product(beside, x, weight, Epilogue.RESIDUAL, tuning, space)
        ended.record()
    while not ended.query():  # type: ignore[no-untyped-call]
        pass
    took, waited = time.monotonic() - began, occupant.ended
    print(f"\nPROOF split product, {free} of {count} multiprocessors free: {took * 1e3:.2f} ms")
    torch.cuda.synchronize()
    assert not waited, f"it waited {took:.3f} s for the kernel that holds the others"
    assert torch.equal(alone, beside)
    assert not space.arrived.any()


def test_a_decode_stream_that_stands_is_noticed(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "model", slots=2, blocks=128, device="cuda", graph=True)
    loop = cast(GraphDecodeLoop, engine.decode)
    (wanted,) = engine.run(engine.start(PROMPT, max_tokens=40))
    assert 0 < loop.expected_step_s < 0.2
    key = engine.start(PROMPT, max_tokens=40)
    occupant = Occupant(1, 10_000, loop.queue.stream)
    began = time.monotonic()
    while not loop.device_hung():
        assert not occupant.ended, "nothing was noticed"
        engine.step()
        time.sleep(0.001)
    took = time.monotonic() - began
    print(f"\nPROOF a decode stream that stands: noticed after {took:.2f} s")
    assert 1.9 < took < 2.6
    while not occupant.ended:
        time.sleep(0.01)
    assert engine.run(key) == [wanted]
    assert not loop.device_hung()


class QuietPass:
    """A pass that enqueues little, and never waits for the device."""

    alignment = 1
    refused = 0
    uncaptured = ""
    timed_passes = None
    row_times = RowTimes()
    graph_rows = 0

    def forward(self, step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        return torch.zeros(step.rows, 97, device="cuda")

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_a_prefill_stream_that_stands_is_noticed(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "model", slots=2, blocks=128, device="cuda", chunk=16)
    stream = TorchStream(torch.device("cuda"))
    executor = prompt_executor(QuietPass(), engine.scheduler, stream)
    prefill = executor.prompts
    sequence = Sequence(tuple(range(40)), 40, SamplingParams(), Limits(2, (), 0))
    sequence.blocks = engine.pools.allocate(41)
    engine.scheduler.add(sequence)
    engine.scheduler.cost.took([(0, 16)], 0.001)
    with stream.activate():
        occupant = Occupant(1, 10_000, torch.cuda.current_stream())
    began = time.monotonic()
    while not prefill.device_hung():
        assert not occupant.ended, "nothing was noticed"
        prefill_step(executor)
        time.sleep(0.001)
    took = time.monotonic() - began
    print(f"\nPROOF a prefill stream that stands: noticed after {took:.2f} s")
    assert 1.9 < took < 2.6
    while not occupant.ended:
        time.sleep(0.01)
    assert len(finish(executor)) == 3
    assert not prefill.device_hung()
