"""One mask process, started, killed and started again by its client."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.engine.rings.mask_board import mask_words
from baton.engine.rings.output_ring import Finish
from baton.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import Choices, Grammar, Limits
from services.masks.process_client import PROGRAM, MaskProcessClient
from tests.masks.model import END_ID, OTHER_END_ID, VOCAB_SIZE, allowed, ids_of, make_folder
from tests.masks.worker import AB, LIMITS, WAIT_S, Worker


class WorkerOfOne(Worker):
    """With one mask process."""

    def __init__(self, folder: Path, program: tuple[str, ...] = PROGRAM) -> None:
        super().__init__(folder)
        self.client = MaskProcessClient(self.setup, 0, self.fail, program)


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


async def test_what_cannot_be_compiled_is_invalid_and_disturbs_no_other(worker: WorkerOfOne) -> None:
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    for _ in range(3):
        with pytest.raises(BatonError, match="cannot be used") as caught:
            await worker.client.follow((1, 1), 3, Grammar(regex="("), LIMITS, ())
        assert caught.value.kind is ErrorKind.INVALID
    worker.draw(0, 1, ids_of("a")[0])
    assert (await worker.next_mask())[:3] == (0, 1, 4)
    assert (worker.client.restarts, worker.client.failed, worker.client.followed) == (0, 3, 1)


async def test_a_sequence_without_any_token_fails_alone(worker: WorkerOfOne) -> None:
    limits = Limits(max_tokens=9, min_tokens=5, stop_token_ids=LIMITS.stop_token_ids)
    await worker.client.follow((0, 1), 3, Grammar(choice=Choices(choices=["a"])), limits, ())
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
        1: (Grammar(choice=Choices(choices=["a"])), short),
        2: (Grammar(regex="a[0-9]"), LIMITS),
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


async def test_a_process_that_computes_for_too_long_is_killed_and_one_grammar_blamed(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.masks.process_client.HUNG_S", 0.3)
    monkeypatch.setattr("services.masks.process_client._STARVED_S", 0.3)
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    await worker.client.follow((1, 1), 3, AB, LIMITS, ())
    assert worker.client.pid is not None
    os.kill(worker.client.pid, signal.SIGSTOP)
    worker.board.beat(1)  # as if it were computing for slot 1
    async with asyncio.timeout(WAIT_S):
        lost = {await worker.failed.get() for _ in range(2)}
    assert lost == {(0, 1, ErrorKind.CONFLICT), (1, 1, ErrorKind.INVALID)}


async def test_a_grammar_that_is_compiled_for_too_long_is_refused(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.client.next_mask(AB, LIMITS, ())
    monkeypatch.setattr("services.masks.process_client.COMPILE_S", 0.2)
    assert worker.client.pid is not None
    os.kill(worker.client.pid, signal.SIGSTOP)
    with pytest.raises(BatonError, match=r"within 0.2 s") as caught:
        await worker.client.next_mask(Grammar(regex="c"), LIMITS, ())
    assert caught.value.kind is ErrorKind.CONFLICT, "it did not run, so another attempt may succeed"
    monkeypatch.setattr("services.masks.process_client.COMPILE_S", WAIT_S)
    await worker.client.next_mask(AB, LIMITS, ())
    monkeypatch.setattr("services.masks.process_client.COMPILE_S", 0.2)
    os.kill(worker.client.pid, signal.SIGSTOP)
    # As if it had computed all the time.
    times = itertools.count()
    monkeypatch.setattr("services.masks.process_client._Running.cpu_s", property(lambda _: next(times)))
    with pytest.raises(BatonError, match=r"within 0.2 s") as caught:
        await worker.client.next_mask(Grammar(regex="c"), LIMITS, ())
    assert caught.value.kind is ErrorKind.INVALID
    monkeypatch.undo()
    assert await worker.client.next_mask(AB, LIMITS, ())


async def test_a_process_that_is_only_busy_is_not_killed(
    worker: WorkerOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.client.follow((0, 1), 3, AB, LIMITS, ())
    monkeypatch.setattr("services.masks.process_client.COMPILE_S", 0.2)
    monkeypatch.setattr("services.masks.process_client._Running.answered_within", lambda *_: True)
    running = worker.client.pid
    assert running is not None
    os.kill(running, signal.SIGSTOP)
    with pytest.raises(BatonError, match="too many grammars") as caught:
        await worker.client.next_mask(Grammar(regex="c"), LIMITS, ())
    assert caught.value.kind is ErrorKind.CONFLICT
    os.kill(running, signal.SIGCONT)
    worker.draw(0, 1, ids_of("a")[0])
    assert (await worker.next_mask())[:2] == (0, 1)


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
