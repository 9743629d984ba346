"""Answers of both APIs in one form: whatever a API says of a request, the other must say too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import openai

from baton.client import AsyncClient, Message, TokenLogprobs
from baton.engine.shared_memory.logprob_records import Logprobs
from tests.e2e.support.cluster import MODEL
from tests.e2e.tokens.sampled_asks import Ask
from tests.support.text_truth import TextTruth

# What OpenAI's client has no argument for.
_EXTRA = (
    "top_k",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)


@dataclass(slots=True)
class Reported:
    """One choice, put together where it came in parts. `prompt_logprobs` from the second token on."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """All choices, and the tokens of prompt and output that were counted."""

    choices: list[Reported]
    usage: tuple[int, int]


class Api(Protocol):
    """The API through which a request is sent."""

    async def ask(self, ask: Ask) -> Answer:
        """Sends a request and returns the whole answer."""
        ...


class GrpcApi:
    """Asks with Baton's own gRPC client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, ask: Ask) -> Answer:
        """One streaming call, put together by the client."""
        prompt = [Message("user", ask.prompt)] if ask.chat and isinstance(ask.prompt, str) else ask.prompt
        whole = await self._client.complete(prompt, deadline=100, **ask.fields)
        choices = [
            Reported(
                list(choice.tokens),
                choice.text,
                str(choice.finish_reason),
                list(map(_logprobs, choice.logprobs)),
                list(map(_logprobs, choice.prompt_logprobs)),
            )
            for choice in whole.choices
        ]
        assert [choice.index for choice in whole.choices] == list(range(ask.choices))
        return Answer(choices, (whole.usage.prompt_tokens, whole.usage.completion_tokens))


class OpenAIApi:
    """Asks with OpenAI's client, streamed or whole, through completions or chat as the request is."""

    def __init__(self, client: openai.AsyncOpenAI, texts: TextTruth, *, stream: bool) -> None:
        self._client = client
        self._texts = texts
        self._stream = stream

    async def ask(self, ask: Ask) -> Answer:
        """One call; chunks are put together here."""
        create: Any = (self._client.chat if ask.chat else self._client).completions.create
        if not self._stream:
            whole = await create(**self.body(ask))
            parts, usage = whole.choices, whole.usage
        else:
            options = {"include_usage": True}
            chunks = [
                one async for one in await create(stream=True, stream_options=options, **self.body(ask))
            ]
            parts, usage = [part for one in chunks for part in one.choices], chunks[-1].usage
        choices: list[Reported] = [Reported() for _ in range(ask.choices)]
        for part in parts:
            self._add(choices[part.index], ask, part)
        if ask.logprobs is not None and not ask.chat:
            for index, reported in enumerate(choices):
                mine = [part.logprobs for part in parts if part.index == index]
                offsets = [offset for one in mine for offset in one.text_offset]
                assert offsets == self._offsets(ask, reported.tokens), ask
        return Answer(choices, (usage.prompt_tokens, usage.completion_tokens))

    def body(self, ask: Ask) -> dict[str, Any]:
        """The arguments of the client's call."""
        fields = dict(ask.fields)
        extra = {name: fields.pop(name) for name in _EXTRA if name in fields}
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
        if ask.chat:
            fields["messages"] = [{"role": "user", "content": ask.prompt}]
            if ask.logprobs is not None:
                fields["logprobs"], fields["top_logprobs"] = True, ask.logprobs
        else:
            fields["prompt"] = list(ask.prompt) if isinstance(ask.prompt, tuple) else ask.prompt
        return {"model": MODEL, **fields, "extra_body": {**extra, "return_token_ids": True}}

    def _add(self, reported: Reported, ask: Ask, part: Any) -> None:
        assert not reported.finish, "something after the choice's last"
        opening = not reported.tokens and not reported.text
        tokens = getattr(part, "token_ids", None) or []
        reported.tokens += tokens
        reported.finish = part.finish_reason or ""
        if ask.chat:
            content = part.delta if self._stream else part.message
            reported.text += content.content or ""
            if part.logprobs is not None:
                reported.logprobs += self._chat_logprobs(part.logprobs.content, tokens)
            return
        reported.text += part.text
        if ask.logprobs is None:
            assert part.logprobs is None
            return
        logprobs = self._completion_logprobs(part.logprobs, ask.logprobs)
        if ask.echo and opening:
            prompt = ask.prompt_ids(self._texts)
            assert part.logprobs.tokens[: len(prompt)] == [self._texts.spelled(token) for token in prompt]
            assert logprobs[0] is None
            reported.prompt_logprobs = [one for one in logprobs[1 : len(prompt)] if one is not None]
            logprobs = logprobs[len(prompt) :]
        reported.logprobs += [one for one in logprobs if one is not None]
        assert part.logprobs.tokens[len(part.logprobs.tokens) - len(tokens) :] == [
            self._texts.spelled(token) for token in tokens
        ]

    def _chat_logprobs(self, content: Sequence[Any], tokens: Sequence[int]) -> list[Logprobs]:
        for one, token in zip(content, tokens, strict=True):
            assert (one.token, bytes(one.bytes)) == (self._texts.spelled(token), self._texts.data(token))
            for other in one.top_logprobs:
                assert bytes(other.bytes) == self._texts.data(self._texts.id_of[other.token])
        return [
            Logprobs(
                one.logprob,
                tuple((self._texts.id_of[other.token], other.logprob) for other in one.top_logprobs),
            )
            for one in content
        ]

    def _completion_logprobs(self, logprobs: Any, count: int) -> list[Logprobs | None]:
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
        assert len(logprobs.tokens) == len(logprobs.text_offset)
        return [
            None if own is None else Logprobs(own, self._likeliest(token, own, top, count))
            for token, own, top in zip(
                logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
            )
        ]

    def _offsets(self, ask: Ask, tokens: Sequence[int]) -> list[int]:
        """Offsets at which each token's text begins, those of an echo included."""
        offsets = self._texts.offsets(tokens, skip_special=ask.skip_special)
        if not ask.echo:
            return offsets
        prompt = ask.prompt_ids(self._texts)
        base = len(ask.echoed(self._texts))
        return [
            *self._texts.offsets(prompt, skip_special=ask.skip_special),
            *(base + offset for offset in offsets),
        ]

    def _likeliest(
        self, token: str, own: float, top: Mapping[str, float], count: int
    ) -> tuple[tuple[int, float], ...]:
        """The object names the token itself behind the likeliest, where it is none of them."""
        assert top[token] == own
        assert list(top)[count:] in ([], [token])
        return tuple((self._texts.id_of[text], logprob) for text, logprob in list(top.items())[:count])


def _logprobs(one: TokenLogprobs) -> Logprobs:
    return Logprobs(one.logprob, tuple((other.token_id, other.logprob) for other in one.top))
