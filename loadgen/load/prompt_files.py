"""Reads the user's own prompts.

JSONL, one request per line: `prompt` (text or token ids) or `messages`, and `output_len` where it differs
from the flag. Or ShareGPT's JSON: the human messages are the turns, and the server's own answers come between
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.common.errors import LoadgenError, reason_of
from loadgen.common.settings import Form, Settings
from loadgen.load.alphabet import Content
from loadgen.load.distributions import Distribution
from loadgen.load.workload import Conversation, Mix

_ORDER = 31


@dataclass(frozen=True, slots=True)
class Written:
    """One request or conversation of a file: the user's messages, turn by turn."""

    turns: tuple[Content, ...]
    output_tokens: int | None = None


def read_prompts(path: str) -> tuple[Written, ...]:
    """All prompts of a file. Raises LoadgenError for the first invalid entry."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadgenError(f"{path}: {reason_of(error)}") from None
    written: list[Written] = []
    try:
        for document in _documents(text):
            written.append(_written(document))
    except (ValueError, KeyError, TypeError) as error:
        raise LoadgenError(f"{path}: entry {len(written) + 1}: {reason_of(error)}") from None
    if not written:
        raise LoadgenError(f"{path} has no prompt")
    return tuple(written)


def form_of(prompts: tuple[Written, ...], asked: Form) -> Form:
    """The form in which they can be sent. Raises LoadgenError where the file has both ids and text, or ids
    for a chat."""
    ids = {isinstance(turn, list) for one in prompts for turn in one.turns}
    if ids == {True}:
        if asked == "chat":
            raise LoadgenError("token ids cannot be sent as a chat")
        return "ids"
    if ids == {False}:
        return "chat" if asked == "chat" else "text"
    raise LoadgenError("a file of prompts has either token ids or text")


class FileWorkload:
    """A file's prompts in a seeded order, repeated."""

    def __init__(self, settings: Settings, prompts: tuple[Written, ...]) -> None:
        self._prompts = prompts
        self._mix = Mix(settings)
        self._output = Distribution.parse(settings.prompts.output_len)
        self._order = np.random.default_rng([settings.load.seed, _ORDER]).permutation(len(prompts))

    def conversation(self, number: int) -> Conversation | None:
        """Conversation `number`; from `len` on prompts repeat."""
        one = self._prompts[int(self._order[number % len(self._order)])]
        random = self._mix.random(number)
        klass = self._mix.klass(random)
        turns = tuple(
            self._mix.turn(
                random,
                content,
                len(content) if isinstance(content, list) else None,
                one.output_tokens or self._output.draw_length(random),
                first=place == 0,
            )
            for place, content in enumerate(one.turns)
        )
        return Conversation(number, klass, turns)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    if text.lstrip().startswith("["):
        yield from json.loads(text)
    else:
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)


def _written(document: dict[str, Any]) -> Written:
    if "conversations" in document:
        turns = [one["value"] for one in document["conversations"] if one["from"] in ("human", "user")]
    elif "messages" in document:
        turns = [one["content"] for one in document["messages"] if one["role"] == "user"]
    else:
        prompt = document["prompt"] if "prompt" in document else document["token_ids"]
        turns = [prompt]
    for turn in turns:
        is_ids = isinstance(turn, list) and all(type(token) is int and token >= 0 for token in turn)
        if not turn or not (isinstance(turn, str) or is_ids):
            raise ValueError("a prompt is a text or a list of token ids")
    if not turns:
        raise ValueError("no message of a user")
    length = document.get("output_len")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError("output_len is no number of tokens")
    return Written(tuple(turns), length)
