"""Streams of scripted outputs as bytes, and the golden files that hold them.

python -m tests.router.api.golden_streams        writes them
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from baton.base.errors import BatonError, ErrorKind
from baton.v1.router_pb2 import Usage
from baton.v1.types_pb2 import Logprobs, Sampling, TokenLogprob
from services.router.api.openai_response import CompletionResponse
from services.router.api.responses_answer import ResponsesAnswer
from services.router.formats.openai.chat import ChatBody, ChatFormatter
from services.router.formats.openai.completions import CompletionBody, CompletionFormatter
from services.router.formats.responses.body import ResponsesBody
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.request.request import Delta, Finish, Request
from services.router.text.token_texts import TokenTexts
from services.router.tools.call_reader import Tools
from services.router.tools.families import HERMES, LLAMA3, MISTRAL
from services.router.tools.output_parser import OutputStructure
from tests.router.conftest import MODEL, byte_tokenizer

FOLDER = Path(__file__).parent / "golden"
# Seconds of Unix time at which every golden response was made.
CREATED = 1_700_000_000
PROMPT = (1, 2, 3)
MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
Script = Sequence[tuple[int, Delta]]


class ScriptedDispatcher(Dispatcher):
    """Yields a script's deltas; then raises its error, if it has one."""

    def __init__(self, script: Script, error: Exception | None) -> None:
        self._script = script
        self._error = error

    @asynccontextmanager
    async def stream(self, requests: Sequence[Request]) -> AsyncIterator[AsyncGenerator[tuple[int, Delta]]]:
        yield self._deltas()

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        for index, delta in self._script:
            yield index, delta
        if self._error is not None:
            raise self._error


def deltas(*texts: str, finish: Finish | None = Finish.STOP, logprobs: bool = False) -> list[Delta]:
    """An output with a token for each byte; the last delta ends it."""
    parts, number = [], 0
    for text in texts:
        ids = list(text.encode())
        part = Delta(number, token_ids=ids, text=text, opening=not number)
        if logprobs:
            part.logprobs = [_logprobs(token_id) for token_id in ids]
            part.offsets = list(range(number, number + len(ids)))
        parts.append(part)
        number += len(ids)
    if finish is not None:
        parts[-1].finish = finish
        parts[-1].usage = Usage(prompt_tokens=len(PROMPT), completion_tokens=number, cached_tokens=2)
    return parts


def _logprobs(token_id: int) -> bytes:
    best = [TokenLogprob(token_id=token_id, logprob=-0.25), TokenLogprob(token_id=97, logprob=-1.5)]
    return Logprobs(logprob=-0.25, top=best).SerializeToString()


def one(*parts: Delta) -> Script:
    return [(0, part) for part in parts]


def two() -> Script:
    first, second = deltas("ab", "c"), deltas("xy", finish=Finish.LENGTH)
    return [(0, first[0]), (1, second[0]), (0, first[1])]


HERMES_OUTPUT = (
    "I will loo",
    'k.\n<tool_call>\n{"name": "we',
    'ather", "arguments": {"city": "Zü',
    'rich"}}\n</tool_call>',
    '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n',
)
LLAMA3_OUTPUT = ('{"name": "weather", "par', 'ameters": {"city": "Bern", "days": [1, 2]}}')
MISTRAL_OUTPUT = ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": ', '"Ber')
_TOOLS: Tools = {"weather": {}, "f": {}}
# Structures of the cases whose outputs have one.
STRUCTURES = {
    "tools-hermes": OutputStructure(HERMES, _TOOLS),
    "tools-llama3": OutputStructure(LLAMA3, _TOOLS),
    "tools-mistral": OutputStructure(MISTRAL, _TOOLS),
    "tools-none-called": OutputStructure(HERMES, _TOOLS),
    "tools-logprobs": OutputStructure(LLAMA3, _TOOLS),
    "reasoning": OutputStructure(reasoning=True),
    "response-tools": OutputStructure(HERMES, _TOOLS),
    "response-cut-call": OutputStructure(MISTRAL, _TOOLS),
    "response-reasoning": OutputStructure(reasoning=True),
}
LOST = BatonError(ErrorKind.UNAVAILABLE, "gave up after 3 attempts: a worker was lost")
# Name → the path, the fields of the body, the script, the error that ends it.
CASES: Mapping[str, tuple[str, dict[str, Any], Script, BatonError | None]] = {
    "completion": ("completions", {}, one(*deltas("Hé", "llo\n")), None),
    "completion-usage": ("completions", {"stream_options": USAGE}, one(*deltas("Hel", "lo")), None),
    "completion-continuous": ("completions", {"stream_options": CONTINUOUS, "n": 2}, two(), None),
    "completion-logprobs": ("completions", {"logprobs": 2}, one(*deltas("a", "b", logprobs=True)), None),
    "completion-token-ids": ("completions", {"return_token_ids": True}, one(*deltas("ab")), None),
    "completion-lost": ("completions", {}, one(*deltas("Hel", finish=None)), LOST),
    "chat": ("chat", {}, one(*deltas("Hel", "lo")), None),
    "chat-usage": ("chat", {"stream_options": USAGE}, one(*deltas("Hello", finish=Finish.LENGTH)), None),
    "chat-continuous": ("chat", {"stream_options": CONTINUOUS, "n": 2}, two(), None),
    "chat-logprobs": ("chat", {"logprobs": True, "top_logprobs": 2}, one(*deltas("ab", logprobs=True)), None),
    "chat-lost": ("chat", {}, one(*deltas("Hel", finish=None)), LOST),
    "tools-hermes": ("chat", {}, one(*deltas(*HERMES_OUTPUT)), None),
    "tools-llama3": ("chat", {"stream_options": USAGE}, one(*deltas(*LLAMA3_OUTPUT)), None),
    "tools-mistral": ("chat", {}, one(*deltas(*MISTRAL_OUTPUT, finish=Finish.LENGTH)), None),
    "tools-none-called": ("chat", {}, one(*deltas("It is ", "warm.")), None),
    "tools-logprobs": (
        "chat",
        {"logprobs": True, "top_logprobs": 2},
        one(*deltas('{"name": "f"', "}", logprobs=True)),
        None,
    ),
    "reasoning": ("chat", {}, one(*deltas("<thi", "nk>\nHm, 2", " and 2\n</think>\n\nIt is", " 4.")), None),
    "response": ("responses", {"instructions": "Be brief."}, one(*deltas("Hé", "llo\n")), None),
    "response-incomplete": (
        "responses",
        {"max_output_tokens": 5, "temperature": 0},
        one(*deltas("Hello", finish=Finish.LENGTH)),
        None,
    ),
    "response-logprobs": ("responses", {"top_logprobs": 2}, one(*deltas("a", "b", logprobs=True)), None),
    "response-tools": ("responses", {}, one(*deltas(*HERMES_OUTPUT)), None),
    "response-cut-call": ("responses", {}, one(*deltas(*MISTRAL_OUTPUT, finish=Finish.LENGTH)), None),
    "response-reasoning": (
        "responses",
        {},
        one(*deltas("<thi", "nk>\nHm, 2", " and 2\n</think>\n\nIt is", " 4.")),
        None,
    ),
    "response-lost": ("responses", {}, one(*deltas("Hel", finish=None)), LOST),
}


def stream_of(name: str) -> bytes:
    """The whole body of a case's stream."""
    path, fields, script, error = CASES[name]
    texts = TokenTexts(byte_tokenizer())
    dispatcher = ScriptedDispatcher(script, error)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    with (
        mock.patch.object(secrets, "token_hex", _hex),
        mock.patch.object(secrets, "choice", min),
        mock.patch.object(time, "time", _now),
    ):
        answer: CompletionResponse | ResponsesAnswer
        if path == "responses":
            body = ResponsesBody.parse({"model": MODEL, "input": "hi", **fields})
            request = dataclasses.replace(
                request_of(0, logprobs=body.wants_logprobs), structure=STRUCTURES.get(name)
            )
            answer = ResponsesAnswer(dispatcher, body, request, texts)
        elif path == "chat":
            chat = ChatBody.parse({"model": MODEL, "messages": MESSAGES, **fields})
            structure = STRUCTURES.get(name)
            requests = [
                dataclasses.replace(request_of(choice, logprobs=chat.logprobs is True), structure=structure)
                for choice in range(fields.get("n", 1))
            ]
            answer = CompletionResponse(
                dispatcher, MODEL, requests, ChatFormatter(chat, texts), chat.stream_options
            )
        else:
            plain = CompletionBody.parse({"model": MODEL, "prompt": "hi", **fields})
            requests = [
                request_of(choice, logprobs=plain.logprobs is not None)
                for choice in range(fields.get("n", 1))
            ]
            formatter = CompletionFormatter(plain, texts)
            answer = CompletionResponse(dispatcher, MODEL, requests, formatter, plain.stream_options)
        asyncio.run(answer.stream(send))
    return b"".join(sent)


def _hex(count: int) -> str:
    return "01" * count


def _now() -> float:
    return CREATED + 0.5


def request_of(choice: int = 0, *, logprobs: bool = False) -> Request:
    """An admitted request for one choice."""
    sampling = Sampling(logprobs=2) if logprobs else Sampling()
    return Request(
        id=bytes(16),
        prompt_ids=PROMPT,
        sampling=sampling,
        max_tokens=16,
        stop_token_ids=(),
        stop=(),
        skip_special_tokens=True,
        arrived_ns=0,
        deadline=0.0,
        choice=choice,
    )


def file_of(name: str) -> Path:
    """The golden file of a case."""
    return FOLDER / f"{name}.sse"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.iterdir():
        file.unlink()
    for name in CASES:
        file_of(name).write_bytes(stream_of(name))


if __name__ == "__main__":
    main()
