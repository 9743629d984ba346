"""Limits on the sizes of a request and its response.

The request's are checked on the parsed JSON or protobuf before anything is built of it.

A body above `LARGE_BYTES`, or of more than `MANY_PARTS`, is read and tokenised in a helper process: on the
event loop, or in a thread that holds the GIL, it would delay every stream.

A response's size is counted in values: one for each token, and with logprobs also the token's own logprob and
those of the most likely tokens. An echoed prompt counts as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Sized

from baton.base.errors import FieldError
from baton.request_fields.table import MOST_ITEMS
from baton.v1.router_pb2 import GenerateRequest
from services.router.request.request import Request
from services.router.request.validate import context_exceeded

LARGE_BYTES = 64 * 1024
# For /tokenize and /detokenize, whose responses are several times as large as their bodies.
LARGE_TOKENIZE_BYTES = 16 * 1024
# Longer prompts are detokenised in a helper process.
LARGE_TOKENS = 16 * 1024
# Objects and lists of a body, or messages of one over gRPC.
MANY_PARTS = 1024
# Tokens that one response of /tokenize lists, unless the model's context is longer.
MAX_LISTED_TOKENS = 128 * 1024
MAX_FIELDS = 128
MAX_PROMPTS = 256
MAX_MESSAGE_FIELDS = 32
# The fields that have a conversation.
MESSAGES = ("messages", "input")
_BODY_BYTES = 1024 * 1024
_BYTES_PER_TOKEN = 16


def max_body_bytes(context_tokens: int) -> int:
    """The default limit on bodies: room for a prompt that fills the model's context."""
    return _BODY_BYTES + _BYTES_PER_TOKEN * context_tokens


def is_large(body: bytes | bytearray) -> bool:
    """True if a helper process should read a JSON body: by its bytes, and by its objects and lists, each of
    which takes up to 3 us to validate. Brackets within texts count too."""
    return len(body) > LARGE_BYTES or body.count(b"{") + body.count(b"[") > MANY_PARTS


def check_document(document: object, context: int) -> None:
    """Raises FieldError for a field of a JSON body with too many items. `context`: in tokens."""
    if not isinstance(document, dict):
        return
    if len(document) > MAX_FIELDS:
        raise FieldError(f"a body has at most {MAX_FIELDS} fields")
    for name in MOST_ITEMS:
        _check_count(name, document.get(name))
    for name in MESSAGES:
        _check_messages(name, document.get(name), context)
    _check_prompt(document.get("prompt"), context)


def check_message(request: GenerateRequest, context: int) -> None:
    """Makes the checks of `check_document` for a gRPC message, in the same order."""
    for name in MOST_ITEMS:
        if name in GenerateRequest.DESCRIPTOR.fields_by_name:
            _check_count(name, getattr(request, name))
    _check_count("tools", request.chat.tools)
    check_message_count("messages", len(request.chat.messages), context)
    if len(request.token_ids.ids) > context:
        raise context_exceeded("prompt", len(request.token_ids.ids), context)


def too_many(name: str) -> FieldError:
    """The error of a field with more items than `MOST_ITEMS` allows."""
    return FieldError(f"{name}: at most {MOST_ITEMS[name]}", param=name)


def _check_count(name: str, values: object) -> None:
    if isinstance(values, Sized) and not isinstance(values, str) and len(values) > MOST_ITEMS[name]:
        raise too_many(name)


def _check_prompt(prompt: object, context: int) -> None:
    """A list of token ids, or of few texts and lists of ids."""
    if not isinstance(prompt, list):
        return
    few, most = len(prompt) <= MAX_PROMPTS, max(context, MAX_PROMPTS)
    for ids in (prompt, *(item for item in prompt if isinstance(item, list))) if few else (prompt,):
        if len(ids) > most:
            raise context_exceeded("prompt", len(ids), context)


def _check_messages(name: str, messages: object, context: int) -> None:
    if not isinstance(messages, list):
        return
    check_message_count(name, len(messages), context)
    parts = 0
    for message in messages:
        if isinstance(message, dict):
            if len(message) > MAX_MESSAGE_FIELDS:
                raise FieldError(f"a message has at most {MAX_MESSAGE_FIELDS} fields", param=name)
            content = message.get("content")
            parts += len(content) if isinstance(content, list) else 0
    check_message_count(name, parts, context)


def check_message_count(name: str, count: int, context: int) -> None:
    """Raises FieldError where a conversation has more messages, or parts of them, than its context tokens."""
    if count > context:
        message = (
            f"more messages, or parts of messages, than the model's context of {context} tokens can have"
        )
        raise FieldError(message, param=name, code="context_length_exceeded")


def check_response_size(requests: Sequence[Request], max_values: int) -> None:
    """Raises FieldError if the response to these requests may have more than `max_values` values."""
    values = sum(_values(request) for request in requests)
    if values > max_values:
        raise FieldError(
            f"the answer may have {values} numbers (outputs x tokens x (1, or 2 + logprobs)); "
            f"max_answer_values allows {max_values}",
            param="max_tokens",
            code="answer_too_large",
        )


def shorten(requests: Sequence[Request], max_values: int) -> list[Request]:
    """Lowers max_tokens, which the client did not set, to what the limit allows."""
    left = [
        max_values // len(requests) // _values_per_token(request) - _echoed(request) for request in requests
    ]
    return [
        dataclasses.replace(
            request, max_tokens=min(request.max_tokens, tokens), min_tokens=min(request.min_tokens, tokens)
        )
        if 0 < tokens < request.max_tokens
        else request
        for request, tokens in zip(requests, left, strict=True)
    ]


def _values(request: Request) -> int:
    return (request.max_tokens + _echoed(request)) * _values_per_token(request)


def _values_per_token(request: Request) -> int:
    return 2 + request.sampling.logprobs if request.wants_logprobs else 1


def _echoed(request: Request) -> int:
    return len(request.prompt_ids) if request.echo is not None else 0
