"""Errors that clients get of a worker's failure: whether to retry, and nothing that identifies the worker."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from baton.base.errors import ErrorKind
from services.router.workers.worker_error import WorkerError, client_error
from tests.router.conftest import Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.http_client import complete, events, http

PROMPT = [9, 8, 7]
# What a worker answers that has nothing to do with what the client asked.
INTERNAL = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
)


def secrets_of(here: Site) -> list[str]:
    """Whatever identifies a worker, in lower case."""
    found = []
    for worker in here.cluster.workers.values():
        port = worker.address.rpartition(":")[2]
        found += [worker.identity.name, worker.address, port, worker.identity.incarnation.hex()]
    return found


@pytest.mark.parametrize("code", INTERNAL, ids=lambda code: code.name)
@pytest.mark.parametrize("place", ["start", "first"])
async def test_a_workers_refusal_is_tried_again(site: SiteMaker, code: grpc.StatusCode, place: str) -> None:
    async with site(prefill=2) as here:
        for name in ("prefill-0", "prefill-1"):
            behaviour = here.worker(name).behaviour
            behaviour.break_prefills, behaviour.break_at, behaviour.break_code = 1, place, code
        answer = await here.generate(ids_request(PROMPT, 8))
        assert tokens_of(answer) == expected(PROMPT, 8)
        # 2 where the first worker was heard of again in time for the second attempt.
        assert answer[-1].trace.attempts in (2, 3)
        await here.quiet()


@pytest.mark.parametrize("code", [*INTERNAL, grpc.StatusCode.INTERNAL], ids=lambda code: code.name)
async def test_clients_get_a_status_without_the_worker(site: SiteMaker, code: grpc.StatusCode) -> None:
    """Every attempt fails; over both protocols, whole and streamed, in the middle of an output too."""
    async with site(prefill=2) as here, http(here) as client:
        for name in ("prefill-0", "prefill-1"):
            behaviour = here.worker(name).behaviour
            behaviour.break_prefills, behaviour.break_at, behaviour.break_code = 10**6, "first", code
        internal = code is grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await here.generate(ids_request(PROMPT, 8))
        assert failed.value.code() is (code if internal else grpc.StatusCode.UNAVAILABLE)
        whole = await complete(client, max_tokens=8)
        assert whole.status_code == (500 if internal else 503)
        streamed = [str(chunk) async for chunk in events(client, max_tokens=8)]
        for text in (failed.value.details() or "", whole.text, streamed[-1]):
            assert "worker" in text
            assert "broke" not in text, "the worker's own words"
            assert not [secret for secret in secrets_of(here) if secret in text.lower()]


async def test_a_lost_worker_is_not_named(site: SiteMaker) -> None:
    async with site(queue_timeout_s=0.3) as here:
        decode = here.worker("decode-0").behaviour
        decode.step_s = 0.02
        asked = asyncio.create_task(here.generate(ids_request(PROMPT, 40)))
        await until(lambda: any(ticket.emitted for ticket in here.worker("decode-0").decode.tickets.values()))
        decode.over = True
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asked
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        text = (failed.value.details() or "").lower()
        assert text
        assert not [secret for secret in secrets_of(here) if secret in text]


def test_an_invalid_request_keeps_the_workers_reason() -> None:
    refused = WorkerError(ErrorKind.INVALID, "decode-0", "300 tokens exceed the context of 256")
    assert refused.message == "decode-0: 300 tokens exceed the context of 256"
    assert client_error(refused).message == "300 tokens exceed the context of 256"
    assert client_error(refused).kind is ErrorKind.INVALID
