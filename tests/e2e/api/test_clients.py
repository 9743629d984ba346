"""The clients that people use, unchanged, before a real cluster: OpenAI's own and Baton's own."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer

from baton.client import AsyncClient, BatonError, Client, ErrorKind, FieldError, FinishReason, Message, Usage
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free
from tests.support.checkpoints import ASSISTANT_ID, BEGIN_ID, END_ID, USER_ID, VOCAB_SIZE
from tests.support.reference import load_reference, raw_logits, reference_greedy
from tests.support.sampling.naive_sampler import naive_logprobs
from tests.support.text_truth import TextTruth

COUNT = 12
TEXT = "Once upon a time"
QUESTION = "What is Baton?"


class Truth:
    """Greedy outputs of the reference model after a prompt."""

    def __init__(self, model: Path) -> None:
        self.tokenizer: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._reference = load_reference(model)

    def ids(self, prompt: list[int]) -> list[int]:
        with torch.inference_mode():
            return reference_greedy(self._reference, prompt, COUNT)

    def text(self, prompt: list[int]) -> str:
        """The answer's text, without the end token."""
        ids = self.ids(prompt)
        text: str = self.tokenizer.decode(ids[: ids.index(END_ID)] if END_ID in ids else ids)
        return text

    def finish(self, prompt: list[int]) -> str:
        return "stop" if END_ID in self.ids(prompt) else "length"

    def logprobs(self, ids: list[int], count: int) -> list[tuple[float, list[float]]]:
        """Logprobs of each token from the second on: its own and the `count` largest."""
        rows = raw_logits(self._reference, ids)
        reported = [naive_logprobs(row, token, count) for row, token in zip(rows, ids[1:], strict=False)]
        return [(own, [value for _, value in top]) for own, top in reported]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def chat(self, question: str) -> list[int]:
        """The prompt that the checkpoint's template makes."""
        return [BEGIN_ID, USER_ID, *self.encode(question, special=False), END_ID, ASSISTANT_ID]


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return Truth(model)


def options(cluster: Cluster) -> dict[str, Any]:
    return {"base_url": f"{cluster.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}


def usage_of(usage: Any) -> tuple[int, int, int]:
    return (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def wanted_usage(truth: Truth, *prompts: list[int]) -> tuple[int, int, int]:
    prompt, completion = sum(map(len, prompts)), 0
    for one in prompts:
        ids = truth.ids(one)
        completion += ids.index(END_ID) + 1 if END_ID in ids else COUNT
    return prompt, completion, prompt + completion


def test_openai_completions(cluster: Cluster, truth: Truth) -> None:
    prompts = [truth.encode(TEXT), truth.encode("Two")]
    with openai.OpenAI(**options(cluster)) as client:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": COUNT, "temperature": 0}
        whole = client.completions.create(prompt=[TEXT, "Two"], **asked)
        assert whole.object == "text_completion"
        assert [choice.index for choice in whole.choices] == [0, 1]
        for choice, prompt in zip(whole.choices, prompts, strict=True):
            assert (choice.text, choice.finish_reason) == (truth.text(prompt), truth.finish(prompt))
        assert whole.usage is not None
        assert usage_of(whole.usage) == wanted_usage(truth, *prompts)
        with client.completions.create(
            prompt=TEXT, stream=True, stream_options={"include_usage": True}, **asked
        ) as stream:
            chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == truth.finish(prompts[0])
        assert chunks[-1].choices == []
        assert usage_of(chunks[-1].usage) == wanted_usage(truth, prompts[0])
        twice = client.completions.create(prompt=TEXT, n=2, **asked)
        assert [choice.text for choice in twice.choices] == [whole.choices[0].text] * 2
        assert twice.usage is not None
        assert twice.usage.prompt_tokens == len(prompts[0])


def test_openai_chat(cluster: Cluster, truth: Truth) -> None:
    prompt = truth.chat(QUESTION)
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_completion_tokens": COUNT,
        "temperature": 0,
    }
    with openai.OpenAI(**options(cluster)) as client:
        whole = client.chat.completions.create(**asked)
        (choice,) = whole.choices
        assert (choice.message.role, choice.message.content) == ("assistant", truth.text(prompt))
        assert choice.finish_reason == truth.finish(prompt)
        assert usage_of(whole.usage) == wanted_usage(truth, prompt)
        chunks = list(
            client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
        )
        deltas = [chunk.choices[0] for chunk in chunks[:-1]]
        assert deltas[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in deltas) == choice.message.content
        assert [one.finish_reason for one in deltas[-2:]] == [None, choice.finish_reason]
        assert usage_of(chunks[-1].usage) == usage_of(whole.usage)
        # The answer goes back in as the SDK gives it, and the SDK's own accumulating stream works.
        again = [*asked["messages"], choice.message, {"role": "user", "content": "And?"}]
        client.chat.completions.create(**{**asked, "messages": again})
        stop = (choice.message.content or "")[-1]
        with client.chat.completions.stream(stop=stop, **asked) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == (choice.message.content or "").split(stop)[0]
        # No limit: all that the context has left. The client has read enough before that.
        endless = {name: asked[name] for name in ("model", "messages")}
        with client.chat.completions.create(
            stream=True, extra_body={"ignore_eos": True}, **endless
        ) as unlimited:
            for _, _chunk in zip(range(5), unlimited, strict=False):
                pass


async def test_openai_async(cluster: Cluster, truth: Truth) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    async with openai.AsyncOpenAI(**options(cluster)) as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": TEXT, "max_tokens": COUNT, "temperature": 0}
        wholes = await asyncio.gather(*(client.completions.create(**asked) for _ in range(4)))
        assert {whole.choices[0].text for whole in wholes} == {truth.text(truth.encode(TEXT))}
        stream = await client.completions.create(stream=True, **asked)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == wholes[0].choices[0].text
        create: Any = client.chat.completions.create
        whole = await create(max_tokens=COUNT, **chat)
        text = truth.text(truth.chat(QUESTION))
        assert whole.choices[0].message.content == text
        parts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await create(stream=True, max_tokens=COUNT, **chat)
        ]
        assert "".join(parts) == text
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        await assert_all_free(cluster, within_s=2)


@pytest.fixture(scope="module")
def readable(model: Path) -> dict[str, Any]:
    """Draws only what is text by itself, so that an answer is its tokens' texts side by side."""
    texts = TextTruth(model)
    others = [
        token
        for token in range(VOCAB_SIZE)
        if not texts.data(token).isascii() or not texts.spelled(token).isprintable() or token >= BEGIN_ID
    ]
    assert len(others) < 300
    bias = {str(token): -100 for token in others}
    return {"model": MODEL, "temperature": 0, "max_tokens": COUNT, "logit_bias": bias}


def test_openai_completions_logprobs(cluster: Cluster, truth: Truth, readable: dict[str, Any]) -> None:
    asked = {**readable, "prompt": TEXT, "logprobs": 3, "echo": True}
    with openai.OpenAI(**options(cluster)) as client:
        create: Any = client.completions.create
        (choice,) = create(**asked).choices
        logprobs = choice.logprobs
        prompt = truth.encode(TEXT)
        assert len(logprobs.tokens) == len(prompt) + COUNT
        assert "".join(logprobs.tokens) == choice.text
        assert choice.text.startswith(TEXT)
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset : offset + len(token)] == token
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        places = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
        ids = [truth.tokenizer.token_to_id(token.replace(" ", "Ġ")) for token in logprobs.tokens]
        for (own, top), (wanted, likeliest) in zip(places, truth.logprobs(ids, 3), strict=True):
            assert own == pytest.approx(wanted, abs=1e-6)
            assert list(top.values())[:3] == pytest.approx(likeliest, abs=1e-6)
            assert len(top) == 3 + (own not in list(top.values())[:3])
        chunks = [chunk.choices[0] for chunk in create(stream=True, **asked)]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for chunk in chunks for one in getattr(chunk.logprobs, field)] == getattr(
                logprobs, field
            )
        assert "".join(chunk.text for chunk in chunks) == choice.text
        only = create(**{**asked, "max_tokens": 0}).choices[0]
        assert (only.text, only.finish_reason) == (TEXT, "length")
        assert only.logprobs.token_logprobs == logprobs.token_logprobs[: len(prompt)]
        assert create(prompt=TEXT, **readable).choices[0].logprobs is None


def test_openai_chat_logprobs(cluster: Cluster, truth: Truth, readable: dict[str, Any]) -> None:
    asked = {**readable, "messages": [{"role": "user", "content": QUESTION}]}
    with openai.OpenAI(**options(cluster)) as client:
        create: Any = client.chat.completions.create
        (choice,) = create(logprobs=True, top_logprobs=4, **asked).choices
        content = choice.logprobs.content
        assert "".join(one.token for one in content) == choice.message.content
        assert all(bytes(one.bytes).decode() == one.token for one in content)
        ids = [truth.tokenizer.token_to_id(one.token.replace(" ", "Ġ")) for one in content]
        prompt = truth.chat(QUESTION)
        places = truth.logprobs([*prompt, *ids], 4)[len(prompt) - 1 :]
        for one, (wanted, likeliest) in zip(content, places, strict=True):
            assert one.logprob == pytest.approx(wanted, abs=1e-6)
            assert [other.logprob for other in one.top_logprobs] == pytest.approx(likeliest, abs=1e-6)
        chunks = [chunk.choices[0] for chunk in create(logprobs=True, top_logprobs=4, stream=True, **asked)]
        assert chunks[0].logprobs is chunks[-1].logprobs is None
        assert [one for chunk in chunks[1:-1] for one in chunk.logprobs.content] == content
        assert all(
            "".join(one.token for one in chunk.logprobs.content) == chunk.delta.content
            for chunk in chunks[1:-1]
        )
        (bare,) = create(logprobs=True, **asked).choices
        assert all(one.top_logprobs == [] for one in bare.logprobs.content)
        assert [one.logprob for one in bare.logprobs.content] == [one.logprob for one in content]
        assert create(**asked).choices[0].logprobs is None


def test_openai_errors(cluster: Cluster) -> None:
    with openai.OpenAI(**options(cluster)) as client:
        create: Any = client.completions.create
        for field, value in (("temperature", -1), ("max_tokens", -1), ("n", 500), ("stop", [""])):
            with pytest.raises(openai.BadRequestError) as refused:
                create(**{"model": MODEL, "prompt": "a", field: value})
            assert (refused.value.param, refused.value.type) == (field, "invalid_request_error")
            with pytest.raises(openai.BadRequestError):
                create(**{"model": MODEL, "prompt": "a", "stream": True, field: value})
        with pytest.raises(openai.NotFoundError) as unknown:
            create(model="other", prompt="a")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError) as audio:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "a"}], modalities=["audio"]
            )
        assert audio.value.param == "modalities"
        assert "not supported yet" in audio.value.message


def test_batons_own_client(cluster: Cluster, truth: Truth) -> None:
    prompt = truth.encode(TEXT)
    with Client.connect(cluster.grpc_address) as client:
        assert client.models() == [MODEL]
        whole = client.complete(TEXT, max_tokens=COUNT, temperature=0)
        ids = truth.ids(prompt)
        assert list(whole.tokens) == (ids[: ids.index(END_ID) + 1] if END_ID in ids else ids)
        assert whole.finish_reason is FinishReason(truth.finish(prompt))
        _, completion, _ = wanted_usage(truth, prompt)
        assert without_cache(whole.usage) == Usage(len(prompt), completion)
        deltas = list(client.generate(prompt, max_tokens=COUNT, temperature=0, n=2))
        for index in (0, 1):
            assert "".join(delta.text for delta in deltas if delta.index == index) == whole.text
        assert without_cache(deltas[-1].usage) == Usage(len(prompt), 2 * completion)
        chat = client.complete([Message("user", QUESTION)], max_tokens=COUNT, temperature=0)
        assert chat.text == truth.text(truth.chat(QUESTION))
        with pytest.raises(FieldError) as refused:
            client.complete("a", top_p=2.0)
        assert (refused.value.kind, refused.value.param) == (ErrorKind.INVALID, "top_p")


def without_cache(usage: Usage | None) -> Usage:
    """Less what others have left in it."""
    assert usage is not None
    return dataclasses.replace(usage, cached_tokens=0)


async def test_batons_own_async_client(cluster: Cluster, truth: Truth) -> None:
    async with await AsyncClient.connect(cluster.grpc_address) as client:
        asked: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0}
        answers = await asyncio.gather(*(client.complete(TEXT, **asked) for _ in range(4)))
        assert {answer.text for answer in answers} == {truth.text(truth.encode(TEXT))}
        with pytest.raises(BatonError) as late:
            await client.complete(TEXT, max_tokens=1900, ignore_eos=True, deadline=1.5)
        assert (late.value.kind, late.value.tokens_sent) == (ErrorKind.DEADLINE, True)
        async with client.generate(TEXT, max_tokens=1900, ignore_eos=True) as stream:
            await anext(stream)
        with pytest.raises(BatonError) as unknown:
            await AsyncClient(cluster.grpc_address, model="other").complete("a")
        assert unknown.value.kind is ErrorKind.NOT_FOUND
        await assert_all_free(cluster, within_s=2)
