"""Whatever fails once a request is admitted, its client gets an answer, within the deadline, and its tenant's
places are free again."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from services.common.config.tls import Auth
from services.router.formats.openai.completions import CompletionFormatter
from services.router.lifecycle.attempt import Attempt
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.output_state import OutputState
from services.router.lifecycle.request_lifecycle import RequestLifecycle
from services.router.lifecycle.timeline import RequestTimeline
from services.router.observability.store import Store
from services.router.placement.prefix_affinity import PrefixAffinity
from services.router.queue.waiting_queue import WaitingQueue
from services.router.tokenization.request_reader import RequestReader
from tests.router.conftest import Site, SiteMaker, ids_request
from tests.router.http_client import complete, http

KEY = (("authorization", "Bearer sk"),)
# The steps of a request's life, each of which may meet a defect.
STEPS = (
    (RequestTimeline, "mark"),
    (RequestTimeline, "placed"),
    (RequestTimeline, "trace"),
    (WaitingQueue, "enter"),
    (WaitingQueue, "claim"),
    (WaitingQueue, "ended"),
    (PrefixAffinity, "hash_prompt"),
    (PrefixAffinity, "prompt_sent"),
    (PrefixAffinity, "output_ended"),
    (OutputState, "begin"),
    (OutputState, "finish"),
    (OutputState, "end"),
    (Observations, "ended"),
    (Attempt, "run"),
    (RequestLifecycle, "__init__"),
    (CompletionFormatter, "chunks"),
    (CompletionFormatter, "whole"),
)


class Journal:
    """A journal of which at most one method fails."""

    def __init__(self) -> None:
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        return fail if name == self.failing else lambda *_: None


def fail(*_: object, **__: object) -> None:
    raise ValueError("a part of a prompt")


@pytest.fixture
def limited(tmp_path: Path) -> Auth:
    """One tenant, with the key `sk` and two places."""
    hashed = hashlib.sha256(b"sk").hexdigest()
    limits = "limits: {concurrent_requests: 2}"
    (tmp_path / "tenants").write_text(f"tenants: [{{name: acme, keys_sha256: ['{hashed}'], {limits}}}]\n")
    return Auth(tenants_file=tmp_path / "tenants")


async def over_http(client: httpx.AsyncClient, *, stream: bool) -> str:
    """The end of a call: "ok", or the kind of its error."""
    async with asyncio.timeout(5):
        answer = await complete(client, max_tokens=3, stream=stream)
    if answer.status_code == 200 and '"error"' not in answer.text:
        return "ok"
    assert "a part of a prompt" not in answer.text
    assert answer.status_code in (200, 500), answer.text
    assert "the router failed" in answer.text, answer.text
    return "failed"


async def over_grpc(here: Site) -> str:
    try:
        async with asyncio.timeout(5):
            [_ async for _ in here.stub.Generate(ids_request([1, 2, 3], 3), metadata=KEY)]
    except grpc.aio.AioRpcError as error:
        code = error.code()
    else:
        return "ok"
    assert code is grpc.StatusCode.INTERNAL
    return "failed"


async def each_way(here: Site, client: httpx.AsyncClient) -> list[str]:
    """A call each way, one after the other: there are two places."""
    found = [await over_http(client, stream=stream) for stream in (False, True)]
    return [*found, await over_grpc(here)]


async def test_defects(
    site: SiteMaker, limited: Auth, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal()
    monkeypatch.setattr(Store, "journal", journal)
    async with site(auth=limited) as here, http(here) as client:
        client.headers.update(dict(KEY))
        for owner, name in STEPS:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                found = await each_way(here, client)
                print(owner.__name__, name, found.count("failed"))
            assert (await each_way(here, client)) == ["ok"] * 3, (owner, name)
        for journal.failing in ("append", "close"):
            await each_way(here, client)
        journal.failing = ""
        assert await each_way(here, client) == ["ok"] * 3
    printed = "".join(capsys.readouterr())
    assert "RequestTimeline mark 3" in printed
    assert "CompletionFormatter chunks 1" in printed
    assert "Task exception was never retrieved" not in printed


async def test_a_drain_that_ends_a_request_before_it_has_begun(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        here.worker("decode-0").behaviour.step_s = 0.05
        calling = asyncio.create_task(complete(client, max_tokens=200))
        while not here.router.dispatcher.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await here.router.dispatcher.drain(0)
        answer = await asyncio.wait_for(calling, 5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_a_cancelled_task_is_an_answer(site: SiteMaker) -> None:
    """Before its first step a task is cancelled without having run."""
    async with site() as here:
        requests = await here.router.admission.generate(ids_request([1, 2], 4).SerializeToString(), 5)
        available = asyncio.Event()
        before = asyncio.all_tasks()
        async with here.router.dispatcher.run(requests[0], available) as outbox:
            (task,) = asyncio.all_tasks() - before
            task.cancel()
            await asyncio.wait_for(available.wait(), 5)
            with pytest.raises(Exception, match="the request was cancelled"):
                outbox.take()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_the_deadline_covers_admission(
    site: SiteMaker, limited: Auth, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def stands(*_: object) -> None:
        await asyncio.sleep(60)

    for name in ("completion", "chat", "response", "generate"):
        monkeypatch.setattr(RequestReader, name, stands)
    async with site(auth=limited) as here, http(here) as client:
        client.headers.update({**dict(KEY), "x-request-timeout-ms": "300"})
        for _ in range(3):
            began = time.monotonic()
            answer = await client.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            assert time.monotonic() - began < 3
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            [_ async for _ in here.stub.Generate(ids_request([1], 1), metadata=KEY, timeout=0.3)]
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
