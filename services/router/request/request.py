"""A request as the APIs parse it, as the dispatcher runs it, and the deltas of its output."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from baton.request_fields.generated import RequestValues
from baton.v1.router_pb2 import RequestTrace, TokenIds, Usage
from baton.v1.types_pb2 import FinishReason, Grammar, Limits, Sampling
from services.router.request.call_trace import CallTrace
from services.router.request.slo import Slo
from services.router.tools.output_parser import OutputStructure
from services.router.tools.tool_use import ToolUse

if TYPE_CHECKING:  # it brings the client of Redis along, which helper processes need not load
    from services.router.tenants.account import TenantAccount


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation. Fields that are None are not passed to the template."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Calls of tools as the API has them: `{"function": {"name": …, "arguments": …}, …}`.
    tool_calls: Sequence[Mapping[str, object]] | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation, and how the model's chat template renders it."""

    turns: tuple[ChatTurn, ...]
    add_generation_prompt: bool = True
    # The tools that the template shows to the model.
    tools: Sequence[Mapping[str, object]] = ()
    # Further variables for the template; None: none.
    template_variables: Mapping[str, object] | None = None
    # The API's field that has the messages. For error messages.
    field_name: str = "messages"


@dataclass(eq=False)
class ClientCall:
    """One call of one client. All of its attempts run in one pool of workers: that of the first one."""

    pool: str | None = None
    # The weight format of each role that was used (key: whether it decodes).
    formats: dict[bool, str] = field(default_factory=dict)
    # Lower ones are placed first; see `tenants.priority`.
    priority: int = 0
    # The earliest turn in the waiting queue that its next request may have.
    next_turn: float = 0.0
    # When one of its requests was placed last, on the event loop's clock.
    placed_at: float = -math.inf
    # Limits how many of its requests are in that queue at once; made by the queue, which knows the limit.
    in_queue: asyncio.Semaphore | None = None
    # Undocumented fields that the call had.
    ignored_fields: tuple[str, ...] = ()
    # The id of the API key that it had, and whose it is; None where keys belong to no tenants.
    key_id: str = ""
    tenant: TenantAccount | None = None
    # The path or method that was called.
    route: str = ""
    # None where traces are off.
    trace: CallTrace | None = None

    @property
    def tenant_name(self) -> str:
        """Name of the tenant; empty if keys belong to no tenants."""
        return "" if self.tenant is None else self.tenant.name


@dataclass(frozen=True)
class ParsedRequest(RequestValues):
    """A client's request for one prompt, whatever the API. Values are not checked; None means unset.

    The prompt is one of `token_ids`, `text` and `chat`. If a helper process has tokenised it already, because
    the request is large, `tokenized` has its ids, checked against the vocabulary, and `text` only what `echo`
    repeats. `prediction` is then checked ids too, else text; None where there is none.
    """

    model: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: Chat | None = None
    tokenized: tuple[int, ...] | None = None
    # (token id, bias)
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Whether an unset max_tokens means the rest of the context.
    fills_context: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    # What the output must match; None: anything.
    grammar: Grammar | None = None
    # Whether reasoning and tool calls are looked for in the output, and the tools that it may or must call.
    structured: bool = False
    tools: ToolUse | None = None
    prediction: str | TokenIds | None = None
    slo: Slo | None = None
    # Field name → the API's name for it, where they differ. For error messages.
    api_names: Mapping[str, str] = field(default_factory=dict)
    # Shared by the prompts of one client call.
    call: ClientCall = field(default_factory=ClientCall, compare=False, repr=False)

    def api_name(self, name: str) -> str:
        """The API's name for a field."""
        return self.api_names.get(name, name)


@dataclass(frozen=True)
class Echo:
    """The prompt that the response repeats before the output."""

    text: str
    # Where each token's text begins in `text`; empty without logprobs.
    offsets: Sequence[int] = ()


@dataclass(frozen=True)
class Request:
    """An admitted request for one output: checked, tokenised and seeded.

    A call for n outputs becomes n requests, which share everything but id, seed and choice.
    """

    # 16 random bytes.
    id: bytes
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    # For the whole output, over all attempts. 0: no output, only the prompt's logprobs or echo.
    max_tokens: int
    # Ids that end the output, including the model's end-of-sequence ids unless they are ignored.
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    skip_special_tokens: bool
    # Monotonic nanoseconds at arrival, and the deadline in seconds on the event loop's clock.
    arrived_ns: int
    deadline: float
    # Output tokens before which neither a stop id nor a stop string ends it.
    min_tokens: int = 0
    echo: Echo | None = None
    # What the output's text must match.
    grammar: Grammar | None = None
    # What is looked for in the output's text; None: it is content.
    structure: OutputStructure | None = None
    # Index among the outputs of its prompt.
    choice: int = 0
    # Tokens that the output is expected to contain, as messages have them: many are copied quickly. None: the
    # client predicts nothing.
    prediction: TokenIds | None = None
    # The most drafts that a decode step may verify for the output; None: as many as the worker does.
    max_draft_tokens: int | None = None
    slo: Slo | None = None
    # Shared by all requests of the client's call.
    call: ClientCall = field(default_factory=ClientCall, compare=False, repr=False)

    @property
    def tenant(self) -> str:
        """The tenant's name, which scopes cached prefixes; empty where keys belong to no tenants."""
        return self.call.tenant_name

    @property
    def trace(self) -> CallTrace | None:
        """The call's trace, where it is recorded."""
        trace = self.call.trace
        return trace if trace is not None and trace.context.sampled else None

    @property
    def limits(self) -> Limits:
        """The protobuf message of what ends the output."""
        return Limits(
            max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids, min_tokens=self.min_tokens
        )

    @property
    def wants_logprobs(self) -> bool:
        """True if logprobs of the output's tokens are returned."""
        return self.sampling.HasField("logprobs")

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if logprobs of the prompt's tokens are returned."""
        return self.echo is not None and self.wants_logprobs


class Finish(Enum):
    """The reason why an output ended; the values are those of `baton.v1.FinishReason`."""

    STOP = FinishReason.FINISH_REASON_STOP
    LENGTH = FinishReason.FINISH_REASON_LENGTH

    @property
    def reason(self) -> str:
        """The value of OpenAI's field `finish_reason`."""
        return self.name.lower()


@dataclass
class Delta:
    """The output since the previous delta.

    Token ids have no gaps and no repeats from delta to delta; text may lag behind the ids.
    """

    first_number: int
    token_ids: MutableSequence[int] = field(default_factory=list)
    text: str = ""
    # With logprobs, for each token: its serialised `Logprobs`.
    logprobs: list[bytes] = field(default_factory=list)
    # With logprobs, or where reasoning is counted: where the text of each token begins in the output.
    offsets: MutableSequence[int] = field(default_factory=list)
    # In the first delta, if asked for: logprobs of the prompt's tokens from the second on.
    prompt_logprobs: list[bytes] = field(default_factory=list)
    # Whether this is the output's first delta.
    opening: bool = False
    # Whether the journal has recorded the request.
    resumable: bool = False
    # Set in the last delta, with usage and trace.
    finish: Finish | None = None
    usage: Usage | None = None
    trace: RequestTrace | None = None
