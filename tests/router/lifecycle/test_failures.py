"""Workers that refuse, fail, lose, move or corrupt sequences: right tokens or a typed error, and no leaks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1.types_pb2 import FinishReason, WorkerRole
from services.router.lifecycle import attempt_calls
from services.router.text.output_text import OutputText
from services.router.workers import liveness, silent_attempts
from tests.router.conftest import Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.fake_prefill import EXPOSED_NS
from tests.router.fake_workers import FakeWorker
from tests.support.fewer import each_value_once

PROMPT = [9, 8, 7]
COUNT = 24


async def served(here: Site, count: int = COUNT, **fields: Any) -> int:
    """Runs one request, checks its tokens, returns how many attempts it took."""
    responses = await here.generate(ids_request(PROMPT, count, **fields))
    assert tokens_of(responses) == expected(PROMPT, count)
    return responses[-1].trace.attempts


async def failure(here: Site, timeout: float = 10, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """Runs one request that must fail. Returns its status and details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await here.generate(ids_request(PROMPT, COUNT, **fields), timeout)
    return caught.value.code(), caught.value.details() or ""


async def test_a_refused_reserve_goes_to_the_other_worker(site: SiteMaker) -> None:
    async with site(decode=2) as here:
        here.worker("decode-0").behaviour.refuse_reserves = 1
        here.worker("decode-1").behaviour.refuse_reserves = 1
        assert await served(here) == 3
        numbers = [
            request.attempt.number
            for name in ("decode-0", "decode-1")
            for request in here.worker(name).decode.reserves
        ]
        assert sorted(numbers) == [1, 2, 3]
        # Each had refused once by then: the third time decode reserved before the prompt was run.
        last = here.worker("prefill-0").prefill.requests[-1]
        assert last.attempt.number == 3
        assert not last.ticket_follows
        await here.quiet()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers ask after attempts that are silent for a tenth of a second."""
    monkeypatch.setattr(silent_attempts, "SILENT_S", 0.1)
    monkeypatch.setattr(silent_attempts, "LOOK_S", 0.02)


@pytest.mark.usefixtures("impatient")
async def test_a_sequence_that_decode_has_forgotten_is_continued(site: SiteMaker) -> None:
    async with site(decode=2) as here:
        for worker in ("decode-0", "decode-1"):
            here.worker(worker).behaviour.forgets = 1
        assert await served(here) == 3
        await here.quiet()


@pytest.mark.usefixtures("impatient")
async def test_output_that_was_not_sent_is_asked_for(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.withholds = 2
        assert await served(here) == 1
        assert here.worker("decode-0").behaviour.withholds == 0
        await here.quiet()


@pytest.mark.usefixtures("impatient")
async def test_a_silence_with_a_reason_is_waited_for(site: SiteMaker) -> None:
    """A prompt that takes long, and a step."""
    async with site() as here:
        here.worker("prefill-0").behaviour.prefill_s = 0.5
        here.worker("decode-0").behaviour.step_s = 0.2
        responses = await here.generate(ids_request(PROMPT, 4))
        assert tokens_of(responses) == expected(PROMPT, 4)
        assert responses[-1].trace.attempts == 1
        await here.quiet()


@pytest.mark.parametrize("place", ["start", "first"])
async def test_prefill_breaks_before_the_commit(site: SiteMaker, place: str) -> None:
    async with site(prefill=2) as here:
        for worker in ("prefill-0", "prefill-1"):
            here.worker(worker).behaviour.break_at = place
        here.worker("prefill-0").behaviour.break_prefills = 1
        attempts = [await served(here) for _ in range(3)]
        assert here.worker("prefill-0").behaviour.break_prefills == 0
        assert sorted(attempts) == [1, 1, 2]
        again = [
            request for name in ("prefill-0", "prefill-1") for request in here.worker(name).prefill.requests
        ]
        second = next(request for request in again if request.attempt.number == 2)
        emitted = expected(PROMPT, 1) if place == "first" else []
        assert list(second.token_ids) == PROMPT + emitted
        assert second.prompt_length == len(PROMPT)
        await here.quiet()


async def test_prefill_breaks_after_the_commit(site: SiteMaker) -> None:
    async with site() as here:
        behaviour = here.worker("prefill-0").behaviour
        behaviour.break_prefills, behaviour.break_at = 1, "committed"
        assert await served(here) == 1
        assert behaviour.break_prefills == 0
        await here.quiet()


async def test_prefill_that_always_breaks_is_given_up(site: SiteMaker) -> None:
    async with site(max_attempts=2) as here:
        here.worker("prefill-0").behaviour.break_prefills = 100
        code, message = await failure(here)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "gave up after 2 attempts" in message
        assert len(here.worker("prefill-0").prefill.requests) == 2
        await here.quiet()


async def test_an_internal_error_of_prefill_is_not_retried(site: SiteMaker) -> None:
    async with site() as here:
        behaviour = here.worker("prefill-0").behaviour
        behaviour.break_prefills, behaviour.break_code = 1, grpc.StatusCode.INTERNAL
        code, _ = await failure(here)
        assert code == grpc.StatusCode.INTERNAL
        assert len(here.worker("prefill-0").prefill.requests) == 1
        await here.quiet()


async def test_prefills_call_ends_by_itself_once_decode_continues(site: SiteMaker) -> None:
    """Cut off while it is read, it would leave its memory behind."""
    async with site() as here:
        prefill = here.worker("prefill-0")
        prefill.behaviour.overtake_s = 1.0
        assert tokens_of(await here.generate(ids_request([1, 2, 3], 4))) == expected([1, 2, 3], 4)
        assert prefill.prefill.running == 1, "the answer waited for prefill's call"
        await here.quiet()
        assert prefill.prefill.cut == 0


@pytest.mark.parametrize("stops", [False, True], ids=["its length", "a stop string"])
async def test_usage_is_complete_if_decode_ends_before_prefill_reports(site: SiteMaker, stops: bool) -> None:
    async with site() as here:
        whole = await here.generate(ids_request([1, 2, 3], 8))
        text = "".join(response.text for response in whole)
        prefill = here.worker("prefill-0")
        prefill.behaviour.overtake_s, prefill.behaviour.cached_tokens = 0.2, 2
        stop = [text[4]] if stops else []
        last = (await here.generate(ids_request([1, 2, 3], 8, stop=stop)))[-1]
        assert last.finish_reason == (FinishReason.FINISH_REASON_STOP if stops else whole[-1].finish_reason)
        assert last.usage.cached_tokens == 2
        assert last.trace.handoff_exposed_ns == EXPOSED_NS
        await here.quiet()


async def test_prefills_call_is_cancelled_if_it_does_not_end(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_calls, "TAIL_S", 0.05)
    async with site() as here:
        prefill = here.worker("prefill-0")
        prefill.behaviour.overtake_s = 30.0
        assert tokens_of(await here.generate(ids_request([1, 2, 3], 4))) == expected([1, 2, 3], 4)
        await here.quiet()
        assert prefill.prefill.cut == 1


async def test_a_released_ticket_is_no_failure(site: SiteMaker) -> None:
    """Decode reports the end of the ticket before prefill reports the token that ended it."""
    async with site() as here:
        here.worker("prefill-0").behaviour.cancelled_first = True
        assert await served(here, 1) == 1
        await here.quiet()


async def test_a_dropped_sequence_is_prefilled_again(site: SiteMaker) -> None:
    async with site() as here:
        worker = here.worker("decode-0")
        worker.behaviour.step_s = 0.01
        call = asyncio.create_task(served(here))
        await until(lambda: any(len(ticket.emitted) > 3 for ticket in worker.decode.tickets.values()))
        worker.decode.drop(worker.decode.reserves[0].attempt)
        assert await call == 2
        await here.quiet()


@pytest.mark.parametrize("moves", [1, 3, 6])
async def test_moved_sequences_continue_elsewhere(site: SiteMaker, moves: int) -> None:
    """More moves than attempts: each made progress, so none counts against the request."""
    async with site(decode=2) as here:
        giver, full = here.worker("decode-0"), here.worker("decode-1")
        giver.behaviour.moves, giver.behaviour.move_at = moves, 4
        full.behaviour.refuse_reserves = 10**6
        attempts = await served(here)
        assert giver.behaviour.moves == 0
        assert len(giver.decode.reserves) == 1 + moves
        # A prompt sent ahead to the full worker, before the router knew, takes a number too.
        assert attempts in (1 + moves, 2 + moves)
        await here.quiet()


async def test_repeated_tokens_are_dropped(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.repeat_all = True
        assert await served(here) == 1


async def test_a_gap_is_an_error(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.skip_number = 0
        behaviour = here.worker("prefill-0").behaviour
        # Prefill does not report token 0 in time, and decode begins with number 1.
        behaviour.break_prefills, behaviour.break_at = 0, "start"
        here.worker("decode-0").behaviour.skip_number = 5
        here.worker("decode-0").behaviour.step_s = 0.01
        code, message = await failure(here)
        assert code == grpc.StatusCode.INTERNAL
        assert "tokens 5 to 5 never came" in message
        await here.quiet()


async def test_a_contradiction_is_an_error(site: SiteMaker) -> None:
    async with site() as here:
        behaviour = here.worker("decode-0").behaviour
        behaviour.repeat_all = behaviour.contradict = True
        code, message = await failure(here)
        assert code == grpc.StatusCode.INTERNAL
        assert "came twice and differs" in message
        await here.quiet()


async def test_a_broken_token_stream_is_replayed(site: SiteMaker) -> None:
    async with site() as here:
        worker = here.worker("decode-0")
        worker.behaviour.follow_drops = 2
        assert await served(here, 60) == 1
        assert worker.behaviour.follow_drops == 0
        assert worker.decode.most_positions == 1
        await here.quiet()


@contextlib.asynccontextmanager
async def dying(here: Site, name: str) -> Any:
    """A further decode worker of the site, which the body may stop."""
    worker = FakeWorker(name, WorkerRole.WORKER_ROLE_DECODE, here.cluster)
    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(worker.serving())
    try:
        yield worker, stack
    finally:
        await stack.aclose()


async def test_a_killed_decode_worker_costs_an_attempt(site: SiteMaker) -> None:
    async with site() as here, dying(here, "decode-9") as (worker, stack):
        await _add_worker(here, worker)
        here.worker("decode-0").behaviour.refuse_reserves = 1
        worker.behaviour.step_s = 0.02
        call = asyncio.create_task(served(here))
        await until(lambda: any(ticket.emitted for ticket in worker.decode.tickets.values()))
        await asyncio.sleep(0.1)
        here.worker("decode-0").behaviour.refuse_reserves = 0
        await stack.aclose()
        del here.cluster.workers["decode-9"]
        assert await call == 3  # the refused one included
        await here.quiet()


async def test_a_decode_worker_that_reports_its_end_is_lost_at_once(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "LIVENESS_TIMEOUT_S", 60.0)
    async with site() as here, dying(here, "decode-9") as (worker, _):
        await _add_worker(here, worker)
        here.worker("decode-0").behaviour.other_router_slots = 8
        await until(lambda: here.router.directory.workers[1].free_slots == 0)
        worker.behaviour.step_s = 0.02
        call = asyncio.create_task(served(here))
        await until(lambda: any(ticket.emitted for ticket in worker.decode.tickets.values()))
        here.worker("decode-0").behaviour.other_router_slots = 0
        worker.behaviour.over = True
        assert await call == 2
        assert here.worker("decode-0").decode.reserves[0].first_number > 0
        del here.cluster.workers["decode-9"]
        await here.quiet()


async def test_a_heartbeat_sent_before_a_failed_call_does_not_count(site: SiteMaker) -> None:
    async with site() as here:
        worker = here.router.directory.workers[0]
        described, asked_at = worker.described, time.monotonic()
        worker.unreachable()
        worker.update(described, claimed_before=0, asked_at=asked_at)
        assert not worker.alive
        worker.update(described, claimed_before=0, asked_at=time.monotonic())
        assert worker.alive


async def test_a_restarted_worker_is_another_one(site: SiteMaker) -> None:
    """Same port, other incarnation: its predecessor's sequence is prefilled again."""
    async with site(both=1, decode=0) as here, dying(here, "decode-9") as (worker, stack):
        here.worker("both-0").behaviour.refuse_reserves = 10**6
        await _add_worker(here, worker)
        worker.behaviour.step_s = 0.02
        call = asyncio.create_task(served(here))
        await until(lambda: any(ticket.emitted for ticket in worker.decode.tickets.values()))
        port = int(worker.address.rsplit(":", 1)[1])
        await stack.aclose()
        again = FakeWorker("decode-9", WorkerRole.WORKER_ROLE_DECODE, here.cluster)
        async with again.serving(port):
            assert await call == 2
            assert again.decode.reserves[0].attempt.number == 2
            assert again.decode.reserves[0].first_number > 0
            await here.quiet()


async def _add_worker(here: Site, worker: FakeWorker) -> None:
    here.router.directory.add(worker.address)
    await until(
        lambda: any(
            known.name == worker.identity.name and known.alive for known in here.router.directory.workers
        )
    )


async def test_no_pair_without_equal_fingerprints(site: SiteMaker) -> None:
    async with site(prefill=1, decode=0, queue_timeout_s=0.3, both=1) as here:
        stranger = FakeWorker("decode-9", WorkerRole.WORKER_ROLE_DECODE, here.cluster, fingerprint=b"other")
        async with stranger.serving():
            await _add_worker(here, stranger)
            here.worker("both-0").behaviour.draining = True
            await until(lambda: not here.router.readiness.ready())
            code, message = await failure(here)
            assert code == grpc.StatusCode.UNAVAILABLE
            assert "no pair" in message
            assert not stranger.decode.reserves


async def test_a_full_queue_refuses(site: SiteMaker) -> None:
    async with site(slots=1, max_waiting=2, queue_timeout_s=5) as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        answers = await asyncio.gather(
            *(here.generate(ids_request(PROMPT, 6)) for _ in range(6)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) == 3
        assert here.worker("decode-0").decode.most_slots_used == 1
        await here.quiet()


async def test_waiting_is_first_come_first_served(site: SiteMaker) -> None:
    async with site(slots=1) as here:
        order: list[int] = []

        async def one(index: int) -> None:
            await here.generate(ids_request([index], 3))
            order.append(index)

        here.worker("decode-0").behaviour.refuse_reserves = 10**6
        calls = []
        for index in range(8):
            calls.append(asyncio.create_task(one(index)))
            await until(lambda index=index: here.router.dispatcher.running > index)  # type: ignore[misc]
        here.worker("decode-0").behaviour.refuse_reserves = 0
        await asyncio.gather(*calls)
        assert order == list(range(8))


async def test_waiting_has_an_end(site: SiteMaker) -> None:
    async with site(queue_timeout_s=0.2) as here:
        here.worker("decode-0").behaviour.refuse_reserves = 10**6
        code, message = await failure(here)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no slot became free" in message
        here.worker("decode-0").behaviour.refuse_reserves = 0
        await here.quiet()


@pytest.mark.parametrize("others", [0, 2], ids=["reserved-early", "reserved-first"])
async def test_a_full_queue_is_waited_for_and_is_no_failed_attempt(site: SiteMaker, others: int) -> None:
    """Whichever worker's: prompts and reservations are refused many more times than attempts are made."""
    async with site(prefill=1, decode=1, max_attempts=1, queue_timeout_s=60.0) as here:
        behaviours = [here.worker(name).behaviour for name in ("prefill-0", "decode-0")]
        behaviours[1].other_router_slots = others
        for each in range(3):
            behaviours[0].full_prefills, behaviours[1].refuse_reserves = 4 + each, 3
            results = await asyncio.gather(
                *(here.generate(ids_request([each, n, 5], 6), 60) for n in range(4))
            )
            for number, responses in enumerate(results):
                assert tokens_of(responses) == expected([each, number, 5], 6)
        assert behaviours[0].full_prefills == 0
        assert not here.router.observations.failed_attempts
        await here.quiet()


async def test_a_queue_that_stays_full_is_waited_for_as_long_as_for_a_slot(site: SiteMaker) -> None:
    """Refusals do not begin the wait anew."""
    async with site(max_attempts=1, queue_timeout_s=0.4) as here:
        here.worker("prefill-0").behaviour.full_prefills = 10**6
        code, message = await failure(here)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no slot became free within 0.4 s" in message
        assert here.worker("prefill-0").behaviour.full_prefills > 10**6 - 40
        await here.quiet()


@pytest.mark.parametrize("slow", ["reserve_s", "prefill_s", "handoff_s", "step_s"])
async def test_the_clients_deadline_holds(site: SiteMaker, slow: str) -> None:
    async with site() as here:
        setattr(here.worker("prefill-0").behaviour, slow, 0.5)
        setattr(here.worker("decode-0").behaviour, slow, 0.5)
        code, _ = await failure(here, timeout=0.2)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await here.quiet()


async def test_the_routers_own_deadline_holds(site: SiteMaker) -> None:
    async with site(request_timeout_s=0.2) as here:
        here.worker("decode-0").behaviour.step_s = 0.5
        code, _ = await failure(here)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await here.quiet()


@pytest.mark.parametrize(("delay_ms", "role"), each_value_once([0, 1, 2, 4, 8, 15, 30, 60], ["pair", "both"]))
async def test_cancels_leave_nothing_behind(site: SiteMaker, role: str, delay_ms: int) -> None:
    counts = {"prefill": 0, "decode": 0, "both": 1} if role == "both" else {}
    async with site(slots=4, **counts) as here:
        for worker in here.cluster.workers.values():
            worker.behaviour.reserve_s = 0.004
            worker.behaviour.prefill_s = 0.008
            worker.behaviour.handoff_s = 0.008
            worker.behaviour.step_s = 0.005
        calls = [here.stub.Generate(ids_request([index], 50)) for index in range(8)]
        reads = [asyncio.create_task(_read_all(call)) for call in calls]
        await asyncio.sleep(delay_ms / 1000)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads)
        await here.quiet()
        assert await served(here) == 1


async def _read_all(call: Any) -> None:
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        async for _ in call:
            pass


async def test_a_slow_client_delays_no_other(site: SiteMaker) -> None:
    """A client that reads nothing: its sequence runs to its end and frees its slot."""
    async with site(slots=1) as here:
        call = here.stub.Generate(ids_request(PROMPT, 200))
        responses = aiter(call)
        first = await anext(responses)
        assert await served(here) == 1
        rest = [response async for response in responses]
        assert tokens_of([first, *rest]) == expected(PROMPT, 200)
        await here.quiet()


async def test_drain_ends_what_does_not_end(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        call = asyncio.create_task(failure(here))
        await asyncio.sleep(0.1)
        await here.router.dispatcher.drain(0.1)
        code, _ = await call
        assert code == grpc.StatusCode.UNAVAILABLE
        assert (await failure(here))[0] == grpc.StatusCode.UNAVAILABLE
        await here.quiet()


async def test_an_internal_error_fails_one_request_alone(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is made where a worker's tokens are read: what breaks there must not end that reading."""
    push = OutputText.push
    bad = expected(PROMPT, 3)[-1]

    def breaks(text: OutputText, token_id: int) -> str:
        if token_id == bad:
            raise ZeroDivisionError
        return push(text, token_id)

    monkeypatch.setattr(OutputText, "push", breaks)
    other = next([number] for number in range(256) if bad not in expected([number], COUNT))
    async with site() as here:
        (code, details), responses = await asyncio.gather(
            failure(here), here.generate(ids_request(other, COUNT))
        )
        assert (code, details) == (grpc.StatusCode.INTERNAL, "the router failed: ZeroDivisionError")
        assert tokens_of(responses) == expected(other, COUNT)
        assert here.router.directory.token_stream_breaks == 0
        await here.quiet()
