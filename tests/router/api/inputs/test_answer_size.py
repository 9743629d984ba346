"""A response's size is bounded before it runs, and a large one takes little of the router's memory."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.v1.types_pb2 import WorkerRole
from tests.router.conftest import MODEL, SiteMaker, ids_request
from tests.router.fake_model import expected, logprobs_of
from tests.router.fake_workers import FakeCluster, FakeWorker
from tests.router.http_client import complete, events, http
from tests.router.test_process import config, ready, start

OUTPUTS = 16
CONTEXT = 4096
# What a router may grow by, for each token of an answer with logprobs of 20 others: it was 3,400.
BYTES_A_TOKEN = 300
SLACK_BYTES = 4 << 20


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak(pid: int) -> None:
    """Resets the peak of a process's memory, which counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.parametrize(
    "tokens",
    [pytest.param(200, id="200 tokens"), pytest.param(2000, id="2000 tokens", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("api", [pytest.param("completions", marks=pytest.mark.slow), "chat/completions"])
async def test_a_large_response_takes_little_memory(
    model_folder: Path, tmp_path: Path, api: str, tokens: int
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "max_position_embeddings": CONTEXT}))
    worker = FakeWorker(
        "both-0",
        WorkerRole.WORKER_ROLE_BOTH,
        FakeCluster.like(folder),
        slots=OUTPUTS,
        max_context=CONTEXT,
    )
    async with worker.serving():
        process = await start(config(folder, [worker.address], log_level="error"))
        addresses = await ready(process)
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True, "n": OUTPUTS}
        if api == "completions":
            asked |= {"prompt": [1, 2, 3], "logprobs": 20}
        else:
            asked |= {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
        async with httpx.AsyncClient(
            base_url=f"http://{addresses['http']}", timeout=300, verify=False
        ) as client:
            await client.post(f"/v1/{api}", json={**asked, "max_tokens": 20})
            forget_peak(process.pid)
            before = peak_bytes(process.pid)
            response = await client.post(f"/v1/{api}", json={**asked, "max_tokens": tokens})
            grown = peak_bytes(process.pid) - before
        assert response.status_code == 200
        body = response.json()
        assert body["usage"]["completion_tokens"] == OUTPUTS * tokens
        print(f"{api}: {len(response.content):,} bytes of answer, router's peak + {grown:,} bytes")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert grown < SLACK_BYTES + BYTES_A_TOKEN * OUTPUTS * tokens


TOO_LARGE: list[dict[str, Any]] = [
    {"max_tokens": 101},
    {"max_tokens": 51, "n": 2},
    {"max_tokens": 5, "logprobs": 20},
    {"max_tokens": 34, "prompt": ["ab", "c", "d"]},
    {"max_tokens": 1, "prompt": [1] * 100, "echo": True},
    {"max_tokens": 0, "prompt": [1] * 34, "echo": True, "logprobs": 1},
]
LARGE: list[dict[str, Any]] = [
    {"max_tokens": 100},
    {"max_tokens": 50, "n": 2},
    {"max_tokens": 4, "logprobs": 20},
    {"max_tokens": 33, "prompt": ["ab", "c", "d"]},
    {"max_tokens": 1, "prompt": [1] * 99, "echo": True},
    {"max_tokens": 0, "prompt": [1] * 33, "echo": True, "logprobs": 1},
]


async def test_a_response_above_the_limit_is_refused_before_it_runs(site: SiteMaker) -> None:
    async with site(max_answer_values=100) as here, http(here) as client:
        for fields in TOO_LARGE:
            for stream in (False, True):
                response = await complete(client, stream=stream, **fields)
                assert response.status_code == 400, fields
                error = response.json()["error"]
                assert (error["code"], error["param"]) == ("answer_too_large", "max_tokens"), fields
                assert "max_answer_values allows 100" in error["message"]
        assert not here.worker("prefill-0").prefill.prompts
        for fields in LARGE:
            assert (await complete(client, **fields)).status_code == 200, fields
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.generate(ids_request([1, 2], 101))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await here.generate(ids_request([1, 2], 100))


async def test_a_chat_without_max_tokens_has_what_the_limit_leaves(site: SiteMaker) -> None:
    """The chat asked for no size, so it is not refused for one."""
    async with site(max_answer_values=100) as here, http(here) as client:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
        for fields, tokens in (({}, 100), ({"n": 4}, 25), ({"logprobs": True, "top_logprobs": 3}, 20)):
            response = await client.post("/v1/chat/completions", json={**asked, **fields})
            body = response.json()
            assert body["usage"]["completion_tokens"] == tokens * fields.get("n", 1), body
            assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}


async def test_a_large_response_has_every_token(site: SiteMaker) -> None:
    """The response is written in many pieces; what is streamed is the same."""
    async with site(slots=16) as here, http(here) as client:
        fields = {"max_tokens": 200, "logprobs": 5, "n": 8, "return_token_ids": True}
        response = await complete(client, **fields)
        assert response.headers.get("transfer-encoding") == "chunked"
        want = expected([1, 2, 3], 200)
        texts = [""] * 8
        async for chunk in events(client, **fields):
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["text"]
        for choice in response.json()["choices"]:
            assert choice["token_ids"] == want
            assert choice["logprobs"]["token_logprobs"] == [logprobs_of(token, 0).logprob for token in want]
            assert [len(top) for top in choice["logprobs"]["top_logprobs"]].count(0) == 0
            assert choice["text"] == texts[choice["index"]]
        small = await complete(client, max_tokens=2)
        assert int(small.headers["content-length"]) == len(small.content)
