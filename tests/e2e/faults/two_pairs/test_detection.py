"""A worker that freezes or is cut off, with no supervisor: noticed within 3 s, and requests go on elsewhere.

Each test states what it injects and shows that it took effect; tokens are compared with the reference, and
once the fault is over the workers hold what they held before.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.base.process_stat import is_running
from tests.e2e.faults.interrupted import (
    ANSWERS_SWALLOWED,
    BOTH_SWALLOWED,
    FRONT_FROZEN,
    REQUESTS_SWALLOWED,
    TOKENS,
    Fault,
    Stream,
    all_go_on,
    asked,
    freeze,
    losses,
    noticed_after_s,
    right,
    state_of,
    streaming,
)
from tests.e2e.faults.test_unsupervised import REDUCED, prove
from tests.e2e.faults.two_pairs.test_lost_workers import all_free, by_role, working
from tests.e2e.support.cluster import eventually
from tests.e2e.support.workers import Loose, Worker

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

NOTICED_S = 3.0
# Seconds that the prefill of a stream on another worker may take; more where its first token took longer.
PREFILL_S = 0.5
SERVING = health_pb2.HealthCheckResponse.SERVING


def prefill_s(streams: list[Stream]) -> float:
    """Seconds in which any of these streams is prefilled once more, at most."""
    return max(PREFILL_S, *(stream.at[1] - stream.at[0] for stream in streams))


def slow(fault: Fault) -> object:
    return pytest.param(fault, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "fault",
    [FRONT_FROZEN, slow(REQUESTS_SWALLOWED), slow(ANSWERS_SWALLOWED), slow(BOTH_SWALLOWED)],
    ids=str,
)
async def test_a_decode_worker_that_is_cut_off(model: Path, loose: Loose, fault: Fault) -> None:
    async with loose.cluster.stub() as stub:
        async with streaming(stub, 4, seed=fault.name) as streams:
            victim = await busy_one(loose)
            began, began_at = time.monotonic(), datetime.now(UTC)
            fault.begin(victim)
            try:
                after_s = await noticed_after_s(loose, victim, began_at)
                await all_go_on(streams, began + after_s)
                gap = max(stream.longest_gap_s for stream in streams)
                state = await state_of(loose.cluster, victim)
            finally:
                fault.end(victim)
        print(f"\nPROOF decode, {fault}: noticed after {after_s:.2f} s, longest gap {gap:.2f} s")
        assert after_s <= NOTICED_S
        assert gap <= NOTICED_S + prefill_s(streams)
        assert state == "lost"
        right(model, streams)
        await all_free(loose.workers.values(), 5.0)
        await all_ready(loose)


@pytest.mark.parametrize(
    "fault", [slow(FRONT_FROZEN), slow(REQUESTS_SWALLOWED), slow(ANSWERS_SWALLOWED)], ids=str
)
async def test_a_prefill_worker_that_is_cut_off(model: Path, loose: Loose, fault: Fault) -> None:
    """The worker is cut off while it computes prompts, which the other one then computes.

    An engine behind a frozen front goes on with what it holds, and may end it. So most of the requests come
    after the fault: the router has given the victim, the first to compute one, a prompt until then, and gives
    it some of these, too, which can only be computed elsewhere.
    """
    prefills, _ = by_role(loose.workers.values())
    async with loose.cluster.stub() as stub:
        streams = asked(6, 1500, seed=fault.name)
        reports = [await worker.report() for worker in prefills]
        before = {report.engine_pid: report.prompt_tokens_run for report in reports}
        runs = [asyncio.create_task(stream.run(stub, 20)) for stream in streams[:2]]
        victim, _ = await working(
            prefills, lambda report: report.prompt_tokens_run > before[report.engine_pid]
        )
        began_at = datetime.now(UTC)
        fault.begin(victim)
        runs += [asyncio.create_task(stream.run(stub, 20)) for stream in streams[2:]]
        try:
            after_s = await noticed_after_s(loose, victim, began_at)
            await asyncio.gather(*runs)
        finally:
            fault.end(victim)
        print(f"\nPROOF prefill, {fault}: noticed after {after_s:.2f} s")
        assert after_s <= NOTICED_S
        attempts = max(stream.attempts for stream in streams)
        # A worker whose answers are swallowed may end what it computes: blocks and first token go to decode.
        assert attempts == 2 or (attempts == 1 and fault is ANSWERS_SWALLOWED), "none was interrupted"
        right(model, streams)
        await all_free(loose.workers.values(), 5.0)
        await all_ready(loose)


async def all_ready(loose: Loose) -> None:
    deadline = time.monotonic() + 5.0
    for worker in loose.workers.values():
        while (state := await state_of(loose.cluster, worker)) != "ready":
            assert time.monotonic() < deadline, f"{worker.name} is {state}"


async def test_clients_beside_a_worker_that_is_cut_off(model: Path, loose: Loose) -> None:
    """The reduced run of `test_unsupervised.py`."""
    await prove(loose, model, REDUCED)


async def test_no_false_alarm_for_stalls_under_a_second(model: Path, loose: Loose) -> None:
    await stalls(model, loose, rounds=1, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_false_alarm_in_a_thousand_stalls(model: Path, loose: Loose) -> None:
    await stalls(model, loose, rounds=125, seed=2)


async def stalls(model: Path, loose: Loose, rounds: int, seed: int) -> None:
    """Stops every front and every engine once a round for up to 0.99 s, at much the same time."""
    draw = random.Random(seed)
    reports = [await worker.report() for worker in loose.workers.values()]
    victims = [pid for report in reports for pid in (report.front_pid, report.engine_pid)]
    before, count, longest = losses(loose), 0, 0.0

    async def stall(pid: int, delay_s: float, seconds: float) -> None:
        await asyncio.sleep(delay_s)
        freeze(pid)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    async with loose.cluster.stub() as stub:
        for number in range(rounds):
            streams = asked(2, seed=f"stalls {seed} {number}")
            runs = [asyncio.create_task(stream.run(stub, 300)) for stream in streams]
            lengths = [draw.uniform(0.3, 0.99) for _ in victims]
            await asyncio.gather(
                *(
                    stall(pid, draw.uniform(0, 0.2), length)
                    for pid, length in zip(victims, lengths, strict=True)
                )
            )
            count, longest = count + len(lengths), max(longest, *lengths)
            await asyncio.gather(*runs)
            right(model, streams)
            assert losses(loose) == before, f"a false alarm in {count} stalls"
            assert [stream.attempts for stream in streams] == [1, 1]
    print(f"\nPROOF {count} stalls of up to {longest:.2f} s: no worker was lost, every first attempt went on")


@pytest.mark.parametrize(
    "seconds", [pytest.param(1.5, marks=pytest.mark.slow), 6.0, pytest.param(8.0, marks=pytest.mark.slow)]
)
async def test_cancels_while_a_front_stands_still_are_not_lost(loose: Loose, seconds: float) -> None:
    """Slots, blocks and tickets are back soon after it goes on, not when the outputs would have ended."""
    async with loose.cluster.stub() as stub:
        async with streaming(stub, 8, seed=f"cancels {seconds}") as streams:
            victim = await busy_one(loose)
            FRONT_FROZEN.begin(victim)
            thaw_at = time.monotonic() + seconds
        try:  # by now their clients have gone
            assert all(len(stream.tokens) < TOKENS for stream in streams), "they had ended before"
            await asyncio.sleep(thaw_at - time.monotonic())
        finally:
            FRONT_FROZEN.end(victim)
        thawed = time.monotonic()
        await all_free(loose.workers.values(), 3.0)
        print(f"\nPROOF cancels in {seconds} s: all is free {time.monotonic() - thawed:.2f} s after")
        await all_ready(loose)


async def health_of(worker: Worker) -> bool:
    """True if the worker's own health service says SERVING."""
    async with grpc.aio.insecure_channel(worker.address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=0.5)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == SERVING)


@pytest.mark.slow
async def test_engines_that_freeze_behind_live_fronts(model: Path, loose: Loose) -> None:
    """One of either role, one after the other: its front kills it and ends, and requests go on elsewhere.
    The last test of this file, since those workers are gone then."""
    await all_ready(loose)
    async with loose.cluster.stub() as stub:
        left = dict(loose.workers)
        del left[(await frozen_engine_while_decoding(model, loose, stub)).name]
        await all_free(left.values(), 3.0)
        victim = left.pop("prefill-0")
        await frozen_engine_while_prefilling(model, loose, stub, victim)
        await all_free(left.values(), 3.0)


async def busy_one(loose: Loose) -> Worker:
    """A decode worker that runs some of the streams."""
    for name in ("decode-0", "decode-1"):
        load = (await loose.workers[name].report()).load
        if load.free_slots < load.slots:
            return loose.workers[name]
    raise AssertionError("no decode worker runs anything")


async def frozen_engine_while_decoding(model: Path, loose: Loose, stub: RouterServiceAsyncStub) -> Worker:
    async with streaming(stub, 4, seed="frozen engine") as streams:
        victim = await busy_one(loose)
        report = await victim.report()
        assert await health_of(victim)
        began, began_at = time.monotonic(), datetime.now(UTC)
        freeze(report.engine_pid)
        after_s = await noticed_after_s(loose, victim, began_at)
        assert not await health_of(victim), "its health says SERVING while its engine is stopped"
        await all_go_on(streams, began + after_s)
        gap = max(stream.longest_gap_s for stream in streams)
        assert await state_of(loose.cluster, victim) == "lost"
    print(f"\nPROOF decode, engine frozen: noticed after {after_s:.2f} s, longest gap {gap:.2f} s")
    assert after_s <= NOTICED_S
    assert gap <= NOTICED_S + prefill_s(streams)
    right(model, streams)
    await eventually(lambda: not (is_running(report.engine_pid) or is_running(victim.front.pid)), 3)
    return victim


async def frozen_engine_while_prefilling(
    model: Path, loose: Loose, stub: RouterServiceAsyncStub, victim: Worker
) -> None:
    """Half of the requests come after the fault: those before it may have ended by then."""
    streams, before = asked(6, 1500, seed="frozen engine"), await victim.report()
    runs = [asyncio.create_task(stream.run(stub, 20)) for stream in streams[:3]]
    report = await victim.until(lambda report: report.prompt_tokens_run > before.prompt_tokens_run)
    began_at = datetime.now(UTC)
    freeze(report.engine_pid)
    runs += [asyncio.create_task(stream.run(stub, 20)) for stream in streams[3:]]
    step_s = report.recent_prefill.p99_ms / 1e3
    # The calls end with the front.
    after_s = await noticed_after_s(loose, victim, began_at, "attempt_failed")
    assert not await health_of(victim), "its health says SERVING while its engine is stopped"
    assert await state_of(loose.cluster, victim) in ("unreachable", "lost")
    await asyncio.gather(*runs)
    print(f"\nPROOF prefill, engine frozen: noticed after {after_s:.2f} s, steps of {step_s:.2f} s")
    # Where steps take less than 0.2 s, as they do on an idle machine; an engine has ten times a step's time.
    assert after_s <= max(NOTICED_S, 10 * step_s + 1.0)
    assert max(stream.attempts for stream in streams) == 2, "none was interrupted"
    right(model, streams)
    await eventually(lambda: not (is_running(report.engine_pid) or is_running(victim.front.pid)), 3)
