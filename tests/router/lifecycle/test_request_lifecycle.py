"""A request's lifecycle as its client, trace, metrics and log report it, on a scripted clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from baton.state import JournalRecord
from baton.v1.journal_pb2 import AcceptedRequest
from baton.v1.prefill_pb2 import FirstToken, HandedOff, PromptLogprobs
from baton.v1.router_pb2 import RequestTrace, Usage
from baton.v1.types_pb2 import Attempt, Grammar, Limits, Sampling
from services.router.placement.claim import Claim, PrefillClaim
from services.router.request.request import ClientCall, Delta, Echo, Finish
from services.router.request.slo import Slo
from services.router.tenants.account import TenantAccount
from services.router.tenants.tenants_file import TenantLimits
from tests.router.lifecycle.scripted_router import (
    CANCELLED,
    FIRST,
    HASHES,
    KV_BYTES,
    LENGTH,
    OWN,
    PLACE,
    QUEUE_S,
    REPORTED,
    STOP,
    TICKET,
    QueueCall,
    ScriptedRouter,
    a_pair,
    ended,
    failure,
    line_of,
    request_of,
    rest_of,
    stages,
)
from tests.router.lifecycle.scripted_workers import (
    PROMPT,
    REQUEST_ID,
    quiesced,
)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> ScriptedRouter:
    return ScriptedRouter(monkeypatch)


async def test_deltas_trace_log_line_and_metrics_of_a_request(router: ScriptedRouter) -> None:
    """Decode reserves first; logprobs of output and prompt are asked for; a worker ends the output."""
    pair, clock = a_pair(), router.clock
    request = request_of(sampling=Sampling(seed=9, logprobs=1), echo=Echo("abc", (0, 1, 2)))
    deltas = []
    with structlog.testing.capture_logs() as logged:
        clock.ms = 10
        async with router.running(request) as outbox:
            assert outbox.take() is None
            clock.ms = 20
            await router.place(pair)
            clock.ms = 30
            await router.promise(pair)
            prefill = await pair.prefill_peer.call("Prefill")
            assert (prefill.request.ticket, prefill.request.ticket_follows) == (TICKET, False)
            clock.ms = 40
            prefill.emit(prompt_logprobs=PromptLogprobs(first_position=1, logprobs=[OWN, OWN]))
            prefill.emit(first_token=FirstToken(number=0, token_id=97, cached_tokens=2, logprobs=OWN))
            await quiesced()
            deltas.append(outbox.take())
            clock.ms = 50
            prefill.emit(handed_off=HandedOff(exposed_ns=5))
            prefill.end()
            await quiesced()
            clock.ms = 60
            pair.output(1, 1, [98, 99], logprobs=[OWN, OWN])
            pair.output(1, 1, [98, 99], logprobs=[OWN, OWN])  # received twice, delivered once
            deltas.append(outbox.take())
            clock.ms = 70
            pair.output(1, 3, [100], logprobs=[OWN], finish_reason=STOP)
            clock.ms = 80
            await quiesced()
            deltas.append(outbox.take())
            assert outbox.take() is None
    reached = {"reserved": 30, "prefilling": 30, "first_token": 40, "handed_off": 50, "decoding": 60}
    trace = RequestTrace(
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        attempts=1,
        kv_bytes_shipped=KV_BYTES,
        seed=9,
        stages=stages(admitted=10, **reached, ended=80),
        handoff_exposed_ns=5,
    )
    usage = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)
    assert deltas == [
        Delta(0, [97], "a", [REPORTED], [0], prompt_logprobs=[REPORTED] * 2, opening=True, resumable=True),
        Delta(1, [98, 99], "bc", [REPORTED] * 2, [1, 2], resumable=True),
        Delta(3, [100], "d", [REPORTED], [3], resumable=True, finish=Finish.STOP, usage=usage, trace=trace),
    ]
    assert ended(logged) == line_of(
        outcome="stop",
        completion_tokens=4,
        cached_tokens=2,
        prefill="prefill-0",
        decode="decode-0",
        kv_bytes=KV_BYTES,
        admission_ms=10.0,
        queue_ms=10.0,
        reserve_ms=10.0,
        prefill_ms=10.0,
        handoff_ms=10.0,
        decode_ms=30.0,
        e2e_ms=80.0,
        ttft_ms=40.0,
        tpot_ms=10.0,
    )
    seen = router.observations
    assert (seen.batches, seen.completion_tokens, seen.attempts) == (3, 4, 1)
    assert seen.latencies["itl"].sum == pytest.approx(0.03)
    assert not seen.failed_attempts
    assert router.journal.opened == router.journal.closed == [REQUEST_ID]
    assert router.prefixes.outputs == [("decode-0", [97, 98, 99, 100])]
    assert router.journal.marked == []
    assert pair.claimed == (0, 0, 0)
    assert pair.decode_peer.calls["Cancel"] == []


async def test_the_calls_of_the_waiting_queue(router: ScriptedRouter) -> None:
    pair, request = a_pair(), request_of()
    async with router.running(request):
        (asked,) = router.queue.asked
        now = asyncio.get_running_loop().time()
        assert asked == QueueCall(asked.entry, 3, 8, asked.until, True, asked.cached)
        assert (asked.entry.position, asked.entry.call) == (PLACE, request.call)
        assert now + QUEUE_S - 2 < asked.until <= now + QUEUE_S
        assert asked.cached(pair.decode) == (pair.decode, router.prefixes.prompt)
        assert router.prefixes.sent == []
        await router.place(pair)
        assert sorted(router.prefixes.sent) == [
            ("decode-0", router.prefixes.prompt),
            ("prefill-0", router.prefixes.prompt),
        ]
        (reserve,) = pair.decode_peer.calls["Reserve"]
        assert list(reserve.request.block_hashes) == list(HASHES)
        assert router.queue.over == []
        await router.promise(pair)
        assert router.queue.over == [PLACE]
    assert router.queue.over == [PLACE, PLACE]
    assert router.queue.arrived == [request.call]
    assert router.prefixes.hashed == [PROMPT]


def a_tenants_call() -> ClientCall:
    return ClientCall(tenant=TenantAccount("tenant", TenantLimits(), lambda: 0.0))


async def test_what_another_router_would_need_is_journalled(router: ScriptedRouter) -> None:
    request = request_of(
        call=a_tenants_call(),
        sampling=Sampling(seed=9, logprobs=1),
        stop=("x", "y"),
        skip_special_tokens=False,
        echo=Echo("abc", (0, 1, 2)),
        choice=2,
        grammar=Grammar(regex="a+"),
        min_tokens=3,
    )
    now = asyncio.get_running_loop().time()
    async with router.running(request):
        ((record, left_s),) = router.journal.records
    details = AcceptedRequest.FromString(record.details)
    assert record == JournalRecord(REQUEST_ID, "tenant", PROMPT, details=record.details)
    assert details == AcceptedRequest(
        sampling=Sampling(seed=9, logprobs=1),
        limits=Limits(max_tokens=8, stop_token_ids=(2,), min_tokens=3),
        stop=("x", "y"),
        skip_special_tokens=False,
        echo=True,
        choice=2,
        grammar=Grammar(regex="a+"),
    )
    assert 0 < left_s <= request.deadline - now
    async with router.running(request_of()):
        record, _ = router.journal.records[-1]
    assert record.tenant == ""
    assert AcceptedRequest.FromString(record.details) == AcceptedRequest(
        sampling=Sampling(seed=9),
        limits=Limits(max_tokens=8, stop_token_ids=(2,)),
        skip_special_tokens=True,
        echo=False,
    )


# Fields of a request -> the logprobs and the kind of grammar that it asks of workers.
ASKED: list[tuple[dict[str, Any], int | None, str]] = [
    ({}, None, ""),
    ({"sampling": Sampling(logprobs=0)}, 0, ""),
    ({"sampling": Sampling(logprobs=4), "grammar": Grammar(regex="a+")}, 4, "regex"),
    (
        {
            "max_tokens": 0,
            "grammar": Grammar(regex="a+"),
            "sampling": Sampling(logprobs=1),
            "echo": Echo("abc"),
        },
        1,
        "",
    ),
]


@pytest.mark.parametrize(("fields", "logprobs", "output_format"), ASKED)
async def test_the_queue_knows_what_a_request_asks_of_workers(
    router: ScriptedRouter, fields: dict[str, Any], logprobs: int | None, output_format: str
) -> None:
    slo = Slo(2.0, 0.1)
    request = request_of(call=a_tenants_call(), slo=slo, **fields)
    router.clock.ms = 250
    async with router.running(request):
        entry = router.queue.asked[0].entry
        assert (entry.logprobs, entry.output_format) == (logprobs, output_format)
        assert router.queue.limits == [(slo, 0.25, request.deadline)]
        assert router.prefixes.tenants == ["tenant"] * (request.max_tokens > 0)


async def test_the_trace_says_why_a_prefill_worker_was_chosen(router: ScriptedRouter) -> None:
    pair = a_pair()
    async with router.running(request_of(max_tokens=1)) as outbox:
        claim = Claim(pair.prefill, pair.decode, tokens=3, reserved=11, reason="queue")
        router.queue.claims.put_nowait(claim)
        await router.promise(pair)
        prefill = await pair.prefill_peer.call("Prefill")
        prefill.emit(first_token=FirstToken(number=0, token_id=97, finish_reason=LENGTH))
        prefill.end()
        await quiesced()
        delta = rest_of(outbox)
    assert delta.trace is not None
    assert delta.trace.prefill_reason == "queue"


async def test_a_prompt_without_output_is_computed_no_further_once_its_client_has_left(
    router: ScriptedRouter,
) -> None:
    pair = a_pair()
    request = request_of(max_tokens=0, sampling=Sampling(logprobs=1), echo=Echo("abc", (0, 1, 2)))
    async with router.running(request):
        router.queue.claims.put_nowait(PrefillClaim(pair.prefill, 3))
        prefill = await pair.prefill_peer.call("Prefill")
        assert not prefill.cut
    assert prefill.cut


async def test_the_first_token_may_end_the_output(router: ScriptedRouter) -> None:
    pair = a_pair()
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of(max_tokens=1)) as outbox:
            prefill = await router.prefilling(pair)
            prefill.emit(first_token=FirstToken(number=0, token_id=97, finish_reason=LENGTH))
            prefill.end()
            await quiesced()
            delta = rest_of(outbox)
    assert (delta.text, delta.finish) == ("a", Finish.LENGTH)
    assert delta.usage == Usage(prompt_tokens=3, completion_tokens=1)
    assert delta.trace is not None
    assert (delta.trace.kv_bytes_shipped, delta.trace.handoff_exposed_ns) == (0, 0)
    line = ended(logged)
    assert (line["outcome"], line["cached_tokens"], line["kv_bytes"]) == ("length", 0, 0)
    assert "tpot_ms" not in line
    assert router.prefixes.outputs == []


async def test_decode_may_report_everything_first(router: ScriptedRouter) -> None:
    """Decode's stream overtakes prefill's, which is awaited for the cached tokens."""
    pair = a_pair()
    async with router.running(request_of(max_tokens=2)) as outbox:
        prefill = await router.prefilling(pair)
        router.clock.ms = 25
        pair.output(1, 0, [97, 98], finish_reason=LENGTH)
        await quiesced()
        router.clock.ms = 30
        prefill.emit(first_token=FirstToken(number=0, token_id=97, cached_tokens=1))
        prefill.emit(handed_off=HandedOff(exposed_ns=6))
        prefill.end()
        await quiesced()
        delta = rest_of(outbox)
    assert (delta.text, delta.finish) == ("ab", Finish.LENGTH)
    assert delta.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    assert delta.trace is not None
    assert delta.trace.handoff_exposed_ns == 6
    came = {"first_token": 25, "handed_off": 25, "decoding": 25, "ended": 30}
    assert list(delta.trace.stages)[-4:] == stages(**came)


@pytest.mark.parametrize("messages", [[[98, 99, 100]], [[98], [99, 100]], [[98, 99], [100]]])
async def test_a_stop_string_ends_the_output_and_the_attempt(
    router: ScriptedRouter, messages: list[list[int]]
) -> None:
    """Wherever the messages that have it are divided, and whatever they have behind it."""
    pair = a_pair()
    async with router.running(request_of(stop=("bc",))) as outbox:
        prefill = await router.prefilling(pair)
        prefill.emit(first_token=FIRST)
        prefill.emit(handed_off=HandedOff(exposed_ns=6))
        prefill.end()
        await quiesced()
        number = 1
        for message in messages:
            pair.output(1, number, message)
            number += len(message)
        await quiesced()
        delta = rest_of(outbox)
        (cancel,) = pair.decode_peer.calls["Cancel"]
        assert cancel.request.attempt == Attempt(request_id=REQUEST_ID, number=1)
    assert (delta.text, list(delta.token_ids), delta.finish) == ("a", [97, 98, 99], Finish.STOP)
    assert delta.usage == Usage(prompt_tokens=3, completion_tokens=3)
    assert pair.claimed == (0, 0, 0)
    assert router.prefixes.outputs == [("decode-0", [97, 98, 99, 100])]


@pytest.mark.parametrize(("stop", "text", "finish"), [((), "a", Finish.LENGTH), (("a",), "", Finish.STOP)])
async def test_a_released_ticket_waits_for_the_token_that_released_it(
    router: ScriptedRouter, stop: tuple[str, ...], text: str, finish: Finish
) -> None:
    """Decode reports the release, as a cancel, before prefill reports the token."""
    pair = a_pair()
    async with router.running(request_of(max_tokens=1, stop=stop)) as outbox:
        prefill = await router.prefilling(pair)
        pair.output(1, 0, [], finish_reason=CANCELLED)
        await quiesced()
        prefill.emit(first_token=FirstToken(number=0, token_id=97, finish_reason=LENGTH))
        prefill.end()
        await quiesced()
        delta = rest_of(outbox)
    assert (delta.text, delta.finish) == (text, finish)
    assert delta.trace is not None
    assert delta.trace.attempts == 1
    assert pair.decode_peer.calls["Cancel"] == []


@pytest.mark.parametrize("logprobs", [True, False])
async def test_a_prompt_without_output(router: ScriptedRouter, logprobs: bool) -> None:
    """The prompt goes to prefill alone where it asks for logprobs, otherwise to no worker."""
    pair = a_pair()
    sampling = Sampling(logprobs=1) if logprobs else Sampling()
    request = request_of(max_tokens=0, echo=Echo("abc"), sampling=sampling)
    with structlog.testing.capture_logs() as logged:
        router.clock.ms = 10
        async with router.running(request) as outbox:
            router.clock.ms = 20
            if logprobs:
                (asked,) = router.queue.asked
                assert asked == QueueCall(asked.entry, 3, None, asked.until, True)
                assert (asked.entry.position, asked.entry.call) == (PLACE, request.call)
                left = asked.until - asyncio.get_running_loop().time()
                assert QUEUE_S - 2 < left <= QUEUE_S
                claim = PrefillClaim(pair.prefill, 3)
                router.queue.claims.put_nowait(claim)
                prefill = await pair.prefill_peer.call("Prefill")
                assert prefill.request.attempt == Attempt(request_id=REQUEST_ID, number=1)
                assert not prefill.request.ticket_follows
                router.clock.ms = 30
                prefill.emit(prompt_logprobs=PromptLogprobs(first_position=1, logprobs=[OWN, OWN]))
                prefill.end()
                await quiesced()
            delta = rest_of(outbox)
    assert delta.prompt_logprobs == [REPORTED] * 2 * logprobs
    assert (delta.text, delta.finish) == ("", Finish.LENGTH)
    assert delta.usage == Usage(prompt_tokens=3)
    reached = stages(admitted=10, prefilling=20, ended=30) if logprobs else stages(admitted=10, ended=10)
    name = "prefill-0" if logprobs else ""
    assert delta.trace == RequestTrace(prefill_worker=name, attempts=int(logprobs), stages=reached)
    times = {"admission_ms": 10.0, "e2e_ms": 30.0 if logprobs else 10.0}
    attempts = int(logprobs)
    assert ended(logged) == line_of(outcome="length", prefill=name, attempts=attempts, **times)
    assert router.queue.over == [PLACE] * logprobs
    assert router.queue.arrived == [request.call] * logprobs


async def test_a_client_that_leaves_ends_the_attempt(router: ScriptedRouter) -> None:
    pair = a_pair()
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()):
            prefill = await router.prefilling(pair)
    await quiesced()
    assert prefill.cut
    assert len(pair.decode_peer.calls["Cancel"]) == 1
    assert (ended(logged)["outcome"], ended(logged)["stage"]) == ("cancelled", "prefilling")
    assert router.journal.closed == [REQUEST_ID]


async def test_a_router_that_stops_fails_running_requests(router: ScriptedRouter) -> None:
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            await router.dispatcher.drain(0)
            error = failure(outbox)
    assert (error.kind.name, str(error)) == ("UNAVAILABLE", "the request was cancelled")
    assert ended(logged)["outcome"] == "cancelled"
