"""Large requests: a helper process handles them like the router small ones; its death affects no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_stat import is_running
from baton.base.process_watch import Activity
from baton.client import AsyncClient
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds
from baton.v1.types_pb2 import LogitBias
from services.router.request import sizes
from services.router.tokenization import helper_processes, tokenizer_pool
from services.router.tokenization.helper_processes import HelperProcess, helper_settings
from tests.router.api.inputs.test_refusals import GRPC_REFUSED, REFUSED, code_of
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, until
from tests.router.http_client import http
from tests.router.test_process import config, fake_pair, ready, start
from tests.support.command_lines import command_line

LARGE = "LARGE_BYTES", "LARGE_TOKENIZE_BYTES"
COMMON = {"model": MODEL, "temperature": 0, "max_tokens": 4, "seed": 7}
HELLO = [{"role": "system", "content": "be <|end|> brief"}, {"role": "user", "content": "h\u00e9llo"}]
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "h\u00e9llo"}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "stop": ["\u00e9", "zz"]}),
    ("/v1/completions", {"prompt": ["a", "b<|end|>c"], "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [104, 105], "echo": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0, "logit_bias": {"5": 1.5}}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"mood": "good"}, "user": "u"}),
    ("/v1/completions", {"prompt": ["a", "b"], "prediction": {"type": "content", "content": "\u00e9"}}),
    ("/v1/chat/completions", {"messages": HELLO, "prediction": {"type": "content", "content": "", "odd": 1}}),
    ("/tokenize", {"prompt": "h\u00e9llo<|end|>", "return_token_strs": True}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [104, 195, 169, 256]}),
]
FAILING: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": [1, 2], **{field: value}}) for field, value in REFUSED),
    ("/v1/completions", {"model": "other", "prompt": "a"}),
    ("/v1/completions", {"prompt": "\ud800"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"eos_token": "<|pad|>"}}),
    ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": "a" * 17_000}}),
    ("/v1/chat/completions", {"messages": HELLO, "prediction": {"type": "content", "content": [7]}}),
    ("/tokenize", {"prompt": "a", "messages": HELLO}),
    ("/tokenize", {"model": "other", "prompt": "a"}),
    ("/detokenize", {"tokens": [320]}),
]  # fmt: skip


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes every request large."""

    def switch() -> None:
        for name in LARGE:
            monkeypatch.setattr(sizes, name, 0)
        monkeypatch.setattr(tokenizer_pool, "LARGE_TOKENS", 0)
        monkeypatch.setattr(tokenizer_pool, "LARGE_OFFSETS", 0)

    return switch


async def post(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
    document = {**COMMON, **fields} if path.startswith("/v1") else fields
    response = await client.post(
        path, content=json.dumps(document), headers={"content-type": "application/json"}
    )
    return response.status_code, {**response.json(), "id": "", "created": 0}


async def test_http_responses_are_the_same(site: SiteMaker, everything_is_large: Callable[[], None]) -> None:
    async with site() as here, http(here) as client:
        small = [await post(client, path, fields) for path, fields in (*ACCEPTED, *FAILING)]
        assert [status for status, _ in small[: len(ACCEPTED)]] == [200] * len(ACCEPTED)
        assert here.router.tokenizer.processes.pids == []
        everything_is_large()
        for expected, (path, fields) in zip(small, (*ACCEPTED, *FAILING), strict=True):
            assert await post(client, path, fields) == expected, (path, fields)
        assert len(here.router.tokenizer.processes.pids) == 1


GRPC: list[dict[str, Any]] = [
    {"text": "h\u00e9llo", "echo": True, "logprobs": 2},
    {"token_ids": TokenIds(ids=[104, 105]), "echo": True, "n": 2, "stop": ["zz"]},
    {"chat": ChatMessages(messages=[ChatMessage(role="user", content="a<|end|>b")])},
    {"text": "h", "prediction": "h\u00e9llo", "n": 2},
    {"text": "a", "logit_bias": [LogitBias(token_id=5, bias=1.5)], "stop_token_ids": [3]},
]


async def test_grpc_responses_are_the_same(site: SiteMaker, everything_is_large: Callable[[], None]) -> None:
    requests = [
        GenerateRequest(model=MODEL, temperature=0, max_tokens=4, seed=7, **fields) for fields in GRPC
    ]
    async with site() as here:
        small = [await answer(here, request) for request in requests]
        everything_is_large()
        assert [await answer(here, request) for request in requests] == small
        for fields in GRPC_REFUSED:
            request = ids_request(fields.get("ids", [1]), **{k: v for k, v in fields.items() if k != "ids"})
            assert await code_of(here, request) == grpc.StatusCode.INVALID_ARGUMENT, fields
        other = GenerateRequest(model="other", text="a")
        assert await code_of(here, other) == grpc.StatusCode.NOT_FOUND


async def answer(here: Site, request: GenerateRequest) -> dict[int, tuple[list[int], str]]:
    """Ids and text of each choice."""
    outputs: dict[int, tuple[list[int], str]] = {}
    for response in await here.generate(request):
        ids, text = outputs.get(response.index, ([], ""))
        outputs[response.index] = ([*ids, *response.token_ids], text + response.text)
    return outputs


async def test_a_declared_length_is_refused_before_it_comes(site: SiteMaker) -> None:
    async with site(max_body_bytes=65536) as here:
        for head in (
            b"content-length: 65537",
            b"content-length: " + b"9" * 30,
            b"transfer-encoding: chunked",
        ):
            reader, writer = await asyncio.open_connection(*here.addresses["http"].rsplit(":", 1))
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n")
            writer.write(b"10001\r\n" + b" " * 65537 if b"chunked" in head else b"")
            status = await asyncio.wait_for(reader.readline(), 5)
            assert status.split()[1] in ((b"400",) if b"999" in head and b"400" in status else (b"413",))
            rest = await asyncio.wait_for(reader.read(), 5)
            assert b"connection: close" in rest.lower()
            writer.close()
        async with http(here) as client:
            body = json.dumps({"prompt": "a" * (65536 - 14)})
            assert len(body) == 65536
            assert (await client.post("/tokenize", content=body)).status_code == 200
            refused = await client.post("/tokenize", content=body + " ")
            assert refused.status_code == 413
            assert refused.json()["error"]["code"] == "body_too_large"


async def test_a_message_that_is_too_large(site: SiteMaker) -> None:
    async with site(max_body_bytes=65536) as here:
        client = await AsyncClient.connect(here.addresses["grpc"])
        async with client:
            with pytest.raises(BatonError, match="larger than max") as caught:
                await client.complete("a" * 65537)
            assert (caught.value.kind, caught.value.kind.retryable) == (ErrorKind.INVALID, False)


async def test_a_small_message_that_unpacks_to_a_large_one(site: SiteMaker) -> None:
    async with site(max_body_bytes=65536) as here:
        request = GenerateRequest(model=MODEL, text="a" * 1_000_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in here.stub.Generate(request, compression=grpc.Compression.Gzip):
                pass
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_listed_tokens_have_a_limit(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch, everything_is_large: Callable[[], None]
) -> None:
    monkeypatch.setattr(sizes, "MAX_LISTED_TOKENS", 0)  # so that the context counts, of 256 tokens
    async with site() as here, http(here) as client:
        for path, field, value in (("/tokenize", "prompt", "ab"), ("/detokenize", "tokens", [97, 98])):
            assert (await post(client, path, {field: value * 128}))[0] == 200
            status, error = await post(client, path, {field: value * 129})
            assert (status, error["error"]["param"]) == (400, field)


@contextlib.asynccontextmanager
async def process(
    folder: Path, settings: Mapping[str, Any] | None = None, **bounds: Any
) -> AsyncIterator[HelperProcess]:
    one = HelperProcess({**helper_settings(str(folder), False, 1024), **(settings or {})}, **bounds)
    try:
        yield one
    finally:
        one.close()


LIMITS = {"served_name": MODEL, "eos_token_ids": [], "vocab_size": 320, "max_context_tokens": 10**9}


async def tokenize(one: HelperProcess, prompt: str) -> Any:
    header = {"job": "tokenize", "limits": LIMITS, "options": {}}
    data, _ = await one.run(header, [json.dumps({"prompt": prompt}).encode()])
    return json.loads(data)["tokens"]


async def test_it_is_started_again(model_folder: Path) -> None:
    async with process(model_folder) as one:
        assert one.pid is None
        assert await tokenize(one, "ab") == [97, 98]
        first = one.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_running(first))
        assert await tokenize(one, "ab") == [97, 98]
        assert one.pid != first
    assert one.pid is None


async def test_a_request_that_kills_the_process_fails_alone(model_folder: Path) -> None:
    async with process(model_folder) as one:
        await tokenize(one, "a")
        first = one.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        jobs = [asyncio.create_task(tokenize(one, text)) for text in ("a", "b")]
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(BatonError) as caught:
            await jobs[0]
        assert caught.value.kind == ErrorKind.INTERNAL
        assert await jobs[1] == [98]


@pytest.mark.parametrize(
    ("used_s", "kind", "why"),
    [
        (None, ErrorKind.OVERLOADED, "host is busy"),
        (0.1, ErrorKind.OVERLOADED, "host is busy"),
        (0.49, ErrorKind.INVALID, "takes more than 0.5 s"),
    ],
    ids=["stopped", "starved", "its own"],
)
async def test_a_request_takes_limited_time_of_a_processor(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, used_s: float | None, kind: ErrorKind, why: str
) -> None:
    """Time in which a process could not run does not count against the request."""
    async with process(model_folder, job_s=0.5) as one:
        await tokenize(one, "a")
        assert one.pid is not None
        os.kill(one.pid, signal.SIGSTOP)
        if used_s is not None:
            seen = iter((7.0, 7.0 + used_s))
            monkeypatch.setattr(helper_processes, "activity", lambda pid: Activity(next(seen), wanting=True))
        with pytest.raises(BatonError, match=why) as caught:
            await tokenize(one, "a")
        assert caught.value.kind == kind
        monkeypatch.undo()
        assert await tokenize(one, "a") == [97]


async def test_a_request_takes_limited_memory(model_folder: Path) -> None:
    async with process(model_folder, {"memory_bytes": 64 * 2**20}) as one:
        header = {"job": "tokenize", "limits": LIMITS, "options": {}}
        with pytest.raises(BatonError) as caught:
            await one.run(header, [b"[" + b"[]," * 5_000_000 + b"[]]"])
        assert caught.value.kind in (ErrorKind.INVALID, ErrorKind.INTERNAL)
        assert await tokenize(one, "a") == [97]


async def test_requests_that_wait_are_bounded(model_folder: Path) -> None:
    async with process(model_folder, max_jobs=2) as one:
        await tokenize(one, "a")
        assert one.pid is not None
        os.kill(one.pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(tokenize(one, text)) for text in "abc"]
        with pytest.raises(BatonError, match="2 large requests wait") as caught:
            await jobs[2]
        assert caught.value.kind == ErrorKind.OVERLOADED
        os.kill(one.pid, signal.SIGCONT)
        assert await asyncio.gather(*jobs[:2]) == [[97], [98]]


async def test_bytes_that_wait_are_bounded(model_folder: Path) -> None:
    async with process(model_folder, max_waiting_bytes=10) as one:
        await tokenize(one, "a")
        assert one.pid is not None
        os.kill(one.pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(tokenize(one, "a")) for _ in range(2)]
        with pytest.raises(BatonError, match=r"\d+ bytes of requests wait"):
            await jobs[1]
        os.kill(one.pid, signal.SIGCONT)
        assert await jobs[0] == [97]
        assert await tokenize(one, "b") == [98]


async def test_a_request_waits_for_limited_time(model_folder: Path) -> None:
    async with process(model_folder, wait_s=0.5) as one:
        job = asyncio.create_task(tokenize(one, "a"))
        await until(lambda: one.pid is not None)
        assert one.pid is not None
        os.kill(one.pid, signal.SIGSTOP)  # it has not been loaded yet
        with pytest.raises(BatonError, match=r"not tokenised within 0\.5 s: too many large ones") as caught:
            await job
        assert caught.value.kind == ErrorKind.OVERLOADED


async def test_it_ends_with_a_router_that_is_killed(model_folder: Path) -> None:
    async with fake_pair(model_folder) as worker:
        router = await start(config(model_folder, [worker.address]))
        addresses = await ready(router)
        async with httpx.AsyncClient(
            base_url=f"http://{addresses['http']}", timeout=30, verify=False
        ) as client:
            answer = await client.post("/tokenize", json={"prompt": "a" * 70_000})
            assert answer.status_code == 200
        mine = _helpers_of(router.pid)
        assert len(mine) == 1
        router.kill()
        await router.wait()
        await until(lambda: not any(is_running(pid) for pid in mine))


def _helpers_of(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return [pid for pid in children if "helper_process" in " ".join(command_line(pid))]
