"""The decode step: joins, leaves, limits, cancels, held rows, a late reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.output_ring import Finish
from bench.engine_driver import decode_step
from tests.engine.local_engine import LocalEngine

PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 4, 5, 16, 17, 33)]
DRAWN = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=2**63 + 11)


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return LocalEngine(tmp_path / "model")


@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN], ids=["greedy", "drawn"])
def test_a_token_never_depends_on_its_neighbours(tmp_path: Path, sampling: SamplingParams) -> None:
    alone = []
    for prompt in PROMPTS:
        engine = LocalEngine(tmp_path / "model", block_tokens=16, chunk=64)
        alone += engine.run(engine.start(prompt, max_tokens=12, sampling=sampling))
    together = LocalEngine(tmp_path / "model", slots=len(PROMPTS), chunk=5)
    keys = []
    for prompt in PROMPTS:  # each joins while the earlier ones are under way
        keys.append(together.start(prompt, max_tokens=12, sampling=sampling))
        together.step()
    assert together.run(*keys) == alone
    assert all(len(output) == 12 for output in alone)


def test_seeds_and_parameters_of_neighbours_are_their_own(engine: LocalEngine) -> None:
    prompt = PROMPTS[3]
    greedy = engine.start(prompt, max_tokens=20)
    drawn = engine.start(prompt, max_tokens=20, sampling=DRAWN)
    other = engine.start(prompt, max_tokens=20, sampling=SamplingParams(0.9, 20, 0.95, seed=5))
    outputs = engine.run(greedy, drawn, other)
    assert len({tuple(output) for output in outputs}) == 3


def test_the_first_word_repeats_the_admitted_token_and_length_ends(engine: LocalEngine) -> None:
    key = engine.start(PROMPTS[2], max_tokens=2)
    (output,) = engine.run(key)
    assert len(output) == 2
    assert engine.finish[key] is Finish.LENGTH
    assert engine.reader.steps == 1


def test_a_stop_id_ends_where_it_first_comes_and_is_emitted(engine: LocalEngine, tmp_path: Path) -> None:
    (whole,) = engine.run(engine.start(PROMPTS[4], max_tokens=20, sampling=DRAWN))
    stop = next(token for token in whole[3:] if token not in whole[:3])
    again = LocalEngine(tmp_path / "model")
    key = again.start(PROMPTS[4], max_tokens=20, sampling=DRAWN, stop=(96, stop))
    (output,) = again.run(key)
    assert output == whole[: whole.index(stop) + 1]
    assert again.finish[key] is Finish.STOP


def test_cancel_is_acknowledged_once_and_a_late_one_is_ignored(engine: LocalEngine) -> None:
    first, second = engine.start(PROMPTS[1], max_tokens=50), engine.start(PROMPTS[2], max_tokens=5)
    engine.step()
    engine.decode.cancel(*first)
    engine.run(first)
    assert engine.finish[first] is Finish.CANCELLED
    engine.run(second)
    engine.decode.cancel(*second)  # it has ended: no second word
    engine.step()
    assert engine.finish[second] is Finish.LENGTH
    assert not engine.step()


def test_a_cancel_before_its_admission_took_effect(engine: LocalEngine) -> None:
    key = engine.start(PROMPTS[1], max_tokens=50)
    engine.decode.cancel(*key)
    engine.step()
    assert engine.finish[key] is Finish.CANCELLED
    assert len(engine.output[key]) == 1


def test_a_cancel_of_an_earlier_generation_leaves_the_new_tenant_alone(engine: LocalEngine) -> None:
    slot, generation = engine.start(PROMPTS[1], max_tokens=3)
    engine.run((slot, generation))
    engine.slots.release(slot, generation)
    keys = [engine.start(PROMPTS[1], max_tokens=6) for _ in range(4)]
    (tenant,) = [key for key in keys if key[0] == slot]
    assert tenant[1] == generation + 1
    engine.decode.cancel(slot, generation)
    engine.run(*keys)
    assert engine.finish[tenant] is Finish.LENGTH


def test_a_row_without_a_block_is_held_and_its_neighbours_go_on(engine: LocalEngine) -> None:
    held = engine.start(PROMPTS[2], max_tokens=10, capacity=len(PROMPTS[2]) + 2)
    free = engine.start(PROMPTS[1], max_tokens=10)
    engine.run(free)
    assert held not in engine.finish
    assert len(engine.output[held]) == 3  # two tokens had room for their KV
    assert engine.reader.stalled_rows > 0
    engine.extend(held, len(PROMPTS[2]) + 2, len(PROMPTS[2]) + 9)
    engine.run(held)
    assert len(engine.output[held]) == 10


def test_a_slot_that_grows_in_time_is_never_held(engine: LocalEngine, tmp_path: Path) -> None:
    (expected,) = engine.run(engine.start(PROMPTS[2], max_tokens=20))
    growing = LocalEngine(tmp_path / "model")
    key = growing.start(PROMPTS[2], max_tokens=20, capacity=len(PROMPTS[2]) + 4)
    for before in (4, 9, 14):
        growing.step()
        growing.extend(key, len(PROMPTS[2]) + before, len(PROMPTS[2]) + min(before + 5, 19))
    assert growing.run(key) == [expected]
    assert growing.reader.stalled_rows == 0


def test_a_slot_that_is_held_stands_still_until_it_grows(engine: LocalEngine, tmp_path: Path) -> None:
    (expected,) = engine.run(engine.start(PROMPTS[2], max_tokens=12))
    held = LocalEngine(tmp_path / "model")
    key = held.start(PROMPTS[2], max_tokens=12)
    held.step()
    held.step()
    number = held.decode.stall(*key)
    assert not held.decode.applied(number)
    held.step()
    assert held.decode.applied(number)
    assert not held.step(), "with nothing else to do the steps rest"
    assert len(held.output[key]) == 3
    held.decode.extend(*key, held.tables[key], (0,), len(PROMPTS[2]) + 11)
    assert held.run(key) == [expected]


def test_a_moved_slot_reports_it_once_and_grows_no_more(engine: LocalEngine) -> None:
    key = engine.start(PROMPTS[2], max_tokens=20, capacity=len(PROMPTS[2]) + 4)
    engine.step()
    engine.decode.preempt(*key)
    engine.decode.cancel(*key)
    engine.extend(key, len(PROMPTS[2]) + 4, len(PROMPTS[2]) + 9)
    engine.run(key)
    assert engine.finish[key] is Finish.PREEMPTED
    assert len(engine.output[key]) == 2
    assert not engine.step()


def test_a_late_reader_stops_the_steps_and_loses_nothing(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "model", slots=1, blocks=128)
    whole = engine.run(engine.start(PROMPTS[1], max_tokens=100))[0]
    late = LocalEngine(tmp_path / "model", slots=1, blocks=128)
    key = late.start(PROMPTS[1], max_tokens=100)
    while decode_step(late.decode):
        pass
    assert late.reader.full_steps == 1
    steps = late.reader.steps
    assert not decode_step(late.decode)
    assert late.reader.steps == steps
    late.read()
    assert late.run(key) == [whole]
