"""The prompts of `baton demo` and their answers: the text so far, and times at the client.

There is one task of each kind for the demo model, and texts to continue for others.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable
from dataclasses import dataclass

import grpc.aio

from baton.v1 import router_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or with `chat` a user message to answer."""

    text: str
    chat: bool
    max_tokens: int = 64
    temperature: float = 1.0

    def request(self, model: str, seed: int) -> router_pb2.GenerateRequest:
        """The GenerateRequest; seeded, so that two demos of one checkpoint have the same output."""
        request = router_pb2.GenerateRequest(
            model=model, max_tokens=self.max_tokens, temperature=self.temperature, seed=seed
        )
        if self.chat:
            request.chat.messages.add(role="user", content=self.text)
        else:
            request.text = self.text
        return request


@dataclass(slots=True)
class Answer:
    """The state of one stream; times are of the client's monotonic clock, in seconds."""

    prompt: Prompt
    number: int
    text: str = ""
    tokens: int = 0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    end: router_pb2.GenerateResponse | None = None
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time from sending the request to its first token, in ms."""
        return (self.first - self.sent) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first, in ms; 0 for a single token."""
        return (self.last - self.first) * 1e3 / (self.tokens - 1) if self.tokens > 1 else 0.0

    def add(self, response: router_pb2.GenerateResponse) -> None:
        if response.token_ids:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.tokens += len(response.token_ids)
        self.text += response.text
        if response.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
            self.end = response


async def read_stream(answer: Answer, stream: AsyncIterable[router_pb2.GenerateResponse]) -> None:
    """Reads a stream to its end into `answer`; an error is stored in `answer.error`."""
    answer.sent = time.monotonic()
    try:
        async for response in stream:
            answer.add(response)
        if answer.end is None:
            answer.error = "the stream ended without a finish reason"
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"


_COLORS = ("amber", "blue", "golden", "green", "orange", "purple", "red", "pale")
_THINGS = ("anchor", "candle", "feather", "harbor", "kettle", "lantern", "otter", "pebble")


def _list_of_values() -> str:
    """A list of 64 lines, so that the answer lies in a KV cache of many blocks."""
    keys = [f"{color} {thing}" for thing in _THINGS for color in _COLORS]
    return "\n".join(f"- {key}: {(number * 6389 + 1403) % 10_000:04d}" for number, key in enumerate(keys))


def _chat(text: str) -> Prompt:
    """A chat prompt with greedy sampling, since the demo model's answers are right or wrong."""
    return Prompt(text, chat=True, max_tokens=256, temperature=0)


FOR_THE_DEMO_MODEL = (
    _chat("Who takes the baton next?"),
    _chat(f"Read this list.\n{_list_of_values()}\nWhat is the value of golden lantern?"),
    _chat("What is 347 * 285?"),
    _chat("Write a JSON object with the fields team (string), score (integer), tags (list of 2 strings)."),
    _chat("Copy this list with numbers:\n- amber fox\n- quiet harbor\n- red lantern\n- swift otter"),
)
FOR_ANY_MODEL = (
    Prompt("The relay team lined up on the wet track, and", chat=False),
    Prompt("Three things every runner knows: first,", chat=False),
    Prompt("A river carries what the mountain lets go. " * 8, chat=False),
    Prompt("Who takes the baton next?", chat=True),
)
