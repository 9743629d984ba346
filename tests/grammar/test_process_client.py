"""One mask process, started, killed and started again by its client."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import mask_words
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.types_pb2 import Choices, Grammar, Limits
from services.grammar.grammar_source import grammar_source
from services.grammar.process_client import PROGRAM, MaskProcessClient
from tests.grammar.model import END_ID, OTHER_END_ID, VOCAB_SIZE, allowed, ids_of, make_folder
from tests.grammar.worker import AB, LIMITS, SLOTS, WAIT_S, Worker


class WorkerOfOne(Worker):
    """A worker with one mask process."""

    def __init__(self, folder: Path, program: tuple[str, ...] = PROGRAM, *, rows_per_slot: int = 1) -> None:
        super().__init__(folder, rows_per_slot=rows_per_slot)
        self.refused: list[str] = []
        self.client = MaskProcessClient(
            self.setup, 0, self.fail, program, lambda source, _: self.refused.append(source)
        )


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[WorkerOfOne]:
    one = WorkerOfOne(tmp_path)
    yield one
    await one.client.stop()


async def test_masks_of_a_first_token_and_of_a_slots_tokens(worker: WorkerOfOne) -> None:
    assert worker.client.pid is None, "it starts with the first guided request"
    mask = await worker.client.next_mask(AB, LIMITS, ids_of("aba"))
    assert len(mask) == 4 * mask_words(VOCAB_SIZE)
    await worker.client.follow((2, 7), 10, AB, LIMITS, ())
    assert worker.board.take() == [], "the first token is drawn by prefill"
    (a, b), both_ends = ids_of("ab"), {END_ID, OTHER_END_ID}
    worker.draw(2, 7, a)
    assert await worker.next_mask() == (2, 7, 11, {b})
    worker.draw(2, 6, a)  # of an earlier tenant
    worker.draw(2, 7, b)
    assert await worker.next_mask() == (2, 7, 12, {a, *both_ends})
    worker.draw(2, 7, END_ID, Finish.STOP)
    worker.client.ended((2, 7))
    await worker.client.follow((2, 8), 5, AB, LIMITS, ids_of("a"))
    worker.draw(2, 8, b)
    assert await worker.next_mask() == (2, 8, 6, {a, *both_ends})
    assert (worker.client.opened, worker.client.failed, worker.client.followed) == (3, 0, 1)


async def test_masks_follow_a_ring_that_is_made_for_four_rows_a_slot(tmp_path: Path) -> None:
    """Beyond a lap of a ring made for one row, which a process that was not told would read."""
    worker = WorkerOfOne(tmp_path, rows_per_slot=4)
    a, b = ids_of("ab")
    for _ in range(SharedRings(SLOTS).ring_words):
        worker.draw(3, 1, a)
    await worker.client.follow((3, 2), 10, AB, LIMITS, ())
    worker.draw(3, 2, a)
    assert await worker.next_mask() == (3, 2, 11, {b})
    await worker.client.stop()


async def test_a_process_of_other_rows_than_its_ring_does_not_start(tmp_path: Path) -> None:
    worker = WorkerOfOne(tmp_path, rows_per_slot=4)
    worker.client.setup = replace(worker.client.setup, sizes=SharedRings(SLOTS, rows_per_slot=8))
    with pytest.raises(BatonError) as refused:
        await worker.client.start()
    assert refused.value.kind is ErrorKind.INVALID
    assert "rows_per_slot 4" in refused.value.message
    assert "rows_per_slot 8" in refused.value.message
    await worker.client.stop()


async def test_what_cannot_be_compiled_is_invalid_and_disturbs_no_other(worker: WorkerOfOne) -> None:
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    for _ in range(3):
        with pytest.raises(BatonError, match="cannot be used") as caught:
            await worker.client.follow((1, 1), 3, grammar_source(Grammar(regex="(")), LIMITS, ())
        assert caught.value.kind is ErrorKind.INVALID
    worker.draw(0, 1, ids_of("a")[0])
    assert (await worker.next_mask())[:3] == (0, 1, 4)
    assert (worker.client.restarts, worker.client.failed, worker.client.followed) == (0, 3, 1)


async def test_a_sequence_without_any_token_fails_alone(worker: WorkerOfOne) -> None:
    limits = Limits(max_tokens=9, min_tokens=5, stop_token_ids=LIMITS.stop_token_ids)
    await worker.client.follow((0, 1), 3, grammar_source(Grammar(choice=Choices(choices=["a"]))), limits, ())
    await worker.client.follow((1, 1), 3, AB, LIMITS, ())
    worker.draw(0, 1, ids_of("a")[0])
    async with asyncio.timeout(WAIT_S):
        assert await worker.failed.get() == (0, 1, ErrorKind.INVALID)
    worker.draw(1, 1, ids_of("a")[0])
    assert (await worker.next_mask())[:2] == (1, 1)


async def test_masks_of_several_tokens_drawn_at_once_and_one_without_any(worker: WorkerOfOne) -> None:
    short = Limits(max_tokens=9, min_tokens=5, stop_token_ids=LIMITS.stop_token_ids)
    grammars = {
        0: (AB, LIMITS),
        1: (grammar_source(Grammar(choice=Choices(choices=["a"]))), short),
        2: (grammar_source(Grammar(regex="a[0-9]")), LIMITS),
    }
    for slot, (grammar, limits) in grammars.items():
        await worker.client.follow((slot, 1), 3, grammar, limits, ())
    (a, b), digits, ends = ids_of("ab"), set(ids_of("0123456789")), {END_ID, OTHER_END_ID}
    rounds = [({0: a, 1: a, 2: a}, {0: {b}, 2: digits}), ({0: b, 2: min(digits)}, {0: {a, *ends}, 2: ends})]
    for number, (drawn, expected) in enumerate(rounds):
        worker.ring.write(list(drawn.values()), list(drawn), [1] * len(drawn), [Finish.NONE] * len(drawn))
        worker.reader.read()
        found: dict[int, tuple[int, set[int]]] = {}
        async with asyncio.timeout(WAIT_S):
            while len(found) < len(expected):
                found |= {slot: (at, allowed(mask)) for slot, _, at, mask in worker.board.take()}
                await asyncio.sleep(0.001)
        assert found == {slot: (4 + number, ids) for slot, ids in expected.items()}
    assert await worker.failed.get() == (1, 1, ErrorKind.INVALID)


async def test_a_closed_sequence_gets_no_masks(worker: WorkerOfOne) -> None:
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    await worker.client.follow((1, 1), 3, AB, LIMITS, ())
    worker.client.close((0, 1))
    await worker.client.next_mask(AB, LIMITS, ())  # the process has read the command before
    worker.draw(0, 1, ids_of("a")[0])
    worker.draw(1, 1, ids_of("a")[0])
    assert (await worker.next_mask())[:2] == (1, 1)


async def test_a_killed_process_fails_what_it_followed_and_starts_again(worker: WorkerOfOne) -> None:
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    await worker.client.follow((3, 9), 3, AB, LIMITS, ())
    killed = worker.client.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        lost = {await worker.failed.get() for _ in range(2)}
    assert lost == {(0, 1, ErrorKind.CONFLICT), (3, 9, ErrorKind.CONFLICT)}
    # The router's next attempt brings the output so far.
    await worker.client.follow((0, 2), 4, AB, LIMITS, ids_of("a"))
    assert worker.client.pid not in (None, killed)
    worker.draw(0, 2, ids_of("b")[0])
    assert (await worker.next_mask())[:3] == (0, 2, 5)


@pytest.mark.parametrize("computed", [True, False])
async def test_a_process_that_computes_for_too_long_is_killed_and_one_grammar_blamed_if_it_was_computed(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch, computed: bool
) -> None:
    monkeypatch.setattr("services.grammar.process_client.HUNG_S", 0.3)
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    await worker.client.follow((1, 1), 3, AB, LIMITS, ())
    assert worker.client.pid is not None
    os.kill(worker.client.pid, signal.SIGSTOP)
    await asyncio.sleep(0.05)
    worker.board.beat(1)  # as if it were computing for slot 1
    if computed:  # rather than that it is stopped
        times = itertools.count()
        cpu_s = property(lambda _: next(times))
        monkeypatch.setattr("services.grammar.channel_process.ChannelProcess.cpu_s", cpu_s)
    async with asyncio.timeout(WAIT_S):
        lost = {await worker.failed.get() for _ in range(2)}
    blamed = ErrorKind.INVALID if computed else ErrorKind.CONFLICT
    assert lost == {(0, 1, ErrorKind.CONFLICT), (1, 1, blamed)}
    assert worker.refused == [AB] * computed


async def test_a_grammar_that_takes_too_long_to_open_is_refused_and_a_starved_process_is_not_killed(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.client.next_mask(AB, LIMITS, ())
    await asyncio.sleep(0.3)
    monkeypatch.setattr("services.grammar.process_client.OPEN_S", 0.2)
    pid = worker.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    other = grammar_source(Grammar(regex="c"))
    with pytest.raises(BatonError, match=r"wait to begin") as caught:
        await worker.client.next_mask(other, LIMITS, ())
    assert caught.value.kind is ErrorKind.CONFLICT, "it did not run, so another attempt may succeed"
    assert worker.client.pid == pid
    # As if it had computed all the time.
    times = itertools.count()
    monkeypatch.setattr(
        "services.grammar.channel_process.ChannelProcess.cpu_s", property(lambda _: next(times))
    )
    with pytest.raises(BatonError, match=r"more than 0.2 s") as caught:
        await worker.client.next_mask(other, LIMITS, ())
    assert caught.value.kind is ErrorKind.INVALID
    assert worker.refused == [other]
    monkeypatch.undo()
    assert await worker.client.next_mask(AB, LIMITS, ())


async def test_a_process_that_is_only_busy_is_not_killed(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    monkeypatch.setattr("services.grammar.process_client.OPEN_S", 0.2)
    monkeypatch.setattr("services.grammar.channel_process.ChannelProcess.answered_within", lambda *_: True)
    running = worker.client.pid
    assert running is not None
    os.kill(running, signal.SIGSTOP)
    with pytest.raises(BatonError, match="too many guided outputs") as caught:
        await worker.client.next_mask(grammar_source(Grammar(regex="c")), LIMITS, ())
    assert caught.value.kind is ErrorKind.CONFLICT
    os.kill(running, signal.SIGCONT)
    worker.draw(0, 1, ids_of("a")[0])
    assert (await worker.next_mask())[:2] == (0, 1)


@pytest.mark.parametrize("computing", [False, True])
async def test_a_crash_is_blamed_on_the_grammar_that_was_computed_for_and_nobody_else(
    worker: WorkerOfOne, computing: bool
) -> None:
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    await worker.client.follow((1, 1), 3, grammar_source(Grammar(regex="c+")), LIMITS, ())
    assert worker.client.pid is not None
    os.kill(worker.client.pid, signal.SIGSTOP)
    await asyncio.sleep(0.1)
    worker.board.beat(1 if computing else -1)
    os.kill(worker.client.pid, signal.SIGSEGV)
    os.kill(worker.client.pid, signal.SIGCONT)
    async with asyncio.timeout(WAIT_S):
        lost = {await worker.failed.get() for _ in range(2)}
    blamed = ErrorKind.INVALID if computing else ErrorKind.CONFLICT
    assert lost == {(0, 1, ErrorKind.CONFLICT), (1, 1, blamed)}
    assert len(worker.refused) == computing


async def test_a_process_that_hangs_between_two_masks_is_noticed_and_nobody_blamed(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.grammar.process_client.HUNG_S", 0.3)
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    worker.draw(0, 1, ids_of("a")[0])
    assert (await worker.next_mask())[:2] == (0, 1)
    assert worker.client.pid is not None
    os.kill(worker.client.pid, signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        assert await worker.failed.get() == (0, 1, ErrorKind.CONFLICT)
    assert worker.refused == []
    await worker.client.follow((0, 2), 4, AB, LIMITS, ids_of("a"))


async def test_an_idle_process_is_not_taken_for_hung(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.grammar.process_client.HUNG_S", 0.3)
    await worker.client.next_mask(AB, LIMITS, ())
    before = worker.client.pid
    await asyncio.sleep(0.6)
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    await asyncio.sleep(0.6)
    assert worker.client.pid == before
    assert worker.client.restarts == 0


async def test_callers_that_leave_while_the_process_starts_harm_no_other(worker: WorkerOfOne) -> None:
    leaving = [asyncio.create_task(worker.client.next_mask(AB, LIMITS, ())) for _ in range(3)]
    staying = asyncio.create_task(worker.client.next_mask(AB, LIMITS, ()))
    for task in leaving:
        await asyncio.sleep(0.03)
        task.cancel()
    async with asyncio.timeout(WAIT_S):
        assert await staying
    assert worker.client.restarts == 0


async def test_without_descriptors_a_worker_that_cannot_start_a_process_gives_the_request_up(
    worker: WorkerOfOne,
) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
    try:
        with pytest.raises(BatonError) as caught:
            await worker.client.next_mask(AB, LIMITS, ())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert caught.value.kind is ErrorKind.CONFLICT
    assert await worker.client.next_mask(AB, LIMITS, ())


async def test_what_is_sent_to_a_process_that_has_just_ended_is_lost_and_no_internal_error(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(writer: asyncio.StreamWriter, data: bytes) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")  # uvloop's words

    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    monkeypatch.setattr(asyncio.StreamWriter, "write", write)
    with pytest.raises(BatonError) as caught:
        await worker.client.next_mask(AB, LIMITS, ())
    assert caught.value.kind is ErrorKind.CONFLICT
    worker.client.close((0, 1))


async def test_a_process_that_does_not_start_is_unavailable(tmp_path: Path) -> None:
    worker = WorkerOfOne(tmp_path, (sys.executable, "-c", ""))
    with pytest.raises(BatonError) as caught:
        await worker.client.next_mask(AB, LIMITS, ())
    assert caught.value.kind is ErrorKind.CONFLICT
    await worker.client.stop()


async def test_a_model_without_an_end_is_refused_by_name(tmp_path: Path) -> None:
    worker = WorkerOfOne(tmp_path)
    make_folder(tmp_path, eos_token_id=None)
    for _ in range(2):
        with pytest.raises(BatonError, match="end-of-sequence") as caught:
            await worker.client.next_mask(AB, LIMITS, ())
        assert caught.value.kind is ErrorKind.INVALID
    await worker.client.stop()
