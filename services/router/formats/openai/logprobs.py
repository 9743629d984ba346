"""Logprobs in the formats of OpenAI's two APIs.

JSON has no infinity: a token with probability 0 has the logprob -9999, as in OpenAI's API.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from baton.v1.types_pb2 import Logprobs
from services.router.request.request import Delta, Request
from services.router.text.token_texts import TokenTexts

LEAST_LOGPROB = -9999.0


def legacy_logprobs(texts: TokenTexts, request: Request, delta: Delta) -> dict[str, object]:
    """Formats `logprobs` of text completions, for the tokens of a delta, preceded by an echoed prompt's in
    the first. Its lists are iterators (see `json_pieces`). `text_offset` counts characters of the whole text;
    a token that is part of a character has the offset of that character.

    Its lists are iterators (see `json_pieces`). `text_offset` counts characters of the whole text; a token
    that is part of a character has the offset of that character.
    """
    ids: Sequence[int] = delta.token_ids
    offsets: Iterator[int] = iter(delta.offsets)
    logprobs: Sequence[bytes | None] = delta.logprobs
    if request.echo is not None:
        base = len(request.echo.text)
        offsets = (base + offset for offset in delta.offsets)
        if delta.opening:
            ids = [*request.prompt_ids, *ids]
            offsets = itertools.chain(request.echo.offsets, offsets)
            # The first token has no context, so it has no logprobs.
            logprobs = [None, *delta.prompt_logprobs, *logprobs]
    return {
        "tokens": (texts.text(token_id) for token_id in ids),
        "token_logprobs": (None if one is None else _own(one) for one in logprobs),
        "top_logprobs": (
            None if one is None else _by_text(texts, token_id, one)
            for token_id, one in zip(ids, logprobs, strict=True)
        ),
        "text_offset": offsets,
    }


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[bytes]
) -> dict[str, object]:
    """Formats `logprobs` of chat completions. Its list is an iterator (see `json_pieces`)."""
    content = (
        _chat_entry(texts, token_id, Logprobs.FromString(one))
        for token_id, one in zip(token_ids, logprobs, strict=True)
    )
    return {"content": content, "refusal": None}


def _chat_entry(texts: TokenTexts, token_id: int, one: Logprobs) -> dict[str, object]:
    return {
        **_chat_token(texts, token_id, one.logprob),
        "top_logprobs": [_chat_token(texts, other.token_id, other.logprob) for other in one.top],
    }


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": texts.text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(texts.data(token_id)),
    }


def _own(data: bytes) -> float:
    return _finite(Logprobs.FromString(data).logprob)


def _by_text(texts: TokenTexts, token_id: int, data: bytes) -> dict[str, float]:
    """The most likely tokens by text, best first, and the token itself. The first of equal texts counts."""
    logprobs = Logprobs.FromString(data)
    found: dict[str, float] = {}
    for other in logprobs.top:
        found.setdefault(texts.text(other.token_id), _finite(other.logprob))
    found.setdefault(texts.text(token_id), _finite(logprobs.logprob))
    return found


def _finite(logprob: float) -> float:
    """The logprob as JSON can carry it; NaN becomes the least."""
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB
