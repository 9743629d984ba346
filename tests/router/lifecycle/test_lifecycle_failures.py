"""Failed attempts: the requests of the next one, the log lines, and the client's error."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.v1.decode_pb2 import GetHandoffResponse, TicketState
from baton.v1.prefill_pb2 import FirstToken, HandedOff
from baton.v1.router_pb2 import Usage
from baton.v1.types_pb2 import Attempt, Grammar, Sampling
from services.router.lifecycle import attempt
from services.router.placement.claim import PrefillClaim
from services.router.placement.fitting import FailedPair
from services.router.request.request import Echo, Finish
from services.router.text.output_text import OutputText
from tests.router.lifecycle.scripted_router import (
    AWAY,
    BROKEN,
    CANCELLED,
    FIRST,
    KV_BYTES,
    NO_ROOM,
    PLACE,
    PREEMPTED,
    REFUSED,
    STOP,
    ScriptedRouter,
    a_pair,
    attempt_failed,
    ended,
    failure,
    line_of,
    request_of,
    rest_of,
    warned,
)
from tests.router.lifecycle.scripted_workers import REQUEST_ID, Pair, baton_error, quiesced
from tests.support.waiting import until

LOST = "decode-0: it was lost: it is gone"


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> ScriptedRouter:
    return ScriptedRouter(monkeypatch, max_attempts=2)


def has_handoff(pair: Pair, state: TicketState.ValueType) -> None:
    pair.decode_peer.answers["GetHandoff"] = GetHandoffResponse(state=state)


async def test_the_next_attempt_continues_where_the_last_one_ended(router: ScriptedRouter) -> None:
    lost, other = a_pair("0"), a_pair("1")
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            prefill = await router.prefilling(lost)
            prefill.emit(first_token=FIRST)
            prefill.emit(handed_off=HandedOff(exposed_ns=7))
            prefill.end()
            await quiesced()
            lost.output(1, 1, [98])
            lost.decode.lose("it is gone")
            await quiesced()
            asked = router.queue.asked[1]
            assert (asked.entry.position, asked.tokens, asked.max_tokens, asked.fresh) == (PLACE, 5, 6, False)
            await router.place(other)
            (reserve,) = other.decode_peer.calls["Reserve"]
            assert reserve.request.attempt == Attempt(request_id=REQUEST_ID, number=2)
            assert (reserve.request.first_number, reserve.request.token_count) == (2, 5)
            assert list(reserve.request.block_hashes) == [], "the two workers may disagree about a hash"
            await router.promise(other)
            again = await other.prefill_peer.call("Prefill")
            assert list(again.request.token_ids[3:]) == [97, 98]
            again.emit(first_token=FirstToken(number=2, token_id=99))
            again.emit(handed_off=HandedOff(exposed_ns=8))
            again.end()
            await quiesced()
            other.output(2, 3, [100], finish_reason=STOP)
            await quiesced()
            delta = rest_of(outbox)
    assert (delta.text, list(delta.token_ids), delta.finish) == ("abcd", [97, 98, 99, 100], Finish.STOP)
    trace = delta.trace
    assert trace is not None
    assert (trace.prefill_worker, trace.decode_worker, trace.attempts) == ("prefill-1", "decode-1", 2)
    assert (trace.kv_bytes_shipped, trace.handoff_exposed_ns) == (2 * KV_BYTES, 8)
    assert warned(logged) == [attempt_failed(1, LOST)]
    line = ended(logged)
    assert (line["attempts"], line["prefill"], line["decode"]) == (2, "prefill-1", "decode-1")
    assert line["kv_bytes"] == 2 * KV_BYTES
    assert router.observations.failed_attempts == {"unavailable": 1}
    assert router.journal.marked == [(REQUEST_ID, 2)]
    assert len(router.prefixes.hashed) == len(router.queue.arrived) == 1


async def test_the_last_failure_ends_the_request(router: ScriptedRouter) -> None:
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            for number in (0, 1):
                pair = a_pair(str(number))
                has_handoff(pair, TicketState.TICKET_STATE_RESERVED)
                (await router.prefilling(pair)).end(AWAY)
                await quiesced()
            error = failure(outbox)
    message = "gave up after 2 attempts: a worker became unavailable"
    assert (error.kind, str(error), error.tokens_sent) == (ErrorKind.UNAVAILABLE, message, False)
    reasons = ["prefill-0: its words", "prefill-1: its words"]
    assert warned(logged) == [attempt_failed(number, reason) for number, reason in enumerate(reasons, 1)]
    assert ended(logged)["outcome"] == "unavailable"
    assert router.observations.failed_attempts == {"unavailable": 2}


@pytest.mark.parametrize("reported", [0, 1])
async def test_an_error_that_another_attempt_would_meet_again(router: ScriptedRouter, reported: int) -> None:
    """The request is not tried again, whether or not decode has the sequence; its reason is for the log
    alone."""
    pair = a_pair()
    has_handoff(pair, TicketState.TICKET_STATE_ACTIVE)
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            prefill = await router.prefilling(pair)
            if reported:
                prefill.emit(first_token=FIRST)
            prefill.end(BROKEN)
            await quiesced()
            error = failure(outbox)
    assert (error.kind, str(error)) == (ErrorKind.INTERNAL, "a worker failed")
    assert error.tokens_sent is bool(reported)
    failed = {**attempt_failed(1, "prefill-0: its words", "INTERNAL"), "event": "request_failed"}
    del failed["attempt"]
    assert warned(logged) == [failed]
    assert (ended(logged)["outcome"], ended(logged)["completion_tokens"]) == ("internal", reported)
    assert router.observations.failed_attempts == {"internal": 1}
    assert pair.decode_peer.calls["GetHandoff"] == []


async def test_the_reason_of_an_invalid_request_is_for_its_client_alone(router: ScriptedRouter) -> None:
    """The reason may repeat a part of the request: of its grammar, which is all that a worker judges."""
    pair = a_pair()
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of(grammar=Grammar(regex="a"))) as outbox:
            (await router.prefilling(pair)).end(REFUSED)
            await quiesced()
            error = failure(outbox)
    assert (error.kind, str(error)) == (ErrorKind.INVALID, "its words")
    failed = {**attempt_failed(1, "prefill-0: its client has the reason", "INVALID")}
    del failed["attempt"]
    assert warned(logged) == [{**failed, "event": "request_failed"}]
    assert "words" not in str(logged)


async def test_prefill_may_break_once_decode_has_the_sequence(router: ScriptedRouter) -> None:
    pair = a_pair()
    has_handoff(pair, TicketState.TICKET_STATE_ACTIVE)
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            (await router.prefilling(pair)).end(AWAY)
            await quiesced()
            pair.output(1, 0, [97, 98], finish_reason=STOP)
            await quiesced()
            delta = rest_of(outbox)
    assert (delta.text, delta.usage) == ("ab", Usage(prompt_tokens=3, completion_tokens=2))
    assert delta.trace is not None
    assert delta.trace.attempts == 1
    assert warned(logged) == []
    assert len(pair.decode_peer.calls["GetHandoff"]) == 1


async def test_without_the_prompts_logprobs_decode_must_not_continue(router: ScriptedRouter) -> None:
    """The logprobs can come from prefill alone."""
    pair = a_pair()
    has_handoff(pair, TicketState.TICKET_STATE_ACTIVE)
    async with router.running(request_of(echo=Echo("abc"), sampling=Sampling(logprobs=1))) as outbox:
        (await router.prefilling(pair)).end(AWAY)
        await quiesced()
        assert len(router.queue.asked) == 2
        assert pair.decode_peer.calls["GetHandoff"] == []
        assert outbox.take() is None


async def test_a_sequence_that_decode_dropped_is_tried_again(router: ScriptedRouter) -> None:
    pair = a_pair()
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()):
            prefill = await router.prefilling(pair)
            prefill.emit(first_token=FIRST)
            prefill.emit(handed_off=HandedOff())
            prefill.end()
            await quiesced()
            pair.output(1, 1, [], finish_reason=CANCELLED)
            await quiesced()
            assert len(router.queue.asked) == 2
    assert warned(logged) == [attempt_failed(1, "decode dropped the sequence")]


async def test_a_sequence_that_decode_dropped_because_prefill_failed(router: ScriptedRouter) -> None:
    pair = a_pair()
    async with router.running(request_of()) as outbox:
        prefill = await router.prefilling(pair)
        pair.output(1, 0, [], finish_reason=CANCELLED)
        await quiesced()
        prefill.end(BROKEN)
        await quiesced()
        error = failure(outbox)
    assert (error.kind, str(error)) == (ErrorKind.INTERNAL, "a worker failed")


async def test_a_prefill_that_goes_on_after_decode_dropped_its_sequence_is_waited_for_briefly(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "PREFILL_END_S", 0.01)
    pair = a_pair()
    async with router.running(request_of()):
        prefill = await router.prefilling(pair)
        pair.output(1, 0, [], finish_reason=CANCELLED)
        await until(lambda: len(router.queue.asked) == 2)
        assert prefill.cut


async def test_links_that_fail_cost_no_attempt_while_there_are_other_pairs(router: ScriptedRouter) -> None:
    cut = baton_error(BatonError(ErrorKind.UNAVAILABLE, "cut", cause=FailureCause.LINK))
    pairs = [a_pair(str(number)) for number in range(4)]
    failed: list[FailedPair] = []
    async with router.running(request_of()) as outbox:
        for number, pair in enumerate(pairs, 1):
            pair.decode_peer.answers["GetHandoff"] = GetHandoffResponse(
                state=TicketState.TICKET_STATE_RESERVED
            )
            prefill = await router.prefilling(pair)
            if number == 1:
                prefill.emit(first_token=FIRST)
            prefill.end(cut)
            await quiesced()
            failed.append(FailedPair(pair.prefill, pair.decode))
            assert router.queue.elsewhere[-1] == (failed, 3 + 1, 3 + 8)
        # A pair that fails again counts.
        for _ in range(2):
            prefill = await router.prefilling(again := a_pair("0"))
            again.decode_peer.answers["GetHandoff"] = GetHandoffResponse()
            router.queue.asked[-1].entry.failed.append(FailedPair(again.prefill, again.decode))
            prefill.end(cut)
            await quiesced()
        error = failure(outbox)
    assert len(router.queue.elsewhere) == len(pairs)
    assert (error.kind, "gave up after 2 attempts" in str(error)) == (ErrorKind.UNAVAILABLE, True)


async def test_a_prompt_without_output_is_retried(router: ScriptedRouter) -> None:
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of(max_tokens=0, echo=Echo("abc"), sampling=Sampling(logprobs=1))):
            pair = a_pair()
            router.queue.claims.put_nowait(PrefillClaim(pair.prefill, 3))
            (await pair.prefill_peer.call("Prefill")).end(AWAY)
            await quiesced()
            assert [(asked.entry.position, asked.fresh) for asked in router.queue.asked] == [
                (PLACE, True),
                (PLACE, False),
            ]
            assert router.queue.asked[1].entry.failed == [FailedPair(pair.prefill, None)]
    assert warned(logged) == [attempt_failed(1, "prefill-0: its words")]


async def test_a_request_fails_at_its_deadline(router: ScriptedRouter) -> None:
    router.clock.ms = 10
    deadline = asyncio.get_running_loop().time() + 0.02
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of(deadline=deadline)) as outbox:
            await asyncio.sleep(0.05)
            await quiesced()
            error = failure(outbox)
    assert (error.kind, str(error)) == (ErrorKind.DEADLINE, "the request's deadline passed")
    assert ended(logged) == line_of(outcome="deadline", stage="admitted", admission_ms=10.0, e2e_ms=10.0)
    assert router.queue.over == [PLACE]


@pytest.mark.parametrize("sure", [False, True], ids=["reserved-first", "prompt-first"])
async def test_refusals_of_full_workers_do_not_begin_the_wait_again(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, sure: bool
) -> None:
    """A wait whose time is over ends, though a refusal comes at the same time."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    router.queue.timeout_s = 0.0
    pair = a_pair(sure=sure)
    pair.decode_peer.answers["Reserve"] = NO_ROOM
    async with router.running(request_of()) as outbox:
        await router.place(pair)
        error = failure(outbox)
    assert (error.kind, str(error)) == (ErrorKind.OVERLOADED, "no slot became free within 0 s")
    assert len(router.queue.asked) == 1


async def test_the_wait_begins_again_after_an_attempt_that_ran(router: ScriptedRouter) -> None:
    router.queue.timeout_s = 0.0
    async with router.running(request_of()):
        pair = a_pair()
        prefill = await router.prefilling(pair)
        prefill.emit(first_token=FIRST)
        await quiesced()
        pair.output(1, 1, [], finish_reason=PREEMPTED)
        await quiesced()
        assert len(router.queue.asked) == 2


@pytest.mark.parametrize(("left_s", "outcome"), [(0.04, "deadline"), (30.0, "cancelled")])
async def test_a_client_that_cancels_at_its_deadline_has_met_it(
    router: ScriptedRouter, left_s: float, outcome: str
) -> None:
    """The client's clock may be a little ahead of the router's."""
    deadline = asyncio.get_running_loop().time() + left_s
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of(deadline=deadline)):
            pass
        await quiesced()
    assert ended(logged)["outcome"] == outcome


async def test_the_queues_refusal_is_returned_unchanged(router: ScriptedRouter) -> None:
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            router.queue.claims.put_nowait(BatonError(ErrorKind.OVERLOADED, "no slot became free"))
            await quiesced()
            error = failure(outbox)
    assert (error.kind, str(error), error.tokens_sent) == (ErrorKind.OVERLOADED, "no slot became free", False)
    assert warned(logged) == []
    assert ended(logged)["outcome"] == "overloaded"


@pytest.mark.parametrize("where", ["before it is placed", "in its text"])
async def test_an_internal_error_is_logged_with_its_exception(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    fault = ZeroDivisionError("a secret")

    def fails(text: OutputText, token_id: int) -> str:
        raise fault

    if where == "in its text":
        monkeypatch.setattr(OutputText, "push", fails)
    else:
        router.prefixes.error = fault
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            if where == "in its text":
                (await router.prefilling(a_pair())).emit(first_token=FIRST)
                await quiesced()
            error = failure(outbox)
    assert (error.kind, str(error)) == (ErrorKind.INTERNAL, "the router failed: ZeroDivisionError")
    assert warned(logged) == [
        {
            "event": "request_internal_error",
            "part": "dispatch",
            "log_level": "error",
            "request": REQUEST_ID.hex(),
            "exc_info": fault,
        }
    ]
    assert ended(logged)["outcome"] == "internal"
