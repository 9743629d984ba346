"""Inputs that have broken other servers, as bodies of HTTP and as messages of gRPC."""

from __future__ import annotations

import json
from typing import Any

from baton.base.errors import ErrorKind
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, Tool, ToolChoice
from baton.v1.types_pb2 import Choices, Grammar, LogitBias
from tests.router.conftest import MODEL, ids_request
from tests.router.fake_model import VOCAB

CONTEXT = 256
MIB = 1 << 20
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
    """A conversation of one message with these fields; `outside`: fields of the request itself."""
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
    "8 drafts": (body(max_draft_tokens=8), message(max_draft_tokens=8), ErrorKind.INVALID),
    "-1 drafts": (body(max_draft_tokens=-1), None, ErrorKind.INVALID),
    "prediction of an image": (
        body(prediction={"type": "content", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}),
        None,
        ErrorKind.INVALID,
    ),
    "prediction of 1 MB": (
        body(prediction={"type": "content", "content": "a" * MIB}),
        message(prediction="a" * MIB),
        ErrorKind.INVALID,
    ),
    "prediction of 30,000 parts": (
        body(prediction={"type": "content", "content": [{"type": "text", "text": "a"}] * 30_000}),
        None,
        ErrorKind.INVALID,
    ),
    "cache salt": (body(cache_salt="x" * MIB), None, ErrorKind.INVALID),
}
