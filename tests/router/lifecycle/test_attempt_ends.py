"""Ends of prefill's call, how long it is awaited, and what is released when an attempt ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
import structlog

from baton.base.errors import ErrorKind
from baton.v1.prefill_pb2 import (
    FirstToken,
    HandedOff,
    PromptLogprobs,
)
from baton.v1.types_pb2 import FinishReason, Sampling
from services.router.lifecycle import attempt_calls
from services.router.request.request import Echo
from tests.router.lifecycle.scripted_attempt import ATTEMPT, FREE, NEXT, Scene
from tests.router.lifecycle.scripted_workers import (
    REQUEST_ID,
    logprobs_message,
    quiesced,
    rpc_error,
)


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


async def test_prefills_reports_reach_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, echo=Echo(""), sampling=Sampling(logprobs=1))
    call = await scene.prefilling()
    own = logprobs_message(-1)
    call.emit(prompt_logprobs=PromptLogprobs(first_position=1, logprobs=[own, own]))
    call.emit(first_token=FirstToken(number=2, token_id=12, logprobs=own))
    await quiesced()
    assert scene.output.prompt_complete
    assert (scene.output.emitted, scene.output.error) == ([10, 11, 12], None)
    delta = scene.outbox.take()
    assert delta is not None
    assert (delta.token_ids, delta.logprobs) == ([12], [own.SerializeToString()])
    assert scene.pair.claimed == (1, 11, 0), "prefill has computed the prompt"
    handed_off = HandedOff(transport="fake", exposed_ns=5)
    call.emit(handed_off=handed_off)
    call.end()
    await quiesced()
    assert scene.calls.prefill.handed_off == handed_off
    assert scene.error is None
    assert not call.cut


EARLY = (ErrorKind.INTERNAL, "prefill-0: prefill ended early")
ENDED = FirstToken(number=2, token_id=12, finish_reason=FinishReason.FINISH_REASON_STOP)
# What prefill reports before its stream ends -> the resulting error.
ENDINGS: list[tuple[list[dict[str, Any]], Any]] = [
    ([], EARLY),
    ([{"first_token": NEXT}], EARLY),
    ([{"first_token": ENDED}], None),
    ([{"first_token": NEXT}, {"handed_off": HandedOff()}], None),
]


@pytest.mark.parametrize(("reported", "error"), ENDINGS)
async def test_prefills_stream_ends(scene: Scene, reported: list[dict[str, Any]], error: Any) -> None:
    call = await scene.prefilling()
    for response in reported:
        call.emit(**response)
    call.end()
    await asyncio.gather(scene.calls.prefill.wait(2), scene.output.changed())
    assert scene.error == error
    assert scene.pair.claimed == (1, 11, 0)


async def test_prefills_stream_ends_without_the_prompts_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, echo=Echo(""), sampling=Sampling(logprobs=1))
    call = await scene.prefilling()
    call.emit(handed_off=HandedOff())
    call.end()
    await scene.calls.prefill.wait(2)
    assert scene.error == EARLY


# How prefill's call fails -> kind, whether it is reachable still, whether it is asked for work still.
BREAKS = [
    (grpc.StatusCode.UNAVAILABLE, ErrorKind.UNAVAILABLE, False, False),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorKind.OVERLOADED, True, False),
    (grpc.StatusCode.INTERNAL, ErrorKind.INTERNAL, True, True),
]


@pytest.mark.parametrize(("code", "kind", "reachable", "accepts_work"), BREAKS)
async def test_prefills_call_fails(
    scene: Scene, code: grpc.StatusCode, kind: ErrorKind, reachable: bool, accepts_work: bool
) -> None:
    call = await scene.prefilling()
    call.end(rpc_error(code, "its words"))
    await scene.output.changed()
    assert scene.error == (kind, "prefill-0: its words")
    assert (scene.pair.prefill.reachable, scene.pair.prefill.accepts_work) == (reachable, accepts_work)
    assert scene.pair.claimed == (1, 11, 0)


async def test_an_internal_error_is_logged_and_fails_the_call(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(attempt: int, first: FirstToken) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(scene.output, "accept_first_token", fails)
    with structlog.testing.capture_logs() as logged:
        call = await scene.prefilling()
        call.emit(first_token=NEXT)
        await scene.output.changed()
    assert scene.error == (ErrorKind.INTERNAL, "the router failed: ZeroDivisionError")
    assert logged == [
        {
            "event": "prefill_reader_failed",
            "part": "attempt",
            "worker": "prefill-0",
            "exc_info": True,
            "log_level": "error",
        }
    ]
    assert call.cut


async def test_waiting_for_prefills_end_has_a_timeout(scene: Scene) -> None:
    call = await scene.prefilling()
    scene.thaw()
    async with asyncio.timeout(5):
        await scene.calls.prefill.wait(0.01)
    assert scene.error is None
    asyncio.get_running_loop().call_later(0.01, call.end)
    await scene.calls.prefill.wait(5)
    assert scene.error == EARLY
    await scene.calls.prefill.wait(5)


# Seconds left of the request -> how long prefill is waited for.
WAITS = [(60.0, 0.5), (0.8, 0.4), (0.2, 0.1)]


@pytest.mark.parametrize(("left_s", "waits_s"), WAITS)
async def test_prefill_is_awaited_for_the_cached_tokens(
    monkeypatch: pytest.MonkeyPatch, left_s: float, waits_s: float
) -> None:
    scene = Scene(monkeypatch, left_s=left_s)
    waits: list[float] = []

    async def wait(timeout_s: float) -> None:
        waits.append(timeout_s)

    monkeypatch.setattr(scene.calls.prefill, "wait", wait)
    await scene.calls.wait_for_cached_tokens()
    assert waits == [pytest.approx(waits_s, abs=1e-6)]
    scene.output.cached_tokens = 0
    await scene.calls.wait_for_cached_tokens()
    assert len(waits) == 1


@pytest.mark.parametrize("prefilling", [True, False])
async def test_an_abandoned_attempt_is_cancelled_once(scene: Scene, prefilling: bool) -> None:
    call = await scene.prefilling() if prefilling else None
    answers = scene.pair.decode_peer.answers
    answers.pop("Cancel")
    scene.pair.decode.outputs[REQUEST_ID] = scene.output
    scene.calls.abandon()
    scene.calls.abandon()
    await quiesced()
    assert call is None or call.cut
    (cancel,) = scene.pair.decode_peer.calls["Cancel"]
    assert cancel.request.attempt == ATTEMPT
    assert scene.pair.claimed == (1, 11, 0), "decode holds the slot until it answers"
    assert scene.pair.decode.outputs == {}
    cancel.answer(None)
    await quiesced()
    assert scene.pair.claimed == FREE


async def test_an_attempt_that_decode_has_ended_is_not_cancelled(scene: Scene) -> None:
    scene.calls.finish()
    scene.calls.abandon()
    await quiesced()
    assert scene.pair.decode_peer.calls["Cancel"] == []
    assert scene.pair.claimed == FREE


@pytest.mark.parametrize(("followed", "handed_off"), [(True, False), (False, True), (True, True)])
async def test_prefills_call_may_end_once_decode_has_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, followed: bool, handed_off: bool
) -> None:
    call = await scene.prefilling()
    scene.thaw()
    monkeypatch.setattr(attempt_calls, "TAIL_S", 0.1)
    scene.output.decode_started = followed
    if handed_off:
        call.emit(handed_off=HandedOff())
        await quiesced()
    scene.calls.finish()
    await quiesced()
    assert not call.cut
    deadline = time.monotonic() + 5.0
    while not call.cut:
        assert time.monotonic() < deadline, "it did not end by itself"
        await asyncio.sleep(0.01)


async def test_a_prefill_call_that_has_ended_is_not_cancelled(scene: Scene) -> None:
    call = await scene.prefilling()
    call.end()
    await quiesced()
    scene.calls.abandon()
    assert not call.cut
