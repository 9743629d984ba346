"""Prompts that start before decode has reserved a slot: the ticket follows."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from baton.v1.types_pb2 import Grammar
from tests.router.conftest import SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected

PROMPT = [9, 8, 7]
SLOW_S = 0.4


async def test_the_first_token_does_not_wait_for_the_slot(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.reserve_s = SLOW_S
        call = here.stub.Generate(ids_request(PROMPT, 6), timeout=10)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        responses = aiter(call)
        first = await anext(responses)
        assert loop.time() - begun < SLOW_S
        assert not here.worker("decode-0").decode.tickets
        rest = [response async for response in responses]
        assert tokens_of([first, *rest]) == expected(PROMPT, 6)
        assert rest[-1].trace.attempts == 1
        request = here.worker("prefill-0").prefill.requests[0]
        assert request.ticket_follows
        (promise,) = here.worker("decode-0").decode.reserves
        assert (promise.token_count, promise.first_number) == (
            len(PROMPT),
            0,
        )  # not the token's that came first
        await here.quiet()


async def test_a_first_token_that_ends_the_request_releases_the_slot(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.reserve_s = 0.1
        assert tokens_of(await here.generate(ids_request(PROMPT, 1))) == expected(PROMPT, 1)
        await here.quiet()


async def test_a_client_that_leaves_before_the_reservation_leaves_nothing(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.reserve_s = SLOW_S
        call = here.stub.Generate(ids_request(PROMPT, 6), timeout=10)
        await call.read()
        call.cancel()
        await until(lambda: here.worker("prefill-0").prefill.running == 0)
        await asyncio.sleep(SLOW_S)  # the Reserve under way has come to its end
        await here.quiet()


async def test_prefill_fails_while_the_reservation_is_awaited(site: SiteMaker) -> None:
    """The ticket is not accepted; prefill's own error is the reason, and another attempt continues."""
    async with site() as here:
        here.worker("decode-0").behaviour.reserve_s = 0.05
        here.worker("prefill-0").behaviour.break_prefills = 1
        here.worker("prefill-0").behaviour.break_at = "first"
        responses = await here.generate(ids_request(PROMPT, 6))
        assert tokens_of(responses) == expected(PROMPT, 6)
        assert responses[-1].trace.attempts == 2
        await here.quiet()


@pytest.mark.parametrize("guided", [True, False])
async def test_of_what_a_worker_calls_invalid_only_a_grammar_is_the_clients(
    site: SiteMaker, guided: bool
) -> None:
    """All else was checked before: it is the worker's own limit, and another attempt is made."""
    async with site() as here:
        here.worker("decode-0").behaviour.reserve_s = 0.05
        behaviour = here.worker("prefill-0").behaviour
        behaviour.break_prefills, behaviour.break_at = 1, "start"
        behaviour.break_code = grpc.StatusCode.INVALID_ARGUMENT
        if not guided:
            assert tokens_of(await here.generate(ids_request(PROMPT, 6))) == expected(PROMPT, 6)
            return
        fields = {"ignore_eos": False, "grammar": Grammar(regex="a*")}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.generate(ids_request(PROMPT, 6, **fields))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await here.quiet()


async def test_with_other_routers_the_reservation_comes_first(site: SiteMaker) -> None:
    async with site() as here:
        decode = here.worker("decode-0")
        decode.behaviour.other_router_slots = 2
        known = next(one for one in here.router.directory.workers if one.name == "decode-0")
        await until(lambda: known.others.other_router_slots == 2)
        assert tokens_of(await here.generate(ids_request(PROMPT, 6))) == expected(PROMPT, 6)
        request = here.worker("prefill-0").prefill.requests[0]
        assert not request.ticket_follows
        assert request.HasField("ticket")
        await here.quiet()


async def test_with_a_combined_worker_the_reservation_comes_first(site: SiteMaker) -> None:
    """The prompt is computed into the reserved blocks."""
    async with site(prefill=0, decode=0, both=1) as here:
        assert tokens_of(await here.generate(ids_request(PROMPT, 6))) == expected(PROMPT, 6)
        assert not here.worker("both-0").prefill.requests[0].ticket_follows
        await here.quiet()
