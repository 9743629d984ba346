"""A request as a door heard it, and as the dispatcher takes it."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.v1.router_pb2 import RequestTrace, Usage
from baton.v1.types_pb2 import FinishReason, Limits, Sampling
from services.router.request.client_call import ClientCall


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation; None is left out of what the template sees."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation, and how the model's template is to write it."""

    turns: tuple[ChatTurn, ...]
    add_generation_prompt: bool = True
    # Further variables for the template; None: none.
    template_variables: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Asked:
    """What a client asked, in its own words: nothing is checked yet, None means unset.

    `token_ids` and `text` and `chat` are the three ways to give a prompt; a door sets one. Of a large request
    a helper process has tokenised the prompt already: then `prepared` has its ids, checked against the
    vocabulary, and `text`, if anything, what `echo` repeats.
    """

    model: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: Chat | None = None
    prepared: tuple[int, ...] | None = None
    # Of a text prompt: whether the tokenizer adds what it puts around texts.
    add_special_tokens: bool = True
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # (token id, bias)
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    # Whether an unset max_tokens means all that the context has left.
    fills_context: bool = False
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    echo: bool = False
    n: int | None = None
    best_of: int | None = None
    # Our field names → what this door calls them, where it differs.
    names: Mapping[str, str] = field(default_factory=dict)
    # Shared by all that `dataclasses.replace` makes of it: the prompts of one client call.
    call: ClientCall = field(default_factory=ClientCall, compare=False, repr=False)

    def named(self, name: str) -> str:
        """What the client calls our field."""
        return self.names.get(name, name)


@dataclass(frozen=True)
class Echo:
    """A prompt that its answer begins with."""

    text: str
    # Where each token's text begins in `text`; empty where nobody asked for logprobs.
    offsets: Sequence[int] = ()


@dataclass(frozen=True)
class Request:
    """A request that may run: checked, tokenised, seeded. Immutable; attempts refer to it.

    One output: a client that asks for n of them gets n requests, which share all but id, seed, choice.
    """

    # 16 random bytes.
    id: bytes
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    # Of the whole output, whatever the attempts; prompt and output fit the context. 0: only the prompt.
    max_tokens: int
    # What ends a sequence at a worker, the model's end-of-sequence ids included.
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    skip_special_tokens: bool
    # Monotonic clock: when the door heard it, and when nobody waits for it any more.
    arrived_ns: int
    deadline: float
    # Output tokens before which neither a stop id nor a stop string ends it.
    min_tokens: int = 0
    echo: Echo | None = None
    # Which of its prompt's outputs this is, from 0.
    choice: int = 0
    # What it shares with the other requests of its client's call.
    call: ClientCall = field(default_factory=ClientCall, compare=False, repr=False)

    @property
    def limits(self) -> Limits:
        """When a worker ends it, in the wire's words."""
        return Limits(
            max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids, min_tokens=self.min_tokens
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token of the output comes with logprobs."""
        return self.sampling.HasField("logprobs")

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's tokens come with logprobs, too."""
        return self.echo is not None and self.wants_logprobs


class Finish(Enum):
    """Why an output ended; the values are those of `baton.v1.FinishReason`."""

    STOP = FinishReason.FINISH_REASON_STOP
    LENGTH = FinishReason.FINISH_REASON_LENGTH

    @property
    def word(self) -> str:
        """OpenAI's word for it."""
        return self.name.lower()


@dataclass
class Delta:
    """Everything that became certain since the last one.

    The ids of a request's deltas have no gap and no repeat; text may lag behind its ids.
    """

    first_number: int
    token_ids: MutableSequence[int] = field(default_factory=list)
    text: str = ""
    # Where asked for, one a token: its `Logprobs`, serialised, and where its text begins in the output's.
    logprobs: list[bytes] = field(default_factory=list)
    offsets: MutableSequence[int] = field(default_factory=list)
    # On the first one, where asked for: those of the prompt's tokens from the second on.
    prompt_logprobs: list[bytes] = field(default_factory=list)
    # Whether it is the output's first.
    opening: bool = False
    # The journal has its request.
    resumable: bool = False
    # Set on the last one, with usage and trace.
    finish: Finish | None = None
    usage: Usage | None = None
    trace: RequestTrace | None = None
