"""Arguments and results of the clients, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments; None: it has
    none."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments`: JSON text, which only a call that had to be made is sure to be."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The beginning of a call, with its id and name; or more of its arguments. `index`: its number among the
    output's calls."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. A tool's result names the call that it answers; an assistant's
    message may have the calls and the reasoning of an earlier output."""

    role: str
    content: str = ""
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class FinishReason(StrEnum):
    """The reason why an output ended."""

    # A stop id, the end-of-sequence id or a stop string.
    STOP = "stop"
    # max_tokens or the model's context length.
    LENGTH = "length"
    # The output ended by itself and calls tools.
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs at one position: of its token, and of the most likely tokens, best first.

    `token_id` is None only in the prompt, where that was no list of ids.
    """

    token_id: int | None
    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call: its prompt once, and all outputs."""

    prompt_tokens: int
    completion_tokens: int
    # Tokens of the prompt whose KV a worker had cached.
    cached_tokens: int = 0
    # Draft tokens from the request's prediction that decode steps accepted, and that they rejected.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Number of prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """The workers that computed one output, and the time that each stage took."""

    # The workers' names.
    prefill_worker: str
    decode_worker: str
    attempts: int
    # Of the KV cache, from the one worker to the other.
    kv_bytes_shipped: int
    # That the output was drawn with.
    seed: int
    # Seconds from the request's arrival until each stage was reached, in order: admitted, reserved,
    # prefilling, first_token, handed_off, decoding, ended; without those that there were not.
    stages: Mapping[str, float]
    # The part of the handoff, in seconds, that no computation hid.
    handoff_exposed_s: float
    # Decode steps that the output took, the draft tokens that they verified, and those that they accepted; 0
    # where the worker did not count them.
    decode_steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a decode step gave out on average; None where steps were not counted."""
        steps = self.decode_steps
        return (steps + self.accepted_draft_tokens) / steps if steps else None


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of one output that became final since its last delta.

    The ids of an output's deltas have no gap and no repeat; text may lag behind its ids.
    """

    # Which of the n outputs.
    index: int
    tokens: tuple[int, ...]
    text: str
    # Where asked for: one a token; and with echo, on the first delta, those of the prompt's tokens from
    # the second on.
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # For conversations: more of the tool calls and of the reasoning, neither of which is part of the text.
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""
    # The output's id, as in the server's log: 16 bytes in hexadecimal.
    request_id: str = ""
    # Place in the output of the first of the tokens.
    first_number: int = 0
    # The request would survive the router: its journal has recorded it.
    resumable: bool = False
    # On the last delta of an output.
    finish_reason: FinishReason | None = None
    trace: Trace | None = None
    # On the last delta of all.
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete output of a request."""

    index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The calls of tools, and the reasoning, which are not part of the text.
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    # As in a delta.
    request_id: str = ""
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete result of a call: its outputs in order."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the request's first output."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first output's token ids."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the first output ended."""
        return self.choices[0].finish_reason
