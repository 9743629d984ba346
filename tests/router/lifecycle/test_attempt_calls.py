"""The calls of one attempt: their requests, and what their failures mean."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.model_spec.block_hash import MAX_RESERVE_HASHES
from baton.v1.decode_pb2 import (
    AttachRequest,
    AttachResponse,
    GetHandoffRequest,
    GetHandoffResponse,
    ReserveRequest,
    ReserveResponse,
    TicketState,
)
from baton.v1.prefill_pb2 import (
    PrefillRequest,
    ProvideTicketRequest,
    ProvideTicketResponse,
)
from baton.v1.router_pb2 import TokenIds
from baton.v1.types_pb2 import Grammar, Limits, Sampling
from services.common.observability.tracing.context import TraceContext
from services.grammar import channel_process, compiler, process_client
from services.router.lifecycle import attempt_calls, prefill_call
from services.router.lifecycle.attempt_calls import AttemptCalls
from services.router.lifecycle.cancels import Cancels
from services.router.placement.claim import Claim
from services.router.request.call_trace import CallTrace
from services.router.request.request import ClientCall, Echo
from services.router.request.slo import Slo
from services.router.tenants.account import TenantAccount
from services.router.tenants.tenants_file import TenantLimits
from services.router.workers.worker_error import WorkerError, client_error
from tests.router.lifecycle.scripted_attempt import ATTEMPT, CLAIMED, EMITTED, FREE, NEXT, TICKET, Scene
from tests.router.lifecycle.scripted_workers import (
    PROMPT,
    REQUEST_ID,
    baton_error,
    quiesced,
    rpc_error,
)


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


async def test_initial_state(scene: Scene) -> None:
    assert (scene.calls.prefill.error, scene.calls.prefill.handed_off, scene.calls.kv_bytes_shipped) == (
        None,
        None,
        0,
    )
    scene.output.decode_started = True
    assert scene.calls.kv_bytes_shipped == 0, "none are known of"
    await scene.calls.prefill.wait(2)
    assert scene.pair.claimed == CLAIMED


async def test_the_reserve_request(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(number.to_bytes(4, "big") for number in range(MAX_RESERVE_HASHES + 3))
    scene = Scene(monkeypatch, names)
    # If the prompt was sent ahead of its ticket, the first token may be there already.
    scene.output.accept_first_token(3, NEXT)
    scene.pair.decode_peer.answers["Reserve"] = ReserveResponse(ticket=TICKET, kv_bytes=640)
    assert not scene.output.reserved
    assert await scene.calls.reserve() == TICKET
    (call,) = scene.pair.decode_peer.calls["Reserve"]
    assert call.request == ReserveRequest(
        attempt=ATTEMPT,
        router_id=scene.pair.decode.router_id,
        token_count=len(PROMPT) + 2,
        first_number=2,
        max_tokens=8,
        ttl_ms=60_000,
        block_hashes=names[:MAX_RESERVE_HASHES],
    )
    assert call.timeout == attempt_calls.RESERVE_S
    assert scene.pair.decode.outputs == {REQUEST_ID: scene.output}
    assert scene.output.reserved is True
    assert scene.calls.kv_bytes_shipped == 0
    scene.output.decode_started = True
    assert scene.calls.kv_bytes_shipped == 640


def a_sampled_call() -> ClientCall:
    """A call of a tenant, whose trace is recorded."""
    account = TenantAccount("tenant", TenantLimits(), lambda: 0.0)
    context = TraceContext(bytes(range(1, 17)), bytes(range(1, 9)), sampled=True, state="a=b")
    return ClientCall(tenant=account, trace=CallTrace(context, None))


async def test_both_requests_name_tenant_trace_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_sampled_call()
    assert call.trace is not None
    clock = SimpleNamespace(monotonic_ns=lambda: 3_250_000_000)
    monkeypatch.setattr(prefill_call, "time", clock)
    scene = Scene(
        monkeypatch, call=call, slo=Slo(2.5, 0.125), grammar=Grammar(regex="a+"), arrived_ns=1_250_000_000
    )
    scene.output.emitted.clear()
    scene.pair.decode_peer.answers["Reserve"] = ReserveResponse(ticket=TICKET)
    await scene.calls.reserve()
    (reserve,) = scene.pair.decode_peer.calls["Reserve"]
    assert (reserve.request.tenant, reserve.request.tpot_slo_s) == ("tenant", 0.125)
    assert reserve.request.own_prefill is False
    assert reserve.request.trace == call.trace.context.message()
    scene.calls.prefill.start(TICKET)
    (prefill,) = scene.pair.prefill_peer.calls["Prefill"]
    assert (prefill.request.tenant, prefill.request.grammar) == ("tenant", Grammar(regex="a+"))
    assert prefill.request.first_token_in_s == 0.5
    assert prefill.request.trace == call.trace.stage_context(REQUEST_ID, "prefill").message()


@pytest.mark.parametrize("sampled", [None, False], ids=["no trace", "not sampled"])
async def test_a_call_whose_trace_is_not_recorded_sends_none(
    monkeypatch: pytest.MonkeyPatch, sampled: bool | None
) -> None:
    trace = None if sampled is None else CallTrace(TraceContext(bytes(16), bytes(8), sampled), None)
    scene = Scene(monkeypatch, call=ClientCall(trace=trace))
    scene.pair.decode_peer.answers["Reserve"] = ReserveResponse(ticket=TICKET)
    await scene.calls.reserve()
    scene.calls.prefill.start(TICKET)
    for requests in (scene.pair.decode_peer.calls["Reserve"], scene.pair.prefill_peer.calls["Prefill"]):
        assert not requests[0].request.HasField("trace")


async def test_a_worker_that_computes_the_prompt_itself_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.pair.decode_peer.answers["Reserve"] = ReserveResponse(ticket=TICKET)
    claim = Claim(scene.pair.decode, scene.pair.decode, tokens=3, reserved=11)
    await AttemptCalls(scene.request, scene.output, claim, Cancels()).reserve()
    (call,) = scene.pair.decode_peer.calls["Reserve"]
    assert call.request.own_prefill is True


# TTFT limit, seconds since the arrival, tokens that are there -> seconds until the first one is due.
DUE = [
    (None, 0, False, 0.0),
    (Slo(None, 0.5), 0, False, 0.0),
    (Slo(1.5), 0.75, False, 0.75),
    (Slo(0.125), 0.0625, False, 0.0625),
    (Slo(1.5), 1.75, False, 0.0),
    (Slo(1.5), 0.75, True, 0.0),
]


@pytest.mark.parametrize(("slo", "waited_s", "emitted", "due_s"), DUE)
async def test_prefill_is_told_when_the_first_token_is_due(
    monkeypatch: pytest.MonkeyPatch, slo: Slo | None, waited_s: float, emitted: bool, due_s: float
) -> None:
    arrived_ns = 5_000_000_000
    clock = SimpleNamespace(monotonic_ns=lambda: arrived_ns + int(waited_s * 1e9))
    monkeypatch.setattr(prefill_call, "time", clock)
    scene = Scene(monkeypatch, slo=slo, arrived_ns=arrived_ns)
    if not emitted:
        scene.output.emitted.clear()
    scene.calls.prefill.start(TICKET)
    (call,) = scene.pair.prefill_peer.calls["Prefill"]
    assert call.request.first_token_in_s == due_s


@pytest.mark.parametrize(("most", "guided"), [(0, False), (1, True)])
async def test_prefill_draws_by_the_grammar_where_there_is_an_output(
    monkeypatch: pytest.MonkeyPatch, most: int, guided: bool
) -> None:
    scene = Scene(monkeypatch, grammar=Grammar(regex="a+"), max_tokens=most)
    scene.calls.prefill.start(TICKET)
    (call,) = scene.pair.prefill_peer.calls["Prefill"]
    assert call.request.HasField("grammar") is guided


async def test_a_prefill_worker_that_has_no_room_for_the_ticket_is_left_alone_for_a_while(
    scene: Scene,
) -> None:
    await scene.prefilling()
    full = rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many tickets")
    scene.pair.prefill_peer.answers["ProvideTicket"] = full
    with pytest.raises(WorkerError) as caught:
        await scene.calls.provide_ticket(TICKET)
    reason = "prefill-0: ProvideTicket: too many tickets"
    assert (caught.value.kind, str(caught.value)) == (ErrorKind.OVERLOADED, reason)
    assert client_error(caught.value).message == "the workers have no room"
    assert not scene.pair.prefill.accepts_work


async def test_a_reservation_has_the_prediction_and_the_most_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, prediction=TokenIds(ids=[7, 8]), max_draft_tokens=0)
    scene.pair.decode_peer.answers["Reserve"] = ReserveResponse(ticket=TICKET)
    await scene.calls.reserve()
    (call,) = scene.pair.decode_peer.calls["Reserve"]
    assert list(call.request.prediction_token_ids) == [7, 8]
    assert call.request.HasField("max_draft_tokens")
    assert call.request.max_draft_tokens == 0
    assert not call.request.counts_in_every_message


async def test_a_reservation_says_that_a_stop_string_may_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, stop=("X",))
    scene.pair.decode_peer.answers["Reserve"] = ReserveResponse(ticket=TICKET)
    await scene.calls.reserve()
    (call,) = scene.pair.decode_peer.calls["Reserve"]
    assert call.request.counts_in_every_message


async def test_a_guided_reservation_waits_for_the_start_of_its_workers_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, grammar=Grammar(regex="a+"))
    scene.pair.decode_peer.answers["Reserve"] = ReserveResponse(ticket=TICKET)
    await scene.calls.reserve()
    (call,) = scene.pair.decode_peer.calls["Reserve"]
    assert call.request.grammar.regex == "a+"
    assert call.timeout > channel_process.START_S + compiler.WAIT_S + process_client.OPEN_S


REFUSALS = [
    (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorKind.OVERLOADED, True, "the workers have no room"),
    (grpc.StatusCode.UNAVAILABLE, ErrorKind.UNAVAILABLE, False, "a worker became unavailable"),
    (grpc.StatusCode.INTERNAL, ErrorKind.INTERNAL, True, "a worker failed"),
]


@pytest.mark.parametrize(("code", "kind", "reachable", "public"), REFUSALS)
async def test_decode_refuses(
    scene: Scene, code: grpc.StatusCode, kind: ErrorKind, reachable: bool, public: str
) -> None:
    scene.pair.decode_peer.answers["Reserve"] = rpc_error(code, "its words")
    with pytest.raises(BatonError) as caught:
        await scene.calls.reserve()
    assert (caught.value.kind, str(caught.value)) == (kind, "decode-0: its words")
    assert client_error(caught.value).message == public
    assert scene.pair.decode.reachable is reachable
    assert scene.output.reserved is False
    scene.calls.refused()
    assert scene.pair.claimed == FREE
    assert scene.pair.decode.outputs == {}
    assert not scene.pair.decode.accepts_work, "it gets no work for a while"
    scene.calls.abandon()
    assert scene.pair.decode_peer.calls["Cancel"] == []


async def test_the_prefill_request(scene: Scene) -> None:
    scene.calls.prefill.start(TICKET)
    (call,) = scene.pair.prefill_peer.calls["Prefill"]
    assert call.request == PrefillRequest(
        attempt=ATTEMPT,
        token_ids=[*PROMPT, *EMITTED],
        prompt_length=len(PROMPT),
        sampling=Sampling(seed=9),
        limits=Limits(max_tokens=8, stop_token_ids=(2,)),
        ticket=TICKET,
        prompt_logprobs=False,
        ticket_follows=False,
    )
    assert call.timeout == pytest.approx(60, abs=1e-6)


# max_tokens, echo, with its ticket, seconds left -> prompt_logprobs, ticket_follows, the call's timeout.
PREFILLS = [
    (8, False, False, 60, False, True, 60),
    (1, False, False, 60, False, True, 60),
    (0, True, False, 60, True, False, 60),
    (8, True, True, 60, True, False, 60),
    (8, False, False, 0, False, True, 0.001),
    (8, False, False, -5, False, True, 0.001),
]


@pytest.mark.parametrize(
    ("max_tokens", "echo", "ticket", "left_s", "prompt_logprobs", "ticket_follows", "timeout"), PREFILLS
)
async def test_a_ticket_follows_where_one_is_due(
    monkeypatch: pytest.MonkeyPatch,
    max_tokens: int,
    echo: bool,
    ticket: bool,
    left_s: float,
    prompt_logprobs: bool,
    ticket_follows: bool,
    timeout: float,
) -> None:
    fields: dict[str, Any] = {"echo": Echo(""), "sampling": Sampling(logprobs=1)} if echo else {}
    scene = Scene(monkeypatch, left_s=left_s, max_tokens=max_tokens, **fields)
    scene.calls.prefill.start(TICKET if ticket else None)
    (call,) = scene.pair.prefill_peer.calls["Prefill"]
    assert call.request.HasField("ticket") == ticket
    assert (call.request.prompt_logprobs, call.request.ticket_follows) == (prompt_logprobs, ticket_follows)
    assert call.timeout == pytest.approx(timeout, abs=1e-6)


LOST = (ErrorKind.UNAVAILABLE, "{}: it was lost: it is gone")


@pytest.mark.parametrize("method", ["Reserve", "Prefill", "ProvideTicket", "GetHandoff"])
async def test_no_call_outlasts_its_worker(scene: Scene, method: str) -> None:
    pair = scene.pair
    worker = pair.decode if method in ("Reserve", "GetHandoff") else pair.prefill
    if method == "Prefill":
        call = await scene.prefilling()
        worker.lose("it is gone")
        await scene.calls.prefill.wait(2)
        assert scene.error == (LOST[0], LOST[1].format("prefill-0"))
        assert call.cut
        return
    begin = {
        "Reserve": scene.calls.reserve,
        "ProvideTicket": lambda: scene.calls.provide_ticket(TICKET),
        "GetHandoff": scene.calls.decode_has_sequence,
    }[method]
    waiting = asyncio.ensure_future(begin())
    await quiesced()
    worker.lose("it is gone")
    await quiesced()
    assert waiting.done()
    if method == "GetHandoff":
        assert await waiting is False
        return
    with pytest.raises(BatonError) as caught:
        await waiting
    assert (caught.value.kind, str(caught.value)) == (LOST[0], LOST[1].format(worker.name))


async def test_the_ticket_follows(scene: Scene) -> None:
    scene.pair.prefill_peer.answers["ProvideTicket"] = ProvideTicketResponse()
    await scene.calls.provide_ticket(TICKET)
    (call,) = scene.pair.prefill_peer.calls["ProvideTicket"]
    assert call.request == ProvideTicketRequest(attempt=ATTEMPT, ticket=TICKET)
    assert call.timeout == attempt_calls.PROVIDE_TICKET_S


@pytest.mark.parametrize("runs", [True, False], ids=["prefill runs", "prefill has failed"])
async def test_a_ticket_that_prefill_does_not_accept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """The error of prefill's call is raised if that fails too, since it is more specific."""
    call = await scene.prefilling()
    scene.pair.prefill_peer.answers["ProvideTicket"] = rpc_error(grpc.StatusCode.NOT_FOUND, "no such prefill")
    if not runs:
        call.end(rpc_error(grpc.StatusCode.INTERNAL, "out of memory"))
        await scene.calls.provide_ticket(TICKET)
        assert scene.error == (ErrorKind.INTERNAL, "prefill-0: out of memory")
        return
    waited: list[float] = []

    async def wait(timeout_s: float) -> None:
        waited.append(timeout_s)
        await quiesced()

    monkeypatch.setattr(scene.calls.prefill, "wait", wait)
    with pytest.raises(BatonError) as caught:
        await scene.calls.provide_ticket(TICKET)
    assert waited == [attempt_calls.PREFILL_END_S]
    reason = "prefill-0: ProvideTicket: no such prefill"
    assert (caught.value.kind, str(caught.value)) == (ErrorKind.UNAVAILABLE, reason)
    assert client_error(caught.value).message == "a worker became unavailable"


async def test_a_link_that_fails_a_prefill_is_left_alone_but_its_worker_is_not(
    scene: Scene,
) -> None:
    call = await scene.prefilling()
    call.end(baton_error(BatonError(ErrorKind.UNAVAILABLE, "it was cut", cause=FailureCause.LINK)))
    await scene.calls.prefill.wait(2)
    pair = scene.pair
    assert pair.prefill.reachable
    assert pair.prefill.links.has_failed(pair.decode)
    assert pair.prefill.links.take_news() == [(pair.decode, "prefill-0: it was cut")]


# The ticket's state at decode -> whether the sequence continues there.
STATES = [
    (TicketState.TICKET_STATE_COMMITTED, True),
    (TicketState.TICKET_STATE_ACTIVE, True),
    (TicketState.TICKET_STATE_RESERVED, False),
]


@pytest.mark.parametrize(("state", "goes_on"), STATES)
async def test_whether_decode_has_the_sequence(
    scene: Scene, state: TicketState.ValueType, goes_on: bool
) -> None:
    scene.pair.decode_peer.answers["GetHandoff"] = GetHandoffResponse(state=state)
    assert await scene.calls.decode_has_sequence() is goes_on
    (call,) = scene.pair.decode_peer.calls["GetHandoff"]
    assert call.request == GetHandoffRequest(attempt=ATTEMPT)
    assert call.timeout == attempt_calls.GET_HANDOFF_S
    assert scene.pair.decode_peer.calls["Attach"] == []


async def test_decode_is_not_asked_once_it_has_sent_tokens(scene: Scene) -> None:
    scene.output.decode_started = True
    assert await scene.calls.decode_has_sequence() is True
    assert scene.pair.decode_peer.calls["GetHandoff"] == []


async def test_a_decode_worker_that_does_not_answer_has_no_sequence(scene: Scene) -> None:
    scene.pair.decode_peer.answers["GetHandoff"] = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
    assert await scene.calls.decode_has_sequence() is False


@pytest.mark.parametrize("replays", [True, False])
async def test_a_ticket_that_has_ended_is_replayed(scene: Scene, replays: bool) -> None:
    answers = scene.pair.decode_peer.answers
    answers["GetHandoff"] = GetHandoffResponse(state=TicketState.TICKET_STATE_ENDED)
    answers["Attach"] = AttachResponse() if replays else rpc_error(grpc.StatusCode.NOT_FOUND, "unknown")
    assert await scene.calls.decode_has_sequence() is replays
    (call,) = scene.pair.decode_peer.calls["Attach"]
    router_id = scene.pair.decode.router_id
    assert call.request == AttachRequest(router_id=router_id, attempt=ATTEMPT, next_number=2)
    assert (scene.output.attempt_error is None) == replays
