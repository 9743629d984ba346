"""Decode workers that refuse, forget, drop, move or corrupt sequences: right tokens or a typed error."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from services.router.text.output_text import OutputText
from services.router.workers import silent_attempts
from tests.router.conftest import SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.lifecycle.served_requests import COUNT, PROMPT, failure, served


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
