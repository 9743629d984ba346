"""Logprobs, echo and prompts without output, over both APIs and in both of OpenAI's formats."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2 import GenerateRequest
from baton.v1.types_pb2 import FinishReason
from tests.router.conftest import EOS, MODEL, Site, SiteMaker, byte_tokenizer, ids_request, tokens_of
from tests.router.fake_model import expected, logprobs_of
from tests.router.http_client import complete, events, http

TOKENIZER = byte_tokenizer()


def own(token: int) -> float:
    return logprobs_of(token, 0).logprob


def spelled(token: int) -> str:
    """Spells a token of the byte-level vocabulary as OpenAI does."""
    if token == EOS:
        return "<|end|>"
    if token == EOS + 1:
        return "<|pad|>"
    if token > EOS:
        return ""
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


async def test_legacy_logprobs(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        body = (await complete(client, max_tokens=20, logprobs=2, return_token_ids=True)).json()
        choice = body["choices"][0]
        ids = expected([1, 2, 3], 20)
        assert choice["token_ids"] == ids
        found = choice["logprobs"]
        assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert found["tokens"] == [spelled(token) for token in ids]
        assert found["token_logprobs"] == [own(token) for token in ids]
        for token, top in zip(ids, found["top_logprobs"], strict=True):
            assert top[spelled(token)] == own(token)
            assert len(top) <= 3
        check_offsets(choice["text"], found)
        none = (await complete(client, logprobs=0)).json()["choices"][0]["logprobs"]
        assert all(len(top) == 1 for top in none["top_logprobs"])
        await here.quiet()


def check_offsets(text: str, found: dict[str, Any]) -> None:
    """A token that is text is at its offset, unless it follows a part of a character."""
    assert found["text_offset"] == sorted(found["text_offset"])
    checked = 0
    before = ["", *found["tokens"]]
    for earlier, token, offset in zip(before, found["tokens"], found["text_offset"], strict=False):
        if token and not token.startswith(("bytes:", "<|")) and not earlier.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("echo", [True, False])
async def test_a_stream_has_the_same_logprobs(site: SiteMaker, echo: bool) -> None:
    async with site() as here, http(here) as client:
        fields = {"prompt": "ab é", "max_tokens": 20, "logprobs": 1, "echo": echo}
        whole = (await complete(client, **fields)).json()["choices"][0]
        joined: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
        text = ""
        async for chunk in events(client, **fields):
            text += chunk["choices"][0]["text"]
            for name, values in chunk["choices"][0]["logprobs"].items():
                joined[name] += values
        assert text == whole["text"]
        assert joined == whole["logprobs"]


async def test_echo(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        plain = (await complete(client, prompt="hé", max_tokens=4)).json()["choices"][0]
        assert plain["logprobs"] is None
        echoed = (await complete(client, prompt="hé", max_tokens=4, echo=True)).json()
        assert echoed["choices"][0]["text"] == "hé" + plain["text"]
        assert echoed["usage"]["completion_tokens"] == 4
        body = (await complete(client, prompt="hé", max_tokens=4, echo=True, logprobs=1)).json()
        choice, prompt = body["choices"][0], list("hé".encode())
        assert choice["text"] == "hé" + plain["text"]
        found = choice["logprobs"]
        every = [*prompt, *expected(prompt, 4)]
        assert found["tokens"] == [spelled(token) for token in every]
        assert found["token_logprobs"] == [None, *(own(token) for token in every[1:])]
        assert found["top_logprobs"][0] is None
        # Both bytes of é begin where é does.
        assert found["text_offset"][:4] == [0, 1, 1, 2]
        ids = (await complete(client, prompt=prompt, max_tokens=4, echo=True, logprobs=1)).json()
        assert ids["choices"] == body["choices"]
        assert [request.prompt_logprobs for request in prefills(here)] == [False, False, True, True]
        await here.quiet()


def prefills(here: Site) -> list[Any]:
    return here.worker("prefill-0").prefill.requests


async def test_the_prompt_alone(site: SiteMaker) -> None:
    """max_tokens 0 needs echo; without logprobs no worker is called, with them only prefill."""
    async with site() as here, http(here) as client:
        body = (await complete(client, prompt="abcdefgh", max_tokens=0, echo=True)).json()
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abcdefgh", "length")
        assert body["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": 0,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert not prefills(here)
        fields = {"prompt": "abcdefgh", "max_tokens": 0, "echo": True, "logprobs": 3}
        choice = (await complete(client, **fields)).json()["choices"][0]
        assert choice["text"] == "abcdefgh"
        assert choice["logprobs"]["token_logprobs"] == [None, *(own(token) for token in b"bcdefgh")]
        assert len(prefills(here)) == 1
        assert not here.worker("decode-0").decode.reserves
        chunks = [chunk async for chunk in events(client, **fields)]
        assert [chunk["choices"][0] for chunk in chunks] == [choice]
        longest = [3] * 256
        assert (await complete(client, prompt=longest, max_tokens=0, echo=True)).status_code == 200
        assert (await complete(client, prompt=longest, max_tokens=1, echo=True)).status_code == 400
        await here.quiet()


async def test_the_prompt_alone_is_tried_again(site: SiteMaker) -> None:
    async with site(prefill=0, decode=0, both=1) as here, http(here) as client:
        here.worker("both-0").behaviour.break_prefills = 1
        fields = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
        assert (await complete(client, **fields)).status_code == 200
        here.worker("both-0").behaviour.forget_logprobs = True
        response = await complete(client, **fields)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        await here.quiet()


async def test_logprobs_over_grpc(site: SiteMaker) -> None:
    async with site() as here:
        prompt = [5, 6, 7, 8, 9]
        responses = await here.generate(ids_request(prompt, 12, logprobs=2, echo=True))
        assert tokens_of(responses) == expected(prompt, 12)
        received = [one for response in responses for one in response.logprobs]
        assert received == [logprobs_of(token, 2) for token in expected(prompt, 12)]
        assert list(responses[0].prompt_logprobs) == [logprobs_of(token, 2) for token in prompt[1:]]
        assert not any(response.prompt_logprobs for response in responses[1:])
        assert responses[0].text.startswith(TOKENIZER.decode(prompt))
        (only,) = await here.generate(ids_request(prompt, 0, logprobs=0, echo=True))
        assert only.finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert len(only.prompt_logprobs) == 4
        plain = await here.generate(ids_request(prompt, 12))
        assert not any(response.logprobs or response.prompt_logprobs for response in plain)
        await here.quiet()


async def test_logprobs_survive_another_attempt(site: SiteMaker) -> None:
    async with site(decode=2) as here:
        here.worker("decode-0").behaviour.moves = here.worker("decode-1").behaviour.moves = 1
        here.worker("prefill-0").behaviour.break_prefills = 1
        here.worker("prefill-0").behaviour.break_at = "first"
        prompt = [1, 2, 3, 4]
        responses = await here.generate(ids_request(prompt, 12, logprobs=1, echo=True))
        assert tokens_of(responses) == expected(prompt, 12)
        received = [one for response in responses for one in response.logprobs]
        assert received == [logprobs_of(token, 1) for token in expected(prompt, 12)]
        assert responses[-1].trace.attempts >= 3
        assert [request.prompt_logprobs for request in prefills(here)][:2] == [True, False]
        await here.quiet()


@pytest.mark.parametrize("breaks", [0, 1])
@pytest.mark.parametrize("max_tokens", [12, 2])
async def test_decodes_tokens_may_overtake_prefills(site: SiteMaker, breaks: int, max_tokens: int) -> None:
    """Two streams report a request. Its output begins with the prompt's logprobs, even if prefill fails
    before it has reported them and decode has ended by then."""
    async with site() as here, http(here) as client:
        here.worker("prefill-0").behaviour.overtake_s = 0.1
        here.worker("prefill-0").behaviour.break_prefills = breaks
        here.worker("prefill-0").behaviour.break_at = "committed"
        prompt = [5, 6, 7, 8, 9]
        responses = await here.generate(ids_request(prompt, max_tokens, logprobs=1, echo=True))
        output = expected(prompt, max_tokens)
        assert tokens_of(responses) == output
        assert [one for response in responses for one in response.logprobs] == [
            logprobs_of(token, 1) for token in output
        ]
        assert list(responses[0].prompt_logprobs) == [logprobs_of(token, 1) for token in prompt[1:]]
        assert responses[-1].trace.attempts == 1 + breaks
        here.worker("prefill-0").behaviour.break_prefills = breaks
        body = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
        async for chunk in events(client, **body):
            found = chunk["choices"][0]["logprobs"]
            assert len(found["tokens"]) == len(found["token_logprobs"])
        await here.quiet()


async def test_a_worker_that_sends_no_logprobs(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("prefill-0").behaviour.forget_logprobs = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.generate(ids_request([1, 2, 3], 4, logprobs=1, echo=True))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        await here.quiet()


async def test_a_text_prompt_is_echoed_as_it_was_sent(site: SiteMaker) -> None:
    async with site() as here:
        request = GenerateRequest(model=MODEL, text="a<|end|>b", echo=True, max_tokens=1, temperature=0)
        responses = await here.generate(request)
        assert responses[0].text.startswith("a<|end|>b")
