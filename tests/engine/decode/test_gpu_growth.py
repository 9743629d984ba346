"""Growing, being held, set aside and moved where the steps run ahead of the host: on a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.output_ring import Finish
from tests.engine.local_engine import LocalEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = list(range(5, 22))
LENGTH = len(PROMPT)
DTYPES = ["float32", "bfloat16"]
SAMPLING = {"greedy": SamplingParams(), "drawn": SamplingParams(0.9, seed=11)}
Key = tuple[int, int]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


class Case:
    """An engine, and what it makes of the prompt when it is alone and has all its blocks."""

    def __init__(self, folder: Path, dtype: str, slots: int = 2, blocks: int = 128) -> None:
        self.engine = LocalEngine(
            folder / "model", slots=slots, blocks=blocks, device=DEVICE, graph=True, dtype=dtype
        )

    def alone(self, max_tokens: int, sampling: SamplingParams) -> list[int]:
        key = self.engine.start(PROMPT, max_tokens=max_tokens, sampling=sampling)
        (output,) = self.engine.run(key)
        self.free(key)
        return output

    def free(self, key: Key) -> None:
        self.engine.slots.release(*key)
        self.engine.pools.release(self.engine.tables.pop(key))

    def quiet(self, steps: int = 20) -> None:
        """Runs until `steps` more steps have ended, or nothing is left to do."""
        wanted = self.engine.reader.steps + steps
        for _ in range(100_000):
            if self.engine.reader.steps >= wanted or not self.engine.decode.has_work:
                return
            self.engine.step()
        raise AssertionError("the steps do not advance")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_a_held_slot_grows_and_ends_as_if_it_had_had_its_blocks(
    tmp_path: Path, sampling: SamplingParams, dtype: str
) -> None:
    case = Case(tmp_path, dtype)
    engine, wanted = case.engine, case.alone(40, sampling)
    key = engine.start(PROMPT, max_tokens=40, sampling=sampling, capacity=LENGTH + 3)
    neighbour = engine.start(PROMPT[:3], max_tokens=200)
    held, have = LENGTH + 3, 4
    for capacity in (LENGTH + 4, LENGTH + 11, LENGTH + 30, LENGTH + 39):
        while len(engine.output[key]) < have:
            engine.step()
        before, going = engine.reader.stalled_rows, len(engine.output[neighbour])
        case.quiet()
        assert engine.reader.stalled_rows > before, "it was not held"
        assert len(engine.output[key]) == have
        assert len(engine.output[neighbour]) > going
        engine.extend(key, held, capacity)
        held, have = capacity, capacity - LENGTH + 1
    assert engine.run(key) == [wanted]
    engine.run(neighbour)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slot_that_grows_in_time_is_never_held(tmp_path: Path, dtype: str) -> None:
    case = Case(tmp_path, dtype)
    engine, wanted = case.engine, case.alone(120, SAMPLING["drawn"])
    key = engine.start(PROMPT, max_tokens=120, sampling=SAMPLING["drawn"], capacity=LENGTH + 20)
    held, grown = LENGTH + 20, 0
    while key not in engine.finish:
        if held < LENGTH + 119 and LENGTH + len(engine.output[key]) > held - 12:
            engine.extend(key, held, min(held + 16, LENGTH + 119))
            held, grown = min(held + 16, LENGTH + 119), grown + 1
        engine.step()
    assert engine.output[key] == wanted
    assert grown == 7
    assert engine.reader.stalled_rows == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_set_aside_and_brought_back_to_other_blocks(
    tmp_path: Path, sampling: SamplingParams, dtype: str
) -> None:
    """Three times, while a neighbour runs; what it had is spoilt as soon as it is copied out."""
    case = Case(tmp_path, dtype)
    engine, wanted = case.engine, case.alone(60, sampling)
    host = HostBlocks(engine.cache, 64 * engine.cache.layout.groups[0].block_bytes)
    key = engine.start(PROMPT, max_tokens=60, sampling=sampling)
    neighbour = engine.start(PROMPT[:3], max_tokens=250)
    for more in (5, 17, 30):
        while len(engine.output[key]) < more:
            engine.step()
        number = engine.decode.stall(*key)
        while not engine.decode.applied(number):
            engine.step()
        engine.read()
        stood, going = len(engine.output[key]), len(engine.output[neighbour])
        case.quiet()
        assert len(engine.output[key]) == stood < 60, "it went on while it was held"
        assert len(engine.output[neighbour]) > going
        mine = engine.tables[key]
        saved, copy = host.save(mine)
        copy.synchronize()
        for block in mine[0]:
            engine.cache.groups[0][block].fill_(1e4)
        other = engine.pools.allocate(LENGTH + 59)
        assert not set(mine[0]) & set(other[0])
        copy = host.load(saved, other)
        while not copy.query():
            engine.step()
        host.release(saved)
        engine.pools.release(mine)
        engine.tables[key] = other
        engine.decode.extend(*key, other, (0,), LENGTH + 59)
    assert engine.run(key) == [wanted]
    engine.run(neighbour)
    for one in (key, neighbour):
        case.free(one)
    assert engine.pools.free == engine.pools.total
    assert host.free == 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_once_however_often_it_is_posted_and_grows_no_more(tmp_path: Path, dtype: str) -> None:
    case = Case(tmp_path, dtype)
    engine, wanted = case.engine, case.alone(200, SamplingParams())
    for reported in range(40):
        key = engine.start(PROMPT, max_tokens=200, capacity=LENGTH + 50)
        while len(engine.output[key]) < reported // 4 + 1:
            engine.step()
        engine.decode.preempt(*key)
        engine.decode.preempt(*key)
        engine.decode.cancel(*key)
        engine.extend(key, LENGTH + 50, LENGTH + 199)
        (output,) = engine.run(key)
        case.quiet()
        assert engine.finish[key] is Finish.PREEMPTED
        assert output == wanted[: len(output)]
        assert reported // 4 + 1 <= len(output) < 50
        case.free(key)
    assert not engine.decode.has_work
    assert engine.pools.free == engine.pools.total


def test_a_grow_for_an_earlier_tenant_changes_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, "float32", slots=1)
    engine = case.engine
    first = engine.start(PROMPT, max_tokens=3)
    engine.run(first)
    case.free(first)
    tenant = engine.start(PROMPT, max_tokens=30, capacity=LENGTH + 5)
    assert tenant == (first[0], first[1] + 1)
    engine.decode.extend(*first, ((),), (0,), LENGTH + 29)
    engine.decode.stall(*first)
    while not engine.reader.stalled_rows:
        engine.step()
    for _ in range(100):  # the only row is held, so no step is enqueued
        engine.step()
        time.sleep(0.001)
    assert len(engine.output[tenant]) == 6
    engine.extend(tenant, LENGTH + 5, LENGTH + 29)
    engine.run(tenant)
    assert len(engine.output[tenant]) == 30
