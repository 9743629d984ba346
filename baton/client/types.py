"""Immutable values that clients send and receive."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


class FinishReason(StrEnum):
    """Why an output ended."""

    # A stop id, the end-of-sequence id or a stop string.
    STOP = "stop"
    # max_tokens or the model's context length.
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one position: of its token, and of the most likely tokens, best first.

    `token_id` is None for positions of a prompt that was not given as ids.
    """

    token_id: int | None
    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call: its prompt once, and all its outputs."""

    prompt_tokens: int
    completion_tokens: int
    # Prompt tokens that were found in a prefix cache.
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and outputs together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of one output.

    Token ids have no gaps and no repeats from delta to delta; text may lag behind the ids.
    """

    # The index of the output, from 0.
    index: int
    tokens: tuple[int, ...]
    text: str
    # If asked for: one for each token; with echo, the first delta also has those of the prompt's tokens from
    # the second on.
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # In the last delta of an output.
    finish_reason: FinishReason | None = None
    # In the last delta of the call.
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete output."""

    index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a call: its outputs in order."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first output's token ids."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.choices[0].finish_reason
