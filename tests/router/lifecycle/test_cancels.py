"""Cancels are repeated until the worker has answered, and claims are released only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import structlog.testing

from baton.v1.decode_pb2 import CancelRequest, CancelResponse
from baton.v1.types_pb2 import Attempt
from services.router.lifecycle import cancels as module
from services.router.lifecycle.cancels import Cancels
from services.router.placement.claim import Claim
from services.router.workers.worker import Worker
from tests.router.conftest import until
from tests.router.workers.bare_workers import bare_worker

REQUEST = bytes(range(16))
ATTEMPT = Attempt(request_id=REQUEST, number=3)


def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), None, None)


class Decode:
    """A worker's side: fails with these codes one after the other, then answers, but `hangs` does neither."""

    def __init__(self, *codes: grpc.StatusCode, hangs: bool = False) -> None:
        self._codes, self._hangs = list(codes), hangs
        self.asked: list[tuple[CancelRequest, float]] = []

    async def Cancel(self, request: CancelRequest, timeout: float) -> CancelResponse:  # noqa: N802 (gRPC's name)
        self.asked.append((request, timeout))
        if self._hangs:
            await asyncio.Event().wait()
        if self._codes:
            raise failed(self._codes.pop(0))
        return CancelResponse()


def worker_of(decode: Decode, router_id: bytes = b"r") -> Worker:
    worker = bare_worker("decode-0")
    worker.peer = cast(Any, SimpleNamespace(decode=decode))
    worker.router_id = router_id
    return worker


def claim_of(worker: Worker) -> Claim:
    return Claim(bare_worker("prefill-0"), worker, 5, 6)


def patched(monkeypatch: pytest.MonkeyPatch, **of_asyncio: Any) -> None:
    """Replaces functions that the module takes from asyncio."""
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), **of_asyncio}))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between cancels, none of which is waited for."""
    begun: list[float] = []
    sleep = asyncio.sleep

    async def fake(seconds: float) -> None:
        begun.append(seconds)
        await sleep(0)

    patched(monkeypatch, sleep=fake)
    return begun


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Callable[[], None]]]:
    """Collects scheduled calls with their delays; a test makes them when it wants."""
    calls: list[tuple[float, Callable[[], None]]] = []

    def call_later(delay: float, function: Callable[..., None], *arguments: object) -> None:
        calls.append((delay, partial(function, *arguments)))

    patched(monkeypatch, get_running_loop=lambda: SimpleNamespace(call_later=call_later))
    return calls


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_a_cancel_that_did_not_reach_the_worker_is_repeated_with_longer_pauses(
    code: grpc.StatusCode, pauses: list[float]
) -> None:
    decode, cancels = Decode(*[code] * 6), Cancels()
    worker = worker_of(decode)
    cancels.send(claim_of(worker), ATTEMPT)
    assert (cancels.sent, cancels.orphans, cancels.pending, worker.claimed_slots) == (1, 0, 1, 1)
    await until(lambda: cancels.pending == 0)
    assert worker.claimed_slots == 0
    assert decode.asked == [(CancelRequest(attempt=ATTEMPT), 1.0)] * 7
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert cancels.unanswered == 0
    cancels.send(claim_of(worker), ATTEMPT)
    assert (cancels.sent, cancels.pending) == (2, 1)
    await cancels.drain(5)


async def test_an_answered_cancel_is_not_repeated(pauses: list[float]) -> None:
    decode, cancels = Decode(grpc.StatusCode.NOT_FOUND), Cancels()
    worker = worker_of(decode)
    cancels.send(claim_of(worker), ATTEMPT)
    await until(lambda: cancels.pending == 0)
    assert (len(decode.asked), pauses, worker.claimed_slots) == (1, [], 0)


async def test_a_lost_worker_is_asked_once(pauses: list[float]) -> None:
    decode, cancels = Decode(*[grpc.StatusCode.UNAVAILABLE] * 3), Cancels()
    worker = worker_of(decode)
    worker.lost = True
    cancels.send(claim_of(worker), ATTEMPT)
    await until(lambda: cancels.pending == 0)
    assert (len(decode.asked), pauses, worker.claimed_slots) == (1, [], 0)


async def test_a_cancel_without_any_answer_is_given_up() -> None:
    cancels, worker = Cancels(give_up_s=0.01), worker_of(Decode(hangs=True))
    with structlog.testing.capture_logs() as logs:
        for unanswered in (1, 2):
            cancels.send(claim_of(worker), ATTEMPT)
            await until(lambda: cancels.pending == 0)
            assert (cancels.unanswered, worker.claimed_slots) == (unanswered, 0)
    logged_event = {"event": "cancel_unanswered", "part": "cancels", "log_level": "warning"}
    assert logs == [{**logged_event, "worker": "decode-0", "request": REQUEST.hex()}] * 2


async def test_an_orphan_is_cancelled_once_until_the_cancel_has_taken_effect(
    later: list[tuple[float, Callable[[], None]]],
) -> None:
    decode, cancels = Decode(), Cancels()
    worker = worker_of(decode)
    with structlog.testing.capture_logs() as logs:
        cancels.cancel_orphan(worker, ATTEMPT)
        cancels.cancel_orphan(worker, ATTEMPT)  # its output continues
        assert (cancels.orphans, cancels.sent, cancels.pending) == (1, 1, 1)
        await until(lambda: cancels.pending == 0)
        cancels.cancel_orphan(worker, ATTEMPT)
        assert (cancels.orphans, cancels.sent) == (1, 1)
        ((delay, took_effect),) = later
        assert delay == 1.0
        took_effect()
        cancels.cancel_orphan(worker, ATTEMPT)
        assert (cancels.orphans, cancels.sent) == (2, 2)
        await cancels.drain(5)
    assert decode.asked == [(CancelRequest(attempt=ATTEMPT), 1.0)] * 2
    logged_event = {"event": "orphan_cancelled", "part": "cancels", "log_level": "warning"}
    assert logs == [{**logged_event, "worker": "decode-0", "request": REQUEST.hex()}] * 2


async def test_an_attempt_that_is_cancelled_twice_is_no_orphan_until_both_have_taken_effect(
    later: list[tuple[float, Callable[[], None]]],
) -> None:
    cancels, worker = Cancels(), worker_of(Decode())
    for _ in range(2):
        cancels.send(claim_of(worker), ATTEMPT)
    await until(lambda: cancels.pending == 0)
    for orphans, (_, took_effect) in enumerate(later):
        took_effect()
        cancels.cancel_orphan(worker, ATTEMPT)
        assert cancels.orphans == orphans
    await cancels.drain(5)


async def test_attempts_are_identified_by_worker_request_and_number() -> None:
    decode, cancels = Decode(), Cancels()
    worker, again = worker_of(decode), worker_of(decode, b"another")
    others = [Attempt(request_id=REQUEST, number=4), Attempt(request_id=bytes(16), number=3)]
    for known in (worker, again):
        for attempt in (ATTEMPT, *others):
            cancels.cancel_orphan(known, attempt)
    assert (cancels.orphans, cancels.pending) == (6, 6)
    await cancels.drain(5)
    assert cancels.pending == 0


async def test_a_drain_waits_at_most_its_timeout() -> None:
    cancels = Cancels()
    await cancels.drain(5)  # nothing is under way
    stuck, quick = worker_of(Decode(hangs=True)), worker_of(Decode())
    for worker in (stuck, quick):
        cancels.send(claim_of(worker), ATTEMPT)
    begun = asyncio.get_running_loop().time()
    await cancels.drain(0.02)
    assert asyncio.get_running_loop().time() - begun < 2
    assert cancels.pending == 0
    assert (stuck.claimed_slots, quick.claimed_slots, cancels.unanswered) == (0, 0, 0)
