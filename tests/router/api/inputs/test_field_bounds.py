"""Values that OpenAI's schema or vLLM's server allows for a field are accepted: its least, its most, and 10.0
for 10.

Sources: OpenAI's OpenAPI document (the parameters of its Python client); vLLM's `SamplingParams` and server.
What is refused although one of them allows it is in `NARROWER`, with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.request_fields.field import Treatment
from services.router.formats.field_table import CHAT, COMPLETIONS, RESPONSES
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.responses.body import ResponsesBody
from services.router.request.validate import RequestLimits, check_fields
from tests.router.conftest import MODEL, SiteMaker
from tests.router.http_client import http

I64 = 2**63 - 1
_BODIES = {
    "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 2},
}
_MODELS: dict[str, Any] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
}
_TABLES = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSES}

# Field → values that OpenAI's schema, vLLM's or llama.cpp's server allows.
ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 2, 1.5, 1e-3, 5, 1000, 1e9, 1e300],
    "top_p": [0, 1, 0.5, 1e-30],
    "top_k": [-1, 0, 1, 50, 2**31, 2**40, 5.0, -1.0],
    "min_p": [0, 1, 0.1],
    "top_n_sigma": [-1, 0, 1, 1.5, 1e30],
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2.0, 2.0, 0],
    "repetition_penalty": [1, 1e-9, 0.001, 0.5, 2, 1000, 1e20],
    "logit_bias": [{"5": -100}, {"5": 100}, {"5": 0}, {}, {"5": 1e6}, {"5": -250.5}],
    "seed": [-1, 0, 1, -I64 - 1, I64, 2**64 - 1, 7.0, -1.0],
    "n": [1, 3, 1.0],
    "best_of": [1, 1.0],
    "max_tokens": [1, 10.0, 2**31, 2**40, I64],
    "max_completion_tokens": [1, 10.0, 2**40],
    "max_output_tokens": [16, 10.0, 2**40],
    "min_tokens": [0, 1, 2.0],
    "logprobs": [0, 5, 20, 3.0],
    "stop": ["x", ["x"], ["x"] * 4, [], [f"x{number}" for number in range(16)]],
    "stop_token_ids": [[], [5], [5.0]],
    "priority": [0, 1, -5, 2**31, -(2**40), 3.0],
    "stream_options": [{"include_usage": True}, {}],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "echo": [True, False],
    "add_special_tokens": [True, False],
    "return_token_ids": [True],
    "add_generation_prompt": [True, False],
    "parallel_tool_calls": [True, False],
    "store": [True, False],
    "instructions": ["", "Be brief."],
    "include": [[], ["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
    "prompt": ["a", ["a", "b"], [1, 2], [[1, 2], [3]], [1.0, 2.0], [[1.0], [2]]],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "max_draft_tokens": [0, 7, 3.0],
    "prediction": [
        {"type": "content", "content": ""},
        {"type": "content", "content": "b c"},
        {"type": "content", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ],
}
# Values of one endpoint alone.
ONLY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"max_tokens": 0}),
    ("/v1/completions", {"max_tokens": 0, "echo": True}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 0}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2.0}),
    ("/v1/responses", {"top_logprobs": 20}),
    ("/v1/responses", {"top_logprobs": 2.0}),
]
# Field → what is refused, and why.
NARROWER: dict[str, tuple[Any, str]] = {
    "n": (129, "each output takes a slot of a worker; OpenAI's own bound"),
    "best_of": (3, "outputs are not ranked"),
    "stop": (["x"] * 17, "each one is looked for in every output; OpenAI has 4"),
    "stop_token_ids": ([*range(9)], "a record of the engine has room for 8"),
    "logit_bias": ({str(token): 1 for token in range(301)}, "a record of the engine has room for 300"),
    "max_tokens": (2**63, "OpenAI's schema has integers of 64 bits"),
    "logprobs": (21, "a record of the engine has room for 20; vLLM's default"),
}
# Used fields that are no scalars: messages, tools and grammars have tests of their own.
_OTHERS = {
    *("model", "messages", "input", "tools", "tool_choice", "structured_outputs", "response_format", "text"),
    *("stream", "previous_response_id", "top_logprobs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_whitespace_pattern"),
}
_REFUSAL = {"type": "refusal", "refusal": "I cannot."}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([{"role": "assistant", "content": [_REFUSAL]}], ["I cannot."]),
    ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, _REFUSAL]}], ["a\nI cannot."]),
    ([{"role": "assistant", "content": None, "refusal": "No."}], ["No."]),
    ([{"role": "assistant", "content": "Yes.", "refusal": None}], ["Yes."]),
    ([{"role": "assistant", "content": "", "tool_calls": [], "audio": None, "annotations": []}], [""]),
    ([{"role": "system", "content": [{"type": "text", "text": "a"}], "name": "s"}], ["a"]),
]


def test_every_used_field_has_values() -> None:
    used = {
        name
        for table in _TABLES.values()
        for name, field in table.items()
        if field.treatment is Treatment.USED
    }
    assert used == set(ACCEPTED) | _OTHERS


def _asked(path: str) -> list[dict[str, Any]]:
    """The fields of a body, one or two at a time."""
    own = _MODELS[path].model_fields
    asked = [{name: value} for name, values in ACCEPTED.items() if name in own for value in values]
    if path == "/v1/chat/completions":
        asked = [fields for fields in asked if "logprobs" not in fields]
    return [*asked, *(fields for only, fields in ONLY if only == path)]


@pytest.mark.parametrize("path", _BODIES)
def test_what_the_apis_allow_is_accepted(path: str) -> None:
    limits = RequestLimits(MODEL, (), 300, 512)
    for fields in _asked(path):
        body = _MODELS[path].parse({**_BODIES[path], **fields})
        requests = body.parsed_requests() if isinstance(body, CompletionBody) else [body.parsed_request()]
        for request in requests:
            assert check_fields(request, limits).choices == fields.get("n", 1), fields


@pytest.mark.slow
@pytest.mark.parametrize("path", _BODIES)
async def test_what_the_apis_allow_is_answered(site: SiteMaker, path: str) -> None:
    async with site() as here, http(here) as client:
        for fields in _asked(path):
            body = {**_BODIES[path], **fields}
            if "stream_options" in fields:
                body["stream"] = True
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (fields, answer.text)
        await here.quiet()


async def test_what_is_refused_although_one_of_them_allows_it(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for name, (value, reason) in NARROWER.items():
            answer = await client.post("/v1/completions", json={**_BODIES["/v1/completions"], name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), reason


async def test_a_prompt_may_be_run_without_output(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        body = {**_BODIES["/v1/completions"], "max_tokens": 0}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [("", "length")]
        assert answer["usage"]["completion_tokens"] == 0
        for path, name in (("/v1/chat/completions", "max_tokens"), ("/v1/responses", "max_output_tokens")):
            refused = await client.post(path, json={**_BODIES[path], name: 0})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_a_seed_has_the_same_bits_with_and_without_a_sign(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        body = {**_BODIES["/v1/completions"], "temperature": 1}
        for seed in (-1, 2**64 - 1):
            await client.post("/v1/completions", json={**body, "seed": seed})
        requests = here.worker("prefill-0").prefill.requests
        assert [one.sampling.seed for one in requests] == [2**64 - 1] * 2


@pytest.mark.parametrize(("messages", "contents"), CONVERSATIONS)
def test_what_a_model_refused_is_sent_back(messages: list[dict[str, Any]], contents: list[str]) -> None:
    chat = ChatBody.parse({"model": MODEL, "messages": messages}).chat()
    assert [turn.content for turn in chat.turns] == contents
    items = [{"type": "message", **message} for message in messages if message["content"]]
    if items:
        response = ResponsesBody.parse({"model": MODEL, "input": items}).parsed_request()
        assert response.chat is not None
        assert [turn.content for turn in response.chat.turns] == contents


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_only_a_model_refuses(role: str) -> None:
    for body in (ChatBody, ResponsesBody):
        name = "messages" if body is ChatBody else "input"
        document = {"model": MODEL, name: [{"role": role, "content": [_REFUSAL]}]}
        with pytest.raises(Exception, match="only text parts"):
            body.parse(document).parsed_request()


def test_reasoning_has_two_names() -> None:
    messages = [
        {"role": "assistant", "content": "a", name: "plan"} for name in ("reasoning", "reasoning_content")
    ]
    chat = ChatBody.parse({"model": MODEL, "messages": messages}).chat()
    assert [turn.reasoning_content for turn in chat.turns] == ["plan", "plan"]
