"""A worker freezes or dies in the middle of it: requests go on elsewhere, or end in time and say why."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from services.common.config import Role
from tests.e2e.cluster import MODEL, Answer, alive, eventually, leaks
from tests.e2e.workers import Loose, Worker, loose_workers
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

ENGINE = {"dtype": "float64", "chunk_tokens": 16, "slots": 8}
TRANSFER = {"piece_bytes": 4096, "window_pieces": 4}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# Two prompts, since what decode has of one it is not sent.
LONG, OTHER = ([(number * 7 + salt) % VOCAB_SIZE for number in range(1500)] for salt in (0, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=8)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Loose]:
    """For those whose workers live on."""
    with loose_workers(model, "prefill", "decode", engine=ENGINE, transfer=TRANSFER) as loose:
        yield loose


def prompts(length: int, count: int) -> list[list[int]]:
    return [[(3 * number + 11 * salt) % VOCAB_SIZE for number in range(length)] for salt in range(count)]


async def all_free(workers: Collection[Worker], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while found := {worker.name: held for worker in workers if (held := leaks(await worker.audit()))}:
        assert time.monotonic() < deadline, f"still held after {within_s} s: {found}"
        await asyncio.sleep(0.05)


async def test_a_prefill_engine_that_freezes_in_a_handoff(model: Path, pair: Loose) -> None:
    """The request fails in its deadline; decode is free within a second; the thawed engine cleans up too."""
    prefill, decode = pair.workers.values()
    frozen = (await prefill.audit()).engine_pid
    async with pair.cluster.stub() as stub:
        request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=LONG), max_tokens=5, **GREEDY)
        call = stub.Generate(request, timeout=3)
        began = time.monotonic()
        reading = asyncio.create_task(call.read())
        await decode.until(lambda audit: any(link.live_transfers for link in audit.links))
        os.kill(frozen, signal.SIGSTOP)
        try:
            held = await decode.audit()
            assert held.live_tickets == 1
            assert held.handoffs_committed == 0, "it froze too late"
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await reading
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - began < 4
            await decode.until(lambda audit: not audit.live_tickets, 1.0)
            freed = (await decode.audit()).load
            assert (freed.free_slots, freed.free_blocks) == (freed.slots, freed.blocks)
            # It is stopped: its link breaks. It has the window mapped, and may write on when it wakes:
            # nobody gets that until it has said that it has unmapped it.
            await decode.until(
                lambda audit: (
                    bool(audit.links)
                    and all(link.quarantined_pieces == link.window_pieces for link in audit.links)
                ),
                3.0,
            )
        finally:
            os.kill(frozen, signal.SIGCONT)
        await serves_on(model, pair, stub, LONG)


async def test_a_decode_engine_that_freezes_in_a_handoff(model: Path, pair: Loose) -> None:
    """Its sender has all back within 3 s."""
    prefill, decode = pair.workers.values()
    frozen, before = (await decode.audit()).engine_pid, await prefill.audit()
    async with pair.cluster.stub() as stub:
        request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=OTHER), max_tokens=5, **GREEDY)
        reading = asyncio.create_task(_to_its_end(stub.Generate(request, timeout=4)))
        await prefill.until(lambda audit: audit.bytes_shipped > before.bytes_shipped)
        os.kill(frozen, signal.SIGSTOP)
        try:
            held = await prefill.audit()
            assert any(link.live_transfers for link in held.links), "it froze too late"
            freed = await prefill.until(lambda audit: not (audit.pinned_blocks or audit.links), 3.0)
            assert freed.links_broken == before.links_broken + 1
            with pytest.raises(grpc.aio.AioRpcError):
                await reading
        finally:
            os.kill(frozen, signal.SIGCONT)
        await serves_on(model, pair, stub, OTHER)


async def serves_on(model: Path, pair: Loose, stub: RouterServiceAsyncStub, prompt: list[int]) -> None:
    """Nothing is held; the same prompt is answered, and nothing is held again."""
    await all_free(pair.workers.values(), 5.0)
    answer = await pair.cluster.generate(stub, prompt, max_tokens=5, **GREEDY)
    await all_free(pair.workers.values(), 1.0)
    greedy_matches(load_reference(model), prompt, answer.token_ids)


async def _to_its_end(call: AsyncIterable[GenerateResponse]) -> None:
    async for _ in call:
        pass


async def run_through(
    loose: Loose, stub: RouterServiceAsyncStub, asked: list[list[int]], max_tokens: int, victim: Worker
) -> list[Answer]:
    """Starts all prompts, kills the victim's engine when it is in the middle of some, awaits the answers."""
    busy = "tokens_decoded" if victim.name.startswith("decode") else "prompt_tokens_run"
    before = getattr(await victim.audit(), busy)
    runs = [
        asyncio.create_task(loose.cluster.generate(stub, prompt, max_tokens=max_tokens, **GREEDY))
        for prompt in asked
    ]
    audit = await victim.until(lambda audit: getattr(audit, busy) > before + 100)
    os.kill(audit.engine_pid, signal.SIGKILL)
    assert not any(run.done() for run in runs), "it died too late"
    answers = await asyncio.gather(*runs)
    await eventually(lambda: not (alive(audit.engine_pid) or alive(audit.front_pid)), 3)
    return answers


def all_right(model: Path, asked: list[list[int]], answers: list[Answer], max_tokens: int) -> None:
    reference = load_reference(model)
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == max_tokens
        greedy_matches(reference, prompt, answer.token_ids)


def attempts(answers: list[Answer]) -> list[int]:
    return sorted(answer.last.trace.attempts for answer in answers if answer.last is not None)


async def test_one_of_two_engines_of_each_role_dies(model: Path) -> None:
    """First one that computes prompts, which run again. Then one that decodes: its sequences go on at the
    next number, and clients see one stream without gap or repeat."""
    roles: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
    long, short = prompts(700, 6), prompts(40, 8)
    with loose_workers(model, *roles, engine=ENGINE, transfer=TRANSFER) as loose:
        first, prefill, second, decode = loose.workers.values()
        async with loose.cluster.stub() as stub:
            of_prefill = await run_through(loose, stub, long, 20, first)
            await all_free((prefill, second, decode), 3.0)
            of_prefill += await run_more(loose, stub)
            of_decode = await run_through(loose, stub, short, 300, second)
            await all_free((prefill, decode), 3.0)
            more = await run_more(loose, stub)
        log = loose.cluster.log.read_text()
    all_right(model, [*long, *prompts(20, 8)], of_prefill, 20)
    assert attempts(of_prefill)[0] == 1
    assert attempts(of_prefill)[-1] == 2
    assert first.name not in {answer.last.trace.prefill_worker for answer in of_prefill[-8:] if answer.last}
    # Its front said so: nobody waited whether its tokens come again.
    assert "this start of the worker is over" in log
    assert "its token stream stayed away" not in log
    all_right(model, short, of_decode, 300)
    all_right(model, prompts(20, 8), more, 20)
    assert attempts(of_decode) == [1, 1, 1, 1, 2, 2, 2, 2]


async def run_more(loose: Loose, stub: RouterServiceAsyncStub) -> list[Answer]:
    """A full batch, at once: the router has forgotten what the dead one promised."""
    runs = [loose.cluster.generate(stub, prompt, max_tokens=20, **GREEDY) for prompt in prompts(20, 8)]
    return await asyncio.gather(*runs)
