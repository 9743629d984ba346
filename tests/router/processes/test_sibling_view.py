"""Reports of router processes to one another about their claims and the prompts that they have sent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from baton.perf_model.step_costs import StepCosts
from baton.v1.worker_pb2 import DescribeResponse
from services.common.config.router import GroupMember
from services.router.placement.claim import Claim
from services.router.placement.placement import NoRoom
from services.router.placement.prefix_affinity import PrefixAffinity
from services.router.processes.sibling_view import OwnLoad, SiblingView
from services.router.workers.backlog import Queued, prompts_of, seconds_by_length
from services.router.workers.other_claims import FIRST, Precedence
from services.router.workers.peer import Peer
from services.router.workers.worker import Worker
from tests.router.conftest import until
from tests.router.workers.bare_workers import bare_worker, placement_of

SECRET = "a secret of sixteen"

# Of eight short prompts and of two long ones.
PROMPTS = seconds_by_length([0.03125] * 8 + [0.25, 0.25])


class Process:
    """One of several router processes, with its own idea of one prefill and two decode workers."""

    def __init__(self, index: int, folder: Path, slots: int = 4) -> None:
        names = ("prefill-0", "prefill-1", "decode-0")
        self.workers = [
            _numbered(bare_worker(name, slots=slots), number) for number, name in enumerate(names)
        ]
        self.prefill, _, self.decode = self.workers
        self.prefixes = PrefixAffinity(SECRET, lambda: self.workers)
        self.first: Precedence | None = None
        member = GroupMember(index=index, count=2, folder=str(folder))
        self.placement = placement_of(self.workers)
        self.view = SiblingView(
            member,
            lambda: self.workers,
            self.prefixes,
            self.placement.division,
            lambda: OwnLoad(3, 2, 4, self.first, PROMPTS),
        )
        self.placement.on_claim = self.view.changed

    def claim(self, precedence: Precedence = FIRST) -> Claim | NoRoom:
        return self.placement.pick(100, 10, precedence=lambda: precedence)

    def heartbeat(self, free: int, claimed_before: int | None = None) -> None:
        """The decode worker's answer to a poll that was sent a moment ago."""
        described = DescribeResponse()
        described.CopyFrom(self.decode.described)
        described.load.free_slots = free
        before = self.decode.claimed_slots if claimed_before is None else claimed_before
        self.decode.update(described, before, time.monotonic())


def _numbered(worker: Worker, number: int) -> Worker:
    described = worker.described
    described.identity.incarnation = bytes([number + 1]) * 16
    described.cache_dtype = "float32"
    described.load.block_tokens, described.load.blocks = 4, 100
    found = Worker(cast("Peer", None), described, lambda: None)
    found.following = found.serves = True
    return found


@contextlib.asynccontextmanager
async def pair(folder: Path, slots: int = 4) -> AsyncIterator[tuple[Process, Process]]:
    one, other = Process(0, folder, slots), Process(1, folder, slots)
    for process in (one, other):
        process.view.start()
    try:
        yield one, other
    finally:
        await one.view.stop()
        await other.view.stop()


def _has(worker: Worker, slots: int) -> bool:
    return worker.others.siblings.slots == slots


async def test_claims_are_known_to_the_siblings(tmp_path: Path) -> None:
    """Slots, tokens and predicted seconds; and that they were released."""
    async with pair(tmp_path) as (one, other):
        claim = one.claim()
        assert not isinstance(claim, NoRoom)
        await until(lambda: other.decode.others.siblings.slots == 1)
        assert other.decode.free_slots == 3
        assert other.decode.others.siblings.context == one.decode.claimed_context > 0
        assert sum(worker.others.siblings.queued_tokens for worker in other.workers) == 100
        assert sum(worker.prefill_queue_prompts for worker in other.workers) == 1
        assert (other.view.running, other.view.waiting_for_prefill) == (3, 2)
        assert other.view.queued == Queued(4, 0.75, prompts_of(PROMPTS))
        claim.release()
        await until(lambda: other.decode.others.siblings.slots == 0)
        assert other.decode.turnover.per_second == one.decode.turnover.own > 0


async def test_slots_of_siblings_are_not_foreign(tmp_path: Path) -> None:
    """So prompts still start early; unless siblings could take the last slot at the same time."""
    async with pair(tmp_path) as (one, other):
        claims = [one.claim(), one.claim()]
        await until(lambda: other.decode.others.siblings.slots == 2)
        other.decode.others.poll_sent()
        other.heartbeat(free=2)
        assert other.decode.others.other_router_slots == 0
        claim = other.claim()
        assert not isinstance(claim, NoRoom)
        assert claim.has_certain_room
        last = other.claim()
        assert not isinstance(last, NoRoom)
        assert not last.has_certain_room
        # A slot that is released between the poll and its answer is no foreign one either.
        for number, held in enumerate(claims):
            assert not isinstance(held, NoRoom)
            other.decode.others.poll_sent()
            held.release()
            await until(partial(_has, other.decode, 1 - number))
            other.heartbeat(free=number)
            assert other.decode.others.other_router_slots == 0


async def test_another_router_is_foreign_after_two_heartbeats(tmp_path: Path) -> None:
    """One answer may count a slot that the sibling has not reported yet."""
    async with pair(tmp_path) as (one, other):
        assert isinstance(one.claim(), Claim)
        await until(lambda: other.decode.others.siblings.slots == 1)
        for expected in (0, 1):
            other.decode.others.poll_sent()
            other.heartbeat(free=2)
            assert other.decode.others.other_router_slots == expected


@contextlib.asynccontextmanager
async def waits_in_the_other(folder: Path, slots: int = 4) -> AsyncIterator[tuple[Process, Process]]:
    """A request of priority 3 that arrived at 5 s waits in the second process, and the first knows it."""
    async with pair(folder, slots) as (one, other):
        other.first = Precedence(3, 5.0)
        other.view.changed()
        await until(lambda: one.decode.others.siblings.waiting == (other.first,))
        yield one, other


@pytest.mark.parametrize("later", [Precedence(3, 6.0), Precedence(4, 1.0)], ids=["younger", "less urgent"])
@pytest.mark.parametrize(
    "sooner", [Precedence(3, 4.0), Precedence(2, 9.0), FIRST], ids=["older", "urgent", "again"]
)
async def test_the_last_slot_is_left_to_the_first_request_of_all(
    tmp_path: Path, sooner: Precedence, later: Precedence
) -> None:
    async with waits_in_the_other(tmp_path) as (one, other):
        for _ in range(3):
            assert isinstance(one.claim(later), Claim)
        assert one.claim(later) is NoRoom.DECODE
        await until(lambda: other.decode.others.siblings.slots == 3)
        last = other.claim(Precedence(3, 5.0))
        assert isinstance(last, Claim)
        last.release()
        assert isinstance(one.claim(sooner), Claim)


async def test_a_slot_is_free_once_the_first_request_waits_no_more(tmp_path: Path) -> None:
    """The queue is tried again then, once for all workers."""
    async with waits_in_the_other(tmp_path) as (one, other):
        for _ in range(3):
            assert isinstance(one.claim(Precedence(3, 6.0)), Claim)
        assert one.claim(Precedence(3, 6.0)) is NoRoom.DECODE
        looked: list[bool] = []
        for worker in one.workers:
            worker.changed = lambda: looked.append(True)
        other.first = None
        other.view.changed()
        await until(lambda: bool(looked))
        assert len(looked) == 1
        assert isinstance(one.claim(Precedence(3, 6.0)), Claim)


async def test_an_empty_worker_or_one_of_one_slot_takes_what_comes(tmp_path: Path) -> None:
    """Requests that cannot be placed in one process would keep out all of the other."""
    async with waits_in_the_other(tmp_path, slots=1) as (one, _):
        assert one.decode.slots_left_by(Precedence(3, 6.0)) == 0
        assert isinstance(one.claim(Precedence(3, 6.0)), Claim)
        assert one.decode.slots_left_by(Precedence(3, 6.0)) == 0


async def test_prompts_of_siblings_take_time_of_a_worker_too(tmp_path: Path) -> None:
    async with pair(tmp_path) as (one, other):
        one.prefill.prefill_share.add(0.5)
        one.view.changed()
        await until(lambda: other.prefill.prefill_share.after() > 0)
        assert other.prefill.prefill_share.after() == pytest.approx(0.25)
        assert (other.prefill.prefill_share.own, one.prefill.prefill_share.siblings) == (0, 0)


async def test_what_one_process_learns_of_workers_and_requests_the_other_knows(tmp_path: Path) -> None:
    async with pair(tmp_path) as (one, other):
        for _ in range(500):
            one.decode.tpot_ratio.ended(0.0055, 0.005)
            one.placement.division.placed(0.1, StepCosts(decode_sequence_s=0.001), 300, 50)
        one.view.changed()
        await until(lambda: other.decode.tpot_ratio.value > 1.05)
        assert other.decode.tpot_ratio.value == pytest.approx(one.decode.tpot_ratio.value, abs=0.02)
        assert other.prefill.tpot_ratio.value == 1.0
        for mine, theirs in zip(one.placement.division.means, other.placement.division.means, strict=True):
            assert theirs.value == pytest.approx(mine.value)
        for own_prompts in (False, True):
            one.placement.division.own_prompts = own_prompts
            one.view.changed()
            await until(lambda: other.placement.division.first_process is own_prompts)  # noqa: B023
            assert one.placement.division.first_process is None
        await one.view.stop()
        await until(lambda: other.placement.division.first_process is None, 3)


async def test_a_silent_sibling_has_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as (one, other):
        assert isinstance(one.claim(), Claim)
        await until(lambda: other.decode.others.siblings.slots == 1)
        await one.view.stop()
        await until(lambda: other.decode.others.siblings.processes == 0, 3)
        assert other.decode.others.siblings.slots == 0


async def test_prompts_that_siblings_sent_count_as_cached(tmp_path: Path) -> None:
    async with pair(tmp_path) as (one, other):
        prompt = await one.prefixes.hash_prompt(list(range(21)))
        one.prefixes.prompt_sent(one.prefill, prompt)
        await until(lambda: other.prefixes.cached_tokens(other.prefill, prompt) == 20)


async def test_outputs_that_siblings_had_decoded_count_as_cached(tmp_path: Path) -> None:
    async with pair(tmp_path) as (one, other):
        ids = list(range(21))
        prompt, next_turn = await one.prefixes.hash_prompt(ids[:6]), await one.prefixes.hash_prompt([*ids, 9])
        one.prefixes.output_ended(one.decode, prompt, ids[:6], ids[6:])
        await until(lambda: other.prefixes.cached_tokens(other.decode, next_turn) == 20)


async def test_a_link_that_failed_in_one_process_is_avoided_in_the_other(tmp_path: Path) -> None:
    """One failure counts once, and a process that learns of it does not pass it on."""
    async with pair(tmp_path) as (one, other):
        one.prefill.links.failed(one.decode, "it is cut")
        one.view.changed()
        await until(lambda: other.prefill.links.has_failed(other.decode))
        assert not other.prefill.links.usable(other.decode)
        assert other.workers[1].links.usable(other.decode)
        other.prefill.links.failed(other.decode, "it is cut, too")  # it was under way
        other.view.changed()
        await asyncio.sleep(0.3)  # a heartbeat of each
        for process in (one, other):
            (failed,) = process.prefill.links.status()
            assert (failed.decode, failed.failures) == ("decode-0", 1)
        other.prefill.links.worked(other.decode)
        other.view.changed()
        await until(lambda: not one.prefill.links.status())
        assert one.prefill.links.usable(one.decode)


async def test_malformed_datagrams_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path) as (one, _):
        received: list[bytes] = []
        with monkeypatch.context() as patched:
            patched.setattr(one.view, "receive", received.append)
            await until(lambda: any(datagram[:1] == b"c" for datagram in received))
        report = next(datagram for datagram in received if datagram[:1] == b"c")
        for datagram in (
            *(report[:size] for size in range(len(report))),
            b"",
            b"c",
            b"c\x01",
            b"c\x01" + bytes(9),
            b"p\x01short",
            b"?" * 50,
            b"c\x00" + bytes(8),
            b"l\x01" + bytes([1]) * 31,
            b"l\x01" + bytes([1]) * 16 + bytes(16) + b"unknown decode worker",
            b"l\x01" + bytes([1]) * 16 + bytes([3]) * 16 + b"\xff",
        ):
            one.view.receive(datagram)
        await asyncio.sleep(0)
        assert one.decode.others.siblings.slots == 0
        assert [link.reason for link in one.prefill.links.status()] == ["\ufffd"]
