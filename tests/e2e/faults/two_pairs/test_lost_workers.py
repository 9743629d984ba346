"""A worker freezes or dies in the middle of it: requests go on elsewhere, or end in time and say why."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.base.process_stat import is_running
from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import Answer, eventually, leaks
from tests.e2e.support.workers import Loose, Worker, all_started_again
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# Two prompts, since what decode has of one it is not sent.
LONG, OTHER = ([(number * 7 + salt) % VOCAB_SIZE for number in range(1500)] for salt in (0, 1))


def prompts(length: int, count: int) -> list[list[int]]:
    return [[(3 * number + 11 * salt) % VOCAB_SIZE for number in range(length)] for salt in range(count)]


async def all_free(workers: Collection[Worker], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while found := {worker.name: held for worker in workers if (held := leaks(await worker.report()))}:
        assert time.monotonic() < deadline, f"still held after {within_s} s: {found}"
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_prefill_engine_that_freezes_in_a_handoff(model: Path, loose: Loose) -> None:
    """Decode has its staging back once that engine is proven dead; the request goes on at the other."""
    await all_started_again(loose)
    workers = list(loose.workers.values())
    prefills, decodes = by_role(workers)
    shipped = {report.engine_pid: report.bytes_shipped for report in [await one.report() for one in prefills]}
    committed = [(await decode.report()).handoffs_committed for decode in decodes]
    async with loose.cluster.stub() as stub:
        answering = asyncio.create_task(loose.cluster.generate(stub, LONG, max_tokens=5, **GREEDY))
        victim, engine = await working(
            prefills, lambda report: report.bytes_shipped > shipped[report.engine_pid]
        )
        os.kill(engine, signal.SIGSTOP)
        held = [await decode.report() for decode in decodes]
        assert [report.live_tickets for report in held].count(1) == 1
        assert [report.handoffs_committed for report in held] == committed, "it froze too late"
        await ended(model, LONG, await answering, victim, engine)
        await all_free([worker for worker in workers if worker is not victim], 3.0)


async def test_a_decode_engine_that_freezes_in_a_handoff(model: Path, loose: Loose) -> None:
    """The handoff's sender has all blocks back within 3 s; the request goes on at the other worker."""
    alive = [one for one in loose.workers.values() if one.front.poll() is None]
    prefills, decodes = by_role(alive)
    reports = [await one.report() for one in prefills]
    before = {report.engine_pid: report for report in reports}
    async with loose.cluster.stub() as stub:
        answering = asyncio.create_task(loose.cluster.generate(stub, OTHER, max_tokens=5, **GREEDY))
        prefill, sender = await working(
            prefills, lambda report: report.bytes_shipped > before[report.engine_pid].bytes_shipped
        )
        victim, engine = await working(decodes, lambda report: report.live_tickets > 0)
        os.kill(engine, signal.SIGSTOP)
        held = await prefill.report()
        assert any(link.live_transfers for link in held.links), "it froze too late"
        broken = before[sender].links_broken
        freed = await prefill.until(lambda report: report.links_broken > broken, 3.0)
        assert freed.links_broken == broken + 1
        await ended(model, OTHER, await answering, victim, engine)
        await all_free([worker for worker in (prefill, *decodes) if worker is not victim], 1.0)


def by_role(workers: Collection[Worker]) -> tuple[list[Worker], list[Worker]]:
    """The workers that prefill, and those that decode."""
    prefills = [worker for worker in workers if worker.name.startswith("prefill")]
    return prefills, [worker for worker in workers if worker not in prefills]


async def working(workers: Collection[Worker], how: Callable[[IntegrityReport], bool]) -> tuple[Worker, int]:
    """Waits for the first of them whose report is so; it and the process id of its engine."""
    deadline = time.monotonic() + 10.0
    while True:
        for worker in workers:
            if how(report := await worker.report()):
                return worker, report.engine_pid
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def ended(model: Path, prompt: list[int], answer: Answer, victim: Worker, engine: int) -> None:
    """Checks a request whose first attempt met a frozen engine, and that the worker's processes end."""
    assert answer.last is not None
    assert answer.last.trace.attempts == 2
    greedy_matches(load_reference(model), prompt, answer.token_ids)
    await eventually(lambda: not (is_running(engine) or is_running(victim.front.pid)), 3)


async def run_through(
    loose: Loose, stub: RouterServiceAsyncStub, asked: list[list[int]], max_tokens: int, victim: Worker
) -> list[Answer]:
    """Starts all prompts, kills the victim's engine when it is in the middle of some, awaits the answers."""
    busy = "tokens_decoded" if victim.name.startswith("decode") else "prompt_tokens_run"
    before = getattr(await victim.report(), busy)
    runs = [
        asyncio.create_task(loose.cluster.generate(stub, prompt, max_tokens=max_tokens, **GREEDY))
        for prompt in asked
    ]
    report = await victim.until(lambda report: getattr(report, busy) > before + 100)
    os.kill(report.engine_pid, signal.SIGKILL)
    assert not any(run.done() for run in runs), "it died too late"
    answers = await asyncio.gather(*runs)
    await eventually(lambda: not (is_running(report.engine_pid) or is_running(report.front_pid)), 3)
    return answers


def all_right(model: Path, asked: list[list[int]], answers: list[Answer], max_tokens: int) -> None:
    reference = load_reference(model)
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == max_tokens
        greedy_matches(reference, prompt, answer.token_ids)


def attempts(answers: list[Answer]) -> list[int]:
    return sorted(answer.last.trace.attempts for answer in answers if answer.last is not None)


# Engines that die under load: test_soak.py; sequences that go on elsewhere: test_detection.py.
@pytest.mark.slow
async def test_one_of_two_engines_of_each_role_dies(model: Path, loose: Loose) -> None:
    """First one that decodes: its sequences go on at the next number, and clients see one stream without gap
    or repeat. Then one that computes prompts, which run again."""
    long, short = prompts(700, 6), prompts(40, 8)
    first, prefill, second, decode = loose.workers.values()
    await started_anew(loose, (second, decode))
    logged = len(loose.cluster.log.read_text())
    async with loose.cluster.stub() as stub:
        of_decode = await run_through(loose, stub, short, 300, second)
        await all_free((first, prefill, decode), 3.0)
        more = await run_more(loose, stub)
        of_prefill = await run_through(loose, stub, long, 20, first)
        await all_free((prefill, decode), 3.0)
        of_prefill += await run_more(loose, stub)
    log = loose.cluster.log.read_text()[logged:]
    all_right(model, [*long, *prompts(20, 8)], of_prefill, 20)
    assert attempts(of_prefill)[0] == 1
    assert attempts(of_prefill)[-1] == 2
    assert first.name not in {answer.last.trace.prefill_worker for answer in of_prefill[-8:] if answer.last}
    # Its front reported that, so the router did not wait for its token stream to come back.
    assert "this start of the worker has ended" in log
    assert "its token stream stayed away" not in log
    all_right(model, short, of_decode, 300)
    all_right(model, prompts(20, 8), more, 20)
    assert attempts(of_decode) == [1, 1, 1, 1, 2, 2, 2, 2]


async def started_anew(loose: Loose, workers: Collection[Worker]) -> None:
    """Ends these workers and starts all that have ended: what the router has learned of their rates, by which
    it may prefer one, is gone."""
    for worker in workers:
        worker.front.terminate()
    await eventually(lambda: all(worker.front.poll() is not None for worker in workers), 10)
    await all_started_again(loose)


async def run_more(loose: Loose, stub: RouterServiceAsyncStub) -> list[Answer]:
    """A full batch, at once: the router has forgotten what the dead one promised."""
    runs = [loose.cluster.generate(stub, prompt, max_tokens=20, **GREEDY) for prompt in prompts(20, 8)]
    return await asyncio.gather(*runs)
