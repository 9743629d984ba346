"""Prefill workers that break, are overtaken or do not end their calls: right tokens or a typed error."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from baton.v1.types_pb2 import FinishReason
from services.router.lifecycle import attempt_calls
from tests.router.conftest import SiteMaker, ids_request, tokens_of
from tests.router.fake_model import expected
from tests.router.fake_prefill import EXPOSED_NS
from tests.router.lifecycle.served_requests import PROMPT, failure, served


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
