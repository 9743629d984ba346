"""GenerateRequest as a `ParsedRequest`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.errors import FieldError
from services.router.request.request import Chat, ChatTurn, ParsedRequest

if TYPE_CHECKING:
    from baton.v1.router_pb2 import GenerateRequest


def parsed_request(request: GenerateRequest) -> ParsedRequest:
    """Converts the message; FieldError if it has no prompt."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise FieldError("the prompt is empty", param="prompt")
    turns = tuple(ChatTurn(turn.role, turn.content) for turn in request.chat.messages)
    return ParsedRequest(
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=tuple(request.token_ids.ids) if prompt == "token_ids" else None,
        chat=Chat(turns) if prompt == "chat" else None,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in request.logit_bias),
        stop_token_ids=tuple(request.stop_token_ids),
        stop=tuple(request.stop),
        ignore_eos=request.ignore_eos,
        echo=request.echo,
        **{name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)},
    )


# Fields of GenerateRequest with explicit presence; ParsedRequest has the same names.
_OPTIONAL: tuple[Any, ...] = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "skip_special_tokens",
    "logprobs",
    "n",
)
