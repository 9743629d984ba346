"""A silent worker is noticed in time, one that stalls for less than a second never is."""

from __future__ import annotations

import asyncio
import bisect
import math
import random

import grpc.aio
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_watch import Activity, ProcessWatch, process_space
from baton.v1.worker_pb2 import DescribeRequest, DescribeResponse
from services.router.workers import liveness
from services.router.workers.liveness import CHECK_INTERVAL_S, FrontProcess, LivenessTimer
from tests.router.conftest import SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected

BEAT_S = 0.5


class Watched:
    """A worker that beats every half second and the router that listens, in virtual time.

    `stalls` are spans in which the worker does nothing; what was due meanwhile comes at their end. `blocked`
    are spans in which the router's loop does nothing; it takes in what has come, then looks.
    """

    def __init__(self, stalls: list[tuple[float, float]], blocked: list[tuple[float, float]]) -> None:
        self._stalls, self._blocked = stalls, blocked
        self.now = 0.0
        self._timer = LivenessTimer(lambda: self.now)
        self._beats_at = 0.0

    def run(self, until: float) -> float | None:
        """Returns the time when the worker was given up, or None if it was not."""
        while self.now < until:
            self.now = _end_of(self._blocked, self.now + CHECK_INTERVAL_S)
            while _end_of(self._stalls, self._beats_at) <= self.now:
                self._beats_at = _end_of(self._stalls, self._beats_at) + BEAT_S
                self._timer.reset()
            if self._timer.expired():
                return self.now
        return None


def _end_of(spans: list[tuple[float, float]], at: float) -> float:
    """`at`, or the end of the span that it is in. Spans are in order, and none is within another."""
    begun = bisect.bisect_right(spans, (at, math.inf))
    return max(at, spans[begun - 1][1]) if begun else at


def random_spans(draw: random.Random, count: int, longest: float) -> list[tuple[float, float]]:
    spans, at = [], 0.0
    for _ in range(count):
        at += draw.uniform(0.0, 3.0)
        spans.append((at, at + draw.uniform(0.0, longest)))
        at = spans[-1][1]
    return spans


def test_no_false_alarm_for_stalls_under_a_second_in_a_thousand_tries() -> None:
    """Nor where the router's own loop stands still for seconds meanwhile."""
    draw = random.Random(19)
    stalls = random_spans(draw, 1000, 0.999)
    assert Watched(stalls, []).run(stalls[-1][1]) is None
    assert Watched(stalls, random_spans(draw, 1000, 0.999)).run(stalls[-1][1]) is None
    assert Watched(stalls, random_spans(draw, 300, 10.0)).run(stalls[-1][1]) is None


def test_a_silent_worker_is_lost_within_three_seconds() -> None:
    draw = random.Random(20)
    for _ in range(1000):
        begin = draw.uniform(5.0, 6.0)
        given_up_at = Watched([(begin, 1e9)], []).run(60.0)
        assert given_up_at is not None
        assert 1.5 < given_up_at - begin <= 3.0


def test_silence_is_counted_from_the_last_message_to_the_check_after_the_limit() -> None:
    now = 5.0
    timer = LivenessTimer(lambda: now)
    for _ in range(2):
        for _ in range(20):  # an eighth of a second each
            now += 0.125
            assert not timer.expired()
        now += 0.125
        assert timer.expired()
        timer.reset()
    now += 1000.0  # this process stood still
    assert not timer.expired()
    for _ in range(18):
        now += 0.125
        assert not timer.expired()
    now += 0.125
    assert timer.expired()


async def test_a_silent_token_stream_loses_the_worker(site: SiteMaker) -> None:
    """The worker still answers, and its sequences continue at the other worker."""
    async with site(decode=2) as here:
        victim, other = here.worker("decode-0"), here.worker("decode-1")
        other.behaviour.refuse_reserves = 10**6
        victim.behaviour.step_s = 0.02
        call = asyncio.create_task(here.generate(ids_request([1, 2, 3], 24)))
        await until(lambda: any(ticket.emitted for ticket in victim.decode.tickets.values()))
        other.behaviour.refuse_reserves = 0
        victim.behaviour.silent, victim.behaviour.step_s = True, 60.0
        responses = await call
        assert tokens_of(responses) == expected([1, 2, 3], 24)
        assert other.decode.reserves[-1].first_number > 0
        # Found again, it is to end what it ran under the router's former id.
        victim.behaviour.silent = False
        await until(lambda: bool(victim.decode.former_router_ids))
        assert victim.decode.former_router_ids[0] == victim.decode.reserves[0].router_id


@pytest.mark.parametrize("starved", [True, False])
async def test_a_silent_worker_that_is_starved_is_waited_for(site: SiteMaker, starved: bool) -> None:
    """The worker's process wants a processor and is given none; the other one sleeps."""
    front = FrontProcess(ProcessWatch(1, look_at=lambda _: Activity(5.0, starved)))
    async with site(decode=2) as here:
        for name in ("decode-0", "decode-1"):
            here.worker(name).behaviour.step_s = 0.02
        call = asyncio.create_task(here.generate(ids_request([1, 2, 3], 24)))
        workers = {worker.name: worker for worker in here.router.directory.workers}
        await until(lambda: any(workers[f"decode-{n}"].outputs for n in (0, 1)))
        (victim,) = (worker for worker in workers.values() if worker.decodes and worker.outputs)
        victim.front = front
        behaviour = here.worker(victim.name).behaviour
        behaviour.silent, behaviour.deaf, behaviour.steps_from = True, True, 10**6
        await asyncio.sleep(3.2)
        assert victim.lost is not starved
        behaviour.silent, behaviour.deaf, behaviour.steps_from = False, False, 0
        responses = await call
        assert tokens_of(responses) == expected([1, 2, 3], 24)
        assert (responses[-1].trace.attempts == 1) is starved


def test_a_worker_is_starved_only_where_its_process_is_seen_to_be() -> None:
    assert not FrontProcess(None).starved(20.0)
    looked: list[int] = []

    def look(pid: int) -> Activity:
        looked.append(pid)
        return Activity(5.0, wanting=True)

    front = FrontProcess(ProcessWatch(1, look_at=look))
    assert not front.starved(0.0)
    assert not front.starved(0.9)
    assert looked == [], "a silence of less than a second is none"
    assert front.starved(1.0)
    assert front.starved(2.0)
    assert looked == [1, 1]


def test_only_processes_of_this_pid_namespace_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[int] = []
    monkeypatch.setattr(liveness, "ProcessWatch", watched.append)
    for space, pid, seen in ((process_space(), 1, True), ("another", 1, False), (process_space(), 0, False)):
        described = DescribeResponse(process_id=pid, process_space=space)
        watched.clear()
        FrontProcess.of(described)
        assert watched == ([pid] if seen else [])
    assert process_space() != ""
    monkeypatch.setattr(liveness, "process_space", lambda: "")
    watched.clear()
    FrontProcess.of(DescribeResponse(process_id=1))
    assert watched == [], "neither can tell where it is"


async def test_a_prefill_worker_that_does_not_answer_loses_its_calls(site: SiteMaker) -> None:
    async with site(prefill=2) as here:
        victim = here.worker("prefill-0")
        victim.behaviour.prefill_s = 60.0
        calls = [asyncio.create_task(here.generate(ids_request([n], 4))) for n in range(4)]
        await until(lambda: victim.prefill.running > 0)
        victim.behaviour.deaf = True
        answers = await asyncio.gather(*calls)
        assert [tokens_of(answer) for answer in answers] == [expected([n], 4) for n in range(4)]
        assert 2 in [answer[-1].trace.attempts for answer in answers]
        await here.quiet()


async def test_a_call_ends_with_its_worker(site: SiteMaker) -> None:
    async with site() as here:
        worker = here.router.directory.workers[0]
        here.worker(worker.name).behaviour.deaf = True

        async def ask() -> None:
            call = worker.peer.worker.Describe(DescribeRequest())
            with worker.while_alive(call):
                await call

        asking, cancelled = asyncio.create_task(ask()), asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        worker.lose("the test says so")
        for lost in (asking, ask()):
            with pytest.raises(BatonError, match="the test says so") as caught:
                await lost
            assert caught.value.kind is ErrorKind.UNAVAILABLE


async def test_cancels_are_repeated_until_answered(site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as here:
        worker = here.worker("decode-0")
        worker.behaviour.step_s, worker.behaviour.lose_cancels = 0.02, 3
        call = here.stub.Generate(ids_request([1, 2, 3], 200))
        await call.read()
        call.cancel()
        await until(lambda: worker.decode.cancels == 4, 6)
        await until(lambda: worker.decode.used_slots == 0)
        await here.quiet()
        assert here.router.cancels.unanswered == 0


async def test_output_that_no_request_waits_for_is_cancelled(site: SiteMaker) -> None:
    """The cancel is sent once, though output comes with every step until it takes effect."""
    async with site() as here:
        worker = here.worker("decode-0")
        worker.behaviour.step_s = 0.02
        call = asyncio.create_task(here.generate(ids_request([1, 2, 3], 200)))
        await until(lambda: any(ticket.emitted for ticket in worker.decode.tickets.values()))
        known = here.router.directory.workers[1]
        (request_id,) = known.outputs
        del known.outputs[request_id]
        await until(lambda: worker.decode.used_slots == 0)
        assert (worker.decode.cancels, here.router.cancels.orphans) == (1, 1)
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call


def test_the_constants_leave_a_margin() -> None:
    """The timeout from the last message on, and one check interval."""
    assert liveness.LIVENESS_TIMEOUT_S + 2 * CHECK_INTERVAL_S < 3.0
    assert liveness.LIVENESS_TIMEOUT_S > 1.0 + BEAT_S
