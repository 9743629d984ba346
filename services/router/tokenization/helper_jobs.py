"""What a text process does with a large request: parses it, judges it, tokenises it.

The answer is the request without its prompt, which the router parses once more like any small one, and the
token ids of each prompt as int32. Everything here is also what the router does itself with small requests, in
the same order: sizes, fields, tokens, their ids and number.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from baton.errors import BatonError, ErrorKind, FieldError
from baton.v1.router_pb2 import GenerateRequest
from services.router.formats.generate_message import to_asked
from services.router.formats.json_body import parse_json
from services.router.formats.openai_chat import parse_chat
from services.router.formats.openai_completions import parse_completion
from services.router.formats.tokenize_bodies import (
    detokenize_answer,
    parse_detokenize,
    parse_tokenize,
    tokenize_answer,
)
from services.router.request import sizes, validate
from services.router.request.served_model import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.router.request.request import Asked
    from services.router.text.tokenizer import ModelText

# Of a request without its prompt: stop strings are the longest of it.
MAX_REST_BYTES = 512 * 1024


Parts = list[bytes]
# What each of the jobs below that take a request is.
Job = Callable[["ModelText", Model, bytes], Parts]


def completion(text: ModelText, model: Model, body: bytes) -> Parts:
    """POST /v1/completions: the body with empty prompts, then ids and text of each prompt. The text is empty
    unless it is to be echoed."""
    document = _document(body, model)
    asked = parse_completion(document).asked()
    prompts = [_prompt(text, model, one) for one in asked]
    document["prompt"] = [""] * len(prompts)
    return [_rest(document), *(part for ids, echo in prompts for part in (ids, echo))]


def chat(text: ModelText, model: Model, body: bytes) -> Parts:
    """POST /v1/chat/completions: the body without messages, then the prompt's ids and an empty text."""
    document = _document(body, model)
    prompt = _prompt(text, model, parse_chat(document).asked())
    document["messages"] = []
    document.pop("chat_template_kwargs", None)
    return [_rest(document), *prompt]


def generate(text: ModelText, model: Model, data: bytes) -> Parts:
    """RouterService.Generate: the message with an empty text for a prompt, then the prompt's ids and text."""
    try:
        request = GenerateRequest.FromString(data)
    except DecodeError as error:
        raise BatonError(ErrorKind.INVALID, "not a GenerateRequest message") from error
    sizes.check_message(request, model.context)
    prompt = _prompt(text, model, to_asked(request))
    request.text = ""
    rest = request.SerializeToString()
    _check_rest(rest)
    return [rest, *prompt]


def tokenize(text: ModelText, model: Model, body: bytes) -> Parts:
    """POST /tokenize: the whole answer."""
    return [tokenize_answer(text, model, parse_tokenize(_document(body, model)))]


def detokenize(text: ModelText, model: Model, body: bytes) -> Parts:
    """POST /detokenize: the whole answer."""
    return [detokenize_answer(text, model, parse_detokenize(_document(body, model)))]


def decode(text: ModelText, model: Model, ids: bytes, skip_special_tokens: bool, offsets: bool) -> Parts:
    """The text of int32 ids, and where in it each token's text begins if `offsets`."""
    numbers = array("i")
    numbers.frombytes(ids)
    if not offsets:
        return [text.decode(numbers, skip_special_tokens=skip_special_tokens).encode(), b""]
    decoded, starts = text.decode_with_offsets(numbers, skip_special_tokens=skip_special_tokens)
    return [decoded.encode(), array("i", starts).tobytes()]


JOBS: dict[str, Callable[..., Parts]] = {
    job.__name__: job for job in (completion, chat, generate, tokenize, detokenize, decode)
}


def _document(body: bytes, model: Model) -> dict[str, Any]:
    document = parse_json(body)
    if not isinstance(document, dict):
        raise FieldError("the body must be a JSON object")
    sizes.check_document(document, model.context)
    return document


def _prompt(text: ModelText, model: Model, asked: Asked) -> tuple[bytes, bytes]:
    validate.check_fields(asked, model.served_name, model.eos, model.vocab_size)
    name = asked.named("prompt")
    ids: Sequence[int]
    if asked.token_ids is not None:
        ids = asked.token_ids
    elif asked.chat is not None:
        ids = text.encode_chat(asked.chat)
    else:
        ids = text.encode_text(asked.text or "", special=asked.add_special_tokens)
    if len(ids) > model.context:
        raise validate.context_exceeded(name, len(ids), model.context)
    validate.check_token_ids(name, ids, model.vocab_size)
    return array("i", ids).tobytes(), asked.text.encode() if asked.echo and asked.text else b""


def _rest(document: dict[str, Any]) -> bytes:
    rest = json.dumps(document).encode()
    _check_rest(rest)
    return rest


def _check_rest(rest: bytes) -> None:
    if len(rest) > MAX_REST_BYTES:
        raise FieldError(f"the fields besides the prompt have more than {MAX_REST_BYTES} bytes")
