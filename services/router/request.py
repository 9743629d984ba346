"""A request as a door heard it, and as the dispatcher takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.v1.router_pb2 import RequestTrace, Usage
from baton.v1.types_pb2 import FinishReason, Sampling


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatTurn, ...]


@dataclass(frozen=True)
class Asked:
    """What a client asked, in its own words: nothing is checked yet, None means unset.

    `token_ids` and `text` and `chat` are the three ways to give a prompt; a door sets one.
    """

    model: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[ChatTurn, ...] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None


@dataclass(frozen=True)
class Request:
    """A request that may run: checked, tokenised, seeded. Immutable; attempts refer to it."""

    # 16 random bytes.
    id: bytes
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    # Of the whole output, whatever the attempts; prompt and output fit the context.
    max_tokens: int
    # What ends a sequence at a worker, the model's end-of-sequence ids included.
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    skip_special_tokens: bool
    # Monotonic clock: when the door heard it, and when nobody waits for it any more.
    arrived_ns: int
    deadline: float


class Finish(Enum):
    """Why an output ended; the values are those of `baton.v1.FinishReason`."""

    STOP = FinishReason.FINISH_REASON_STOP
    LENGTH = FinishReason.FINISH_REASON_LENGTH


@dataclass
class Delta:
    """Everything that became certain since the last one.

    The ids of a request's deltas have no gap and no repeat; text may lag behind its ids.
    """

    first_number: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    # Set on the last one, with usage and trace.
    finish: Finish | None = None
    usage: Usage | None = None
    trace: RequestTrace | None = None
