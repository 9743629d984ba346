"""Inputs that have broken other servers get the same verdict from both APIs, and reach no worker.

The largest of them are tokenised in a helper process. `-s` prints how long the slowest answers took.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.base.errors import ErrorKind, FieldError
from baton.rpc.grpc_errors import from_status
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, Tool, ToolChoice
from baton.v1.types_pb2 import Choices, Grammar, LogitBias
from services.common.config.tls import Auth
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, until
from tests.router.fake_model import VOCAB
from tests.router.http_client import http

CONTEXT = 256
MIB = 1 << 20
KEY = "sk-of-a-caller"
JSON = {"content-type": "application/json"}
NAN, INFINITY = float("nan"), float("inf")


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2, **fields}).encode()


def chat(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 2, **fields}).encode()


def message(**fields: Any) -> bytes:
    prompt = {} if {"text", "token_ids", "chat"} & fields.keys() else {"text": "a"}
    return GenerateRequest(**{"model": MODEL, "max_tokens": 2, **prompt, **fields}).SerializeToString()


def turns(*roles_and_texts: tuple[str, str]) -> bytes:
    messages = [ChatMessage(role=role, content=content) for role, content in roles_and_texts]
    return message(chat=ChatMessages(messages=messages))


def conversation(outside: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """Of one message, with these fields; `outside`: fields of the request itself."""
    messages = [ChatMessage(role="user", content="a")]
    return message(chat=ChatMessages(messages=messages, **fields), **(outside or {}))


def biases(*entries: tuple[int, float]) -> bytes:
    return message(logit_bias=[LogitBias(token_id=token, bias=bias) for token, bias in entries])


def raw(text: str) -> bytes:
    return b'{"model": "fake", "prompt": "a", ' + text.encode() + b"}"


NUMBERS = {str(number): 1 for number in range(60_000)}
PROPERTIES: dict[str, Any] = {"properties": {str(number): {} for number in range(50_000)}}
HELLO = {"role": "user", "content": "a"}

# What is wrong, with a body for HTTP, and a message for gRPC where that can express it; the kind of refusal.
CASES: dict[str, tuple[bytes, bytes | None, ErrorKind]] = {
    "truncated": (b'{"model": "fake", "pro', message()[:-1], ErrorKind.INVALID),
    "no document": (b"\xff\xfe\x00", b"\xff\xff\xff\xff", ErrorKind.INVALID),
    "unknown model": (body(model="other"), message(model="other"), ErrorKind.NOT_FOUND),
    "a path for a model": (
        body(model="../../etc/passwd"),
        message(model="../../etc/passwd"),
        ErrorKind.NOT_FOUND,
    ),
    "10 KB model": (body(model="m" * 10_000), message(model="m" * 10_000), ErrorKind.INVALID),
    "nested 100,000 deep": (b"[" * 100_000, None, ErrorKind.INVALID),
    "nested 100,000 deep within": (raw(f'"odd": {"[" * 100_000}{"]" * 100_000}'), None, ErrorKind.INVALID),
    "50,000 keys": (raw(", ".join(f'"k{i}": 1' for i in range(50_000))), None, ErrorKind.INVALID),
    "a key twice": (raw('"n": 1, "n": 2'), None, ErrorKind.INVALID),
    "NaN": (raw('"temperature": NaN'), message(temperature=NAN), ErrorKind.INVALID),
    "Infinity": (raw('"temperature": Infinity'), message(temperature=INFINITY), ErrorKind.INVALID),
    "1e999": (raw('"temperature": 1e999'), None, ErrorKind.INVALID),
    "a number as a text": (raw('"n": "1"'), None, ErrorKind.INVALID),
    "temperature -0.1": (body(temperature=-0.1), message(temperature=-0.1), ErrorKind.INVALID),
    "temperature -1e39": (body(temperature=-1e39), message(temperature=-1e38), ErrorKind.INVALID),
    "top_p -0.1": (body(top_p=-0.1), message(top_p=-0.1), ErrorKind.INVALID),
    "top_p 1.01": (body(top_p=1.01), message(top_p=1.01), ErrorKind.INVALID),
    "top_k -5": (body(top_k=-5), None, ErrorKind.INVALID),
    "n 0": (body(n=0), message(n=0), ErrorKind.INVALID),
    "n 1e9": (body(n=10**9), message(n=10**9), ErrorKind.INVALID),
    "best_of below n": (body(n=2, best_of=1), None, ErrorKind.INVALID),
    "logprobs 1e6": (body(logprobs=10**6), message(logprobs=10**6), ErrorKind.INVALID),
    "logprobs 21": (body(logprobs=21), message(logprobs=21), ErrorKind.INVALID),
    "129 logprob ids": (body(logprob_token_ids=list(range(129))), None, ErrorKind.INVALID),
    "max_tokens 0.5": (body(max_tokens=0.5), None, ErrorKind.INVALID),
    "max_tokens -1": (body(max_tokens=-1), None, ErrorKind.INVALID),
    "max_tokens 2^63": (body(max_tokens=2**63), None, ErrorKind.INVALID),
    "min_tokens above max_tokens": (body(min_tokens=3), message(min_tokens=3), ErrorKind.INVALID),
    "a prompt of the whole context": (
        body(prompt=[1] * CONTEXT),
        ids_request([1] * CONTEXT).SerializeToString(),
        ErrorKind.INVALID,
    ),
    "empty prompt": (body(prompt=""), message(text=""), ErrorKind.INVALID),
    "empty messages": (chat(), turns(), ErrorKind.INVALID),
    "unknown role": (chat({"role": "robot", "content": "a"}), turns(("robot", "a")), ErrorKind.INVALID),
    "missing content": (chat({"role": "user"}), None, ErrorKind.INVALID),
    "negative token": (body(prompt=[-1]), None, ErrorKind.INVALID),
    "token beyond the vocabulary": (
        body(prompt=[VOCAB]),
        ids_request([VOCAB]).SerializeToString(),
        ErrorKind.INVALID,
    ),
    "token 1.5": (body(prompt=[1.5]), None, ErrorKind.INVALID),
    "token true": (body(prompt=[True]), None, ErrorKind.INVALID),
    "nested tokens": (body(prompt=[[[1]]]), None, ErrorKind.INVALID),
    "invalid UTF-8": (b'{"model": "fake", "prompt": "\xc3("}', b"\n\x04fake\x12\x02\xc3(", ErrorKind.INVALID),
    "lone surrogate": (raw('"stop": "\\ud800"'), None, ErrorKind.INVALID),
    "1 MB of combining marks": (
        body(prompt="e" + "\u0301" * (MIB // 7)),
        message(text="e" + "\u0301" * (MIB // 2)),
        ErrorKind.INVALID,
    ),
    "1 MB without a space": (body(prompt="a" * MIB), message(text="a" * MIB), ErrorKind.INVALID),
    "10,000 stop strings": (body(stop=["a"] * 10_000), message(stop=["a"] * 10_000), ErrorKind.INVALID),
    "empty stop string": (body(stop=""), message(stop=[""]), ErrorKind.INVALID),
    "stop string of 1 MB": (body(stop="a" * MIB), message(stop=["a" * MIB]), ErrorKind.INVALID),
    "100,000 biases": (
        body(logit_bias={str(token): 1 for token in range(60_000)}),
        biases(*((token, 1.0) for token in range(60_000))),
        ErrorKind.INVALID,
    ),
    "bias of a token beyond the vocabulary": (
        body(logit_bias={str(VOCAB): 1}),
        biases((VOCAB, 1.0)),
        ErrorKind.INVALID,
    ),
    "bias NaN": (raw('"logit_bias": {"5": NaN}'), biases((5, NAN)), ErrorKind.INVALID),
    "a chat template": (
        chat({"role": "user", "content": "a"}, chat_template="{{ 1 }}"),
        None,
        ErrorKind.INVALID,
    ),
    "reserved template variable": (
        chat({"role": "user", "content": "a"}, chat_template_kwargs={"messages": []}),
        conversation(chat_template_kwargs='{"messages": []}'),
        ErrorKind.INVALID,
    ),
    "prompt_embeds": (body(prompt_embeds="AAAA"), None, ErrorKind.INVALID),
    "image": (
        chat(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
        ),
        None,
        ErrorKind.INVALID,
    ),
    "template variables that are no object": (
        chat({"role": "user", "content": "a"}, chat_template_kwargs=[1]),
        conversation(chat_template_kwargs="[1]"),
        ErrorKind.INVALID,
    ),
    "special tokens of a chat": (
        chat({"role": "user", "content": "a"}, add_special_tokens=True),
        conversation(outside={"add_special_tokens": True}),
        ErrorKind.INVALID,
    ),
    "malformed tool": (chat({"role": "user", "content": "a"}, tools=[{"type": 5}]), None, ErrorKind.INVALID),
    "a tool without a name": (
        chat({"role": "user", "content": "a"}, tools=[{"type": "function", "function": {"name": ""}}]),
        conversation(tools=[Tool(name="")]),
        ErrorKind.INVALID,
    ),
    "parameters of a tool that are no object": (
        chat(
            {"role": "user", "content": "a"},
            tools=[{"type": "function", "function": {"name": "f", "parameters": [1]}}],
        ),
        conversation(tools=[Tool(name="f", parameters="[1]")]),
        ErrorKind.INVALID,
    ),
    "an unknown tool that is called": (
        chat(
            {"role": "user", "content": "a"},
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice={"type": "function", "function": {"name": "g"}},
        ),
        conversation(tools=[Tool(name="f")], tool_choice=ToolChoice.TOOL_CHOICE_NAMED, tool_name="g"),
        ErrorKind.INVALID,
    ),
    "a regex of 1 MB": (
        body(structured_outputs={"regex": "(a|aa)+" * (MIB // 7)}),
        message(grammar=Grammar(regex="(a|aa)+" * (MIB // 7))),
        ErrorKind.INVALID,
    ),
    "a schema of 1 MB": (
        body(structured_outputs={"json": {"enum": ["a" * MIB]}}),
        message(grammar=Grammar(json_schema=json.dumps({"enum": ["a" * MIB]}))),
        ErrorKind.INVALID,
    ),
    "no choice": (
        body(structured_outputs={"choice": []}),
        message(grammar=Grammar(choice=Choices())),
        ErrorKind.INVALID,
    ),
    "an empty grammar": (
        body(structured_outputs={"json": None, "grammar": 5}),
        message(grammar=Grammar()),
        ErrorKind.INVALID,
    ),
    "a grammar and ignore_eos": (
        body(structured_outputs={"json_object": True}, ignore_eos=True),
        message(grammar=Grammar(json_object=True), ignore_eos=True),
        ErrorKind.INVALID,
    ),
    "13,000 tools": (
        chat(HELLO, tools=[{"type": "function", "function": {"name": "f"}}] * 13_000),
        conversation(tools=[Tool(name="f")] * 13_000),
        ErrorKind.INVALID,
    ),
    "60,000 template variables": (
        chat(HELLO, chat_template_kwargs=NUMBERS),
        conversation(chat_template_kwargs=json.dumps(NUMBERS)),
        ErrorKind.INVALID,
    ),
    "a message of 60,000 fields": (chat({**HELLO, **NUMBERS}), None, ErrorKind.INVALID),
    "a schema of 50,000 properties": (
        body(structured_outputs={"json": PROPERTIES}),
        message(grammar=Grammar(json_schema=json.dumps(PROPERTIES))),
        ErrorKind.INVALID,
    ),
    "many messages, then 60,000 biases": (
        chat(*[HELLO] * 200, logit_bias=NUMBERS),
        None,
        ErrorKind.INVALID,
    ),
    "a long prompt, then 50,000 keys": (
        body(prompt="a" * 100_000, **NUMBERS),
        None,
        ErrorKind.INVALID,
    ),
    "cache salt": (body(cache_salt="x" * MIB), None, ErrorKind.INVALID),
}
_STATUS = {ErrorKind.INVALID: 400, ErrorKind.NOT_FOUND: 404}


@dataclass
class Apis:
    """Both APIs of a site; `slowest` has the time of each refusal in milliseconds."""

    here: Site
    client: httpx.AsyncClient
    channel: grpc.aio.Channel
    slowest: dict[str, float] = field(default_factory=dict)

    async def post(self, name: str, data: bytes, path: str = "", **headers: str) -> httpx.Response:
        where = path or ("/v1/chat/completions" if b'"messages"' in data[:40] else "/v1/completions")
        began = time.perf_counter()
        answer = await self.client.post(where, content=data, headers={**JSON, **headers})
        self.slowest[f"http {name}"] = (time.perf_counter() - began) * 1e3
        return answer

    async def generate(self, name: str, data: bytes, **options: Any) -> grpc.aio.AioRpcError | None:
        """The error of a call; None if it succeeds."""
        method: Any = self.channel.unary_stream("/baton.v1.RouterService/Generate", None, None)
        began = time.perf_counter()
        try:
            async for _ in method(data, **{"timeout": 30, **options}):
                pass
        except grpc.aio.AioRpcError as error:
            self.slowest[f"grpc {name}"] = (time.perf_counter() - began) * 1e3
            return error
        return None


@asynccontextmanager
async def both_apis(site: SiteMaker, **settings: Any) -> AsyncIterator[Apis]:
    async with (
        site(**settings) as here,
        http(here) as client,
        grpc.aio.insecure_channel(
            here.addresses["grpc"], options=[("grpc.max_send_message_length", -1)]
        ) as channel,
    ):
        yield Apis(here, client, channel)


def kind_of(error: grpc.aio.AioRpcError) -> ErrorKind:
    metadata: Any = error.trailing_metadata() or ()
    return from_status(error.code(), error.details(), metadata).kind


async def test_both_apis_refuse_alike_and_no_worker_is_called(site: SiteMaker) -> None:
    async with both_apis(site) as both:
        for warm in (body(prompt="a" * 70_000), body(prompt="a" * MIB), body()):  # starts both helpers
            await both.post("warm", warm)
        prompts = len(both.here.worker("prefill-0").prefill.prompts)
        both.slowest.clear()
        for name, (data, serialised, kind) in CASES.items():
            answer = await both.post(name, data)
            assert answer.status_code == _STATUS[kind], (name, answer.text[:300])
            assert answer.json()["error"]["message"]
            assert len(answer.content) < 2000, name  # nothing of the request is echoed
            if serialised is not None:
                error = await both.generate(name, serialised)
                assert error is not None, name
                assert kind_of(error) is kind, (name, error)
        slowest = sorted(both.slowest.items(), key=lambda item: -item[1])
        print("slowest refusals, ms:", {name: round(ms, 1) for name, ms in slowest[:8]})
        assert len(both.here.worker("prefill-0").prefill.prompts) == prompts
        assert not any(worker.decode.reserves[1:] for worker in both.here.cluster.workers.values())
        assert (await both.post("good", body())).status_code == 200
        assert await both.generate("good", message()) is None
        await both.here.quiet()


async def test_what_is_too_much_by_its_count_alone_is_not_parsed(site: SiteMaker) -> None:
    """No helper process starts for it."""
    counted = [CASES[name] for name in ("50,000 keys", "100,000 biases")]
    messages = chat(*[{"role": "user", "content": "a"}] * 2000)
    async with both_apis(site) as both:
        for data in (*(data for data, _, _ in counted), messages):
            assert (await both.post("many", data)).status_code == 400
        for data in (data for _, data, _ in counted if data is not None):
            error = await both.generate("many", data)
            assert error is not None
            assert kind_of(error) is ErrorKind.INVALID
        assert not both.here.router.tokenizer.processes.pids
        assert (await both.post("large", body(prompt="a" * 70_000))).status_code == 400
        assert both.here.router.tokenizer.processes.pids


async def test_roles_are_the_same_to_tokenize(site: SiteMaker) -> None:
    """A template may copy a role into the prompt."""
    async with both_apis(site) as both:
        for role, status in (("robot", 400), ("user", 200)):
            messages = json.dumps({"messages": [{"role": role, "content": "a"}]}).encode()
            answer = await both.post("role", messages, "/tokenize")
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["param"] == "messages"


async def test_of_a_text_that_is_too_long_other_fields_are_judged_first(site: SiteMaker) -> None:
    long = "a" * 100_000
    async with both_apis(site) as both:
        for fields, param in (({}, "prompt"), ({"min_p": -1.0}, "min_p"), ({"stop": [""]}, "stop")):
            answer = await both.post("long", body(prompt=long, **fields))
            assert answer.json()["error"]["param"] == param
            error = await both.generate("long", message(text=long, **fields))
            assert error is not None
            refused = from_status(error.code(), error.details(), error.trailing_metadata())  # type: ignore[arg-type]
            assert isinstance(refused, FieldError)
            assert refused.param == param


async def test_a_prompt_that_just_fits_is_served(site: SiteMaker) -> None:
    ids = [1] * (CONTEXT - 1)
    async with both_apis(site) as both:
        assert (await both.post("fits", body(prompt=ids, max_tokens=1))).status_code == 200
        assert await both.generate("fits", ids_request(ids, 1).SerializeToString()) is None


async def test_transports(site: SiteMaker) -> None:
    """Methods, content types, encodings and sizes."""
    async with both_apis(site, max_body_bytes=70_000) as both:
        assert (await both.client.get("/v1/completions")).status_code == 405
        unknown: Any = both.channel.unary_unary("/baton.v1.RouterService/Nothing", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await unknown(b"", timeout=5)
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (await both.post("form", body(), **form)).status_code == 415
        packed = await both.post("gzip", gzip.compress(body()), **{"content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["error"]["type"]) == (415, "invalid_request_error")
        assert (await both.post("identity", body(), **{"content-encoding": "identity"})).status_code == 200
        assert (await both.post("large", body(odd="x" * 80_000))).status_code == 413
        large = await both.generate("large", message(text="x" * 80_000))
        assert large is not None
        assert large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await both.post("headers", body(), **{"x-a": "a" * 20_000})).status_code == 431
        metadata = await both.generate("headers", message(), metadata=(("x-a", "a" * 40_000),))
        assert metadata is not None
        assert metadata.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_keys(site: SiteMaker, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    async with both_apis(site, auth=Auth(api_keys_file=tmp_path / "keys")) as both:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await both.post("key", body(), **headers)).status_code == 401
            error = await both.generate("key", message(), metadata=tuple(headers.items()))
            assert error is not None
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        query = await both.post("query", body(), path=f"/v1/completions?api_key={KEY}")
        assert query.status_code == 401


async def test_strict_fields(site: SiteMaker) -> None:
    async with both_apis(site, strict_fields=True) as both:
        assert (await both.post("odd", body(odd=1))).status_code == 400
        error = await both.generate("odd", message() + b"\xe8\x04\x01")
        assert error is not None
        assert kind_of(error) is ErrorKind.INVALID


async def test_what_may_be_retried_is_marked(site: SiteMaker) -> None:
    """No worker alive, and a queue that is full."""
    async with both_apis(site, slots=1, max_waiting=1, queue_timeout_s=5) as both:
        here, waits = both.here, []
        here.worker("decode-0").behaviour.step_s = 0.05
        busy = body(prompt=[1, 2, 3], max_tokens=100, ignore_eos=True)
        full: Callable[[], bool] = lambda: here.router.queue.waiting == 1  # noqa: E731
        for _ in range(2):
            waits.append(asyncio.create_task(both.post("busy", busy)))
        await until(full)
        refused = await both.post("full", body())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        error = await both.generate("full", message())
        assert error is not None
        assert kind_of(error) is ErrorKind.OVERLOADED
        for one in waits:
            one.cancel()
        await asyncio.wait(waits)
    async with both_apis(site, prefill=0, decode=0, queue_timeout_s=0.1) as none:
        refused = await none.post("none", body())
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        error = await none.generate("none", message())
        assert error is not None
        assert kind_of(error).retryable


async def test_a_deadline_that_is_past(site: SiteMaker) -> None:
    async with both_apis(site) as both:
        error = await both.generate("late", message(), timeout=1e-6)
        assert error is not None
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert both.here.worker("prefill-0").prefill.prompts == []
