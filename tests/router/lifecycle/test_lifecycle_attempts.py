"""Events that use up an attempt of a request, events that end the request, and what is logged."""

from __future__ import annotations

import pytest
import structlog

from baton.base.errors import ErrorKind
from baton.perf_model.step_costs import StepCosts
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.prefill_pb2 import FirstToken, HandedOff
from baton.v1.types_pb2 import Attempt, FinishReason, WorkerRole
from services.router.placement.claim import Claim
from services.router.request.request import Finish
from tests.router.lifecycle.scripted_router import (
    AWAY,
    FIRST,
    HASHES,
    KV_BYTES,
    NO_BLOCKS,
    NO_ROOM,
    PLACE,
    PREEMPTED,
    ScriptedRouter,
    a_pair,
    attempt_failed,
    ended,
    failure,
    request_of,
    rest_of,
    warned,
)
from tests.router.lifecycle.scripted_workers import (
    PROMPT,
    REQUEST_ID,
    a_worker,
    quiesced,
)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> ScriptedRouter:
    return ScriptedRouter(monkeypatch)


async def test_a_combined_worker_gets_no_block_hashes(router: ScriptedRouter) -> None:
    both, peer = a_worker("both-0", WorkerRole.WORKER_ROLE_BOTH)
    async with router.running(request_of()):
        router.queue.claims.put_nowait(Claim(both, both, tokens=3, reserved=11))
        reserve = await peer.call("Reserve")
        assert list(reserve.request.block_hashes) == []
        assert router.prefixes.sent == [("both-0", router.prefixes.prompt)]


@pytest.mark.parametrize("lacks", [NO_ROOM, NO_BLOCKS], ids=["slots", "blocks"])
async def test_a_worker_without_room_costs_no_attempt(router: ScriptedRouter, lacks: Exception) -> None:
    """The reservation came first: the same attempt goes to another pair. A worker is reserved for a request
    that lacked blocks alone."""
    full, other = a_pair("0"), a_pair("1")
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()):
            router.clock.ms = 5
            await router.place(full)
            await router.promise(full, answer=lacks)
            assert router.queue.refusals == ([(PLACE, full.decode)] if lacks is NO_BLOCKS else [])
            assert router.queue.over == []
            assert full.claimed == (0, 0, 0)
            assert [asked.fresh for asked in router.queue.asked] == [True, False]
            assert [asked.entry.position for asked in router.queue.asked] == [PLACE, PLACE]
            router.clock.ms = 9
            await router.place(other)
            (reserve,) = other.decode_peer.calls["Reserve"]
            assert reserve.request.attempt == Attempt(request_id=REQUEST_ID, number=1)
            assert list(reserve.request.block_hashes) == list(HASHES)
    line = ended(logged)
    assert (line["outcome"], line["stage"], line["queue_ms"]) == ("cancelled", "reserved", 5.0)
    assert not router.observations.failed_attempts
    assert router.prefixes.hashed == [PROMPT]


async def test_a_prompt_starts_before_its_ticket(router: ScriptedRouter) -> None:
    pair = a_pair(sure=True)
    async with router.running(request_of()) as outbox:
        await router.place(pair)
        prefill = await pair.prefill_peer.call("Prefill")
        assert prefill.request.ticket_follows
        assert not prefill.request.HasField("ticket")
        prefill.emit(first_token=FIRST)
        await quiesced()
        first = outbox.take()
        assert first is not None
        assert list(first.token_ids) == [97]
        assert pair.prefill_peer.calls["ProvideTicket"] == []
        await router.promise(pair)
        (give,) = pair.prefill_peer.calls["ProvideTicket"]
        assert give.request.ticket.body == b"a promise"
        assert len(pair.prefill_peer.calls["Prefill"]) == 1
        (reserve,) = pair.decode_peer.calls["Reserve"]
        assert isinstance(reserve.request, ReserveRequest)


async def test_an_early_prefill_that_is_refused_uses_up_its_attempt_number(router: ScriptedRouter) -> None:
    """Reports of prefill belong to the first attempt, so the next has its own number."""
    full, other = a_pair("0", sure=True), a_pair("1")
    async with router.running(request_of()):
        await router.place(full)
        await router.promise(full, answer=NO_ROOM)
        assert (await full.prefill_peer.call("Prefill")).cut
        await router.place(other)
        (reserve,) = other.decode_peer.calls["Reserve"]
        assert reserve.request.attempt.number == 2
        assert list(reserve.request.block_hashes) == list(HASHES), "that was no failure"
    assert router.journal.marked == [(REQUEST_ID, 2)]
    assert not router.observations.failed_attempts


async def test_a_move_costs_an_attempt_where_no_token_came(monkeypatch: pytest.MonkeyPatch) -> None:
    router = ScriptedRouter(monkeypatch, max_attempts=1)
    with structlog.testing.capture_logs() as logged:
        async with router.running(request_of()) as outbox:
            for number in range(3):
                pair = a_pair(str(number))
                prefill = await router.prefilling(pair)
                if number < 2:
                    prefill.emit(first_token=FirstToken(number=number, token_id=97))
                    prefill.emit(handed_off=HandedOff())
                    prefill.end()
                    await quiesced()
                pair.output(number + 1, min(number + 1, 2), [], finish_reason=PREEMPTED)
                await quiesced()
                assert pair.decode_peer.calls["Cancel"] == []
            error = failure(outbox)
    message = "gave up after 1 attempts: moved without a token"
    assert (error.kind, str(error), error.tokens_sent) == (ErrorKind.UNAVAILABLE, message, True)
    assert warned(logged) == [attempt_failed(3, "moved without a token")]


# What decode sent after "a" before it was lost, of three tokens at most -> how the output ends, if it does.
COMPLETE = [
    ([98, 99], Finish.LENGTH, "abc"),
    ([98], None, None),
    ([2], Finish.STOP, "a"),
    ([98, 2], Finish.STOP, "ab"),
]


@pytest.mark.parametrize(("ids", "finish", "text"), COMPLETE)
async def test_an_output_may_be_complete_without_a_workers_report(
    router: ScriptedRouter, ids: list[int], finish: Finish | None, text: str | None
) -> None:
    pair = a_pair()
    async with router.running(request_of(max_tokens=3)) as outbox:
        prefill = await router.prefilling(pair)
        prefill.emit(first_token=FIRST)
        prefill.emit(handed_off=HandedOff())
        prefill.end()
        await quiesced()
        pair.output(1, 1, ids)
        pair.decode.lose("it is gone")
        await quiesced()
        assert len(router.queue.asked) == (1 if finish else 2)
        if finish is not None:
            delta = rest_of(outbox)
            assert (delta.text, delta.finish) == (text, finish)
            assert delta.trace is not None
            assert (delta.trace.attempts, delta.trace.kv_bytes_shipped) == (1, KV_BYTES)
    assert router.prefixes.outputs == []


@pytest.mark.parametrize("moved", [False, True])
async def test_the_time_per_output_token_corrects_predictions_of_the_worker_that_had_all(
    router: ScriptedRouter, moved: bool
) -> None:
    """A token every 7 ms, where the workers report steps of 5 ms."""
    pairs = [a_pair(str(number)) for number in range(1 + moved)]
    async with router.running(request_of(max_tokens=20)):
        for number, pair in enumerate(pairs):
            pair.decode.costs = StepCosts(decode_step_s=0.005)
            prefill = await router.prefilling(pair)
            router.clock.ms = 100
            prefill.emit(first_token=FirstToken(number=number, token_id=97))
            prefill.emit(handed_off=HandedOff())
            prefill.end()
            await quiesced()
            if pair is not pairs[-1]:
                pair.output(1, 1, [], finish_reason=PREEMPTED)
                await quiesced()
        router.clock.ms = 100 + 19 * 7
        first = len(pairs)
        pairs[-1].output(first, first, [98] * (20 - first), finish_reason=FinishReason.FINISH_REASON_LENGTH)
        await quiesced()
    assert router.prefixes.outputs == [(pairs[-1].decode.name, [97] * first + [98] * (20 - first))]
    ratios = [pair.decode.tpot_ratio.value for pair in pairs]
    assert ratios == ([1.0, 1.0] if moved else [pytest.approx(1 + 0.25 / 17)])


async def test_a_stop_string_may_come_before_the_reservation_fails(router: ScriptedRouter) -> None:
    pair = a_pair(sure=True)
    async with router.running(request_of(stop=("a",))) as outbox:
        await router.place(pair)
        (await pair.prefill_peer.call("Prefill")).emit(first_token=FIRST)
        await quiesced()
        await router.promise(pair, answer=AWAY)
        delta = rest_of(outbox)
    assert (delta.text, delta.finish) == ("", Finish.STOP)
