"""Parses GenerateRequest into a `ParsedRequest`."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.request_fields.table import VALUES
from baton.v1.router_pb2 import GenerateRequest
from baton.v1.types_pb2 import Grammar
from services.router.formats.grammar_fields import ANY_OBJECT
from services.router.formats.grpc.chat_messages import chat_of, tool_use_of
from services.router.formats.ignored_fields import unknown_numbers
from services.router.request.request import ClientCall, ParsedRequest
from services.router.request.slo import Slo, slo_of

MessageT = TypeVar("MessageT", bound=Message)
_VALUES: tuple[Any, ...] = tuple(field.name for field in VALUES)


def parse_message(message: type[MessageT], data: bytes) -> MessageT:
    """Parses a message of this type; BatonError(INVALID) if the bytes are not one."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise BatonError(ErrorKind.INVALID, f"not a {message.DESCRIPTOR.name} message") from error


def parsed_request(request: GenerateRequest) -> ParsedRequest:
    """Converts the message; FieldError if it has no prompt."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise FieldError("the prompt is empty", param="prompt")
    if prompt == "chat" and request.add_special_tokens:
        message = "add_special_tokens is not supported yet for a chat, whose template writes them"
        raise FieldError(message, param="add_special_tokens", code="unsupported_parameter")
    return ParsedRequest(
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=tuple(request.token_ids.ids) if prompt == "token_ids" else None,
        chat=chat_of(request.chat) if prompt == "chat" else None,
        structured=prompt == "chat",
        tools=tool_use_of(request.chat),
        logit_bias=tuple((bias.token_id, bias.bias) for bias in request.logit_bias),
        stop_token_ids=tuple(request.stop_token_ids),
        stop=tuple(request.stop),
        ignore_eos=request.ignore_eos,
        echo=request.echo,
        grammar=_grammar(request),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        call=ClientCall(ignored_fields=unknown_numbers(request)),
        slo=_slo(request),
        prediction=request.prediction if request.HasField("prediction") else None,
        **{name: getattr(request, name) for name in _VALUES if request.HasField(name)},
    )


def _grammar(request: GenerateRequest) -> Grammar | None:
    """The grammar as workers know it."""
    if not request.HasField("grammar"):
        return None
    if request.grammar.WhichOneof("kind") != "json_object":
        return request.grammar
    if not request.grammar.json_object:
        return None
    space = request.grammar.whitespace_pattern if request.grammar.HasField("whitespace_pattern") else None
    return Grammar(json_schema=ANY_OBJECT, whitespace_pattern=space)


def _slo(request: GenerateRequest) -> Slo | None:
    ttft_ms = request.ttft_slo_ms if request.HasField("ttft_slo_ms") else None
    tpot_ms = request.tpot_slo_ms if request.HasField("tpot_slo_ms") else None
    return slo_of("ttft_slo_ms", ttft_ms, "tpot_slo_ms", tpot_ms)
