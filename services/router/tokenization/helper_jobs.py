"""The jobs of a helper process: it parses, checks and tokenises one large request.

The result is the request without its prompt, which the router parses like any small one, and the token ids of
each prompt as int32. Requests are checked in the same order as small ones: sizes, fields, then token ids and
limits (see `lifecycle.admission`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

from baton.base.errors import FieldError
from baton.v1.router_pb2 import GenerateRequest
from services.router.formats.grpc.generate_message import parse_message, parsed_request
from services.router.formats.json_bodies import encode_lines, parse_json
from services.router.formats.json_counts import check_counts
from services.router.formats.openai.chat import ChatBody, MessageBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.openai.fields import Body, Part
from services.router.formats.openai.tokenize_bodies import (
    DetokenizeBody,
    TokenizeBody,
    detokenize_response,
    tokenize_response,
)
from services.router.formats.responses.body import InputItem, ResponsesBody
from services.router.formats.responses.conversation import check_storage, continued, stored_items
from services.router.request import sizes, validate
from services.router.request.request import ParsedRequest
from services.router.request.validate import RequestLimits
from services.router.text.tokenizer import ModelTokenizer

# The largest request without its prompt. Its longest fields are stop strings.
MAX_REST_BYTES = 512 * 1024


Parts = list[bytes]
# A job that takes a whole request.
Job = Callable[["ModelTokenizer", RequestLimits, bytes], Parts]


def completion(tokenizer: ModelTokenizer, limits: RequestLimits, body: bytes) -> Parts:
    """POST /v1/completions: the body with empty prompts, then ids and text of each prompt. The text is empty
    unless it is echoed."""
    document = _document(body, limits)
    prompts = [_prompt(tokenizer, limits, one) for one in CompletionBody.parse(document).parsed_requests()]
    document["prompt"] = [""] * len(prompts)
    return [_rest(document, CompletionBody), *(part for ids, echo in prompts for part in (ids, echo))]


def chat(tokenizer: ModelTokenizer, limits: RequestLimits, body: bytes) -> Parts:
    """POST /v1/chat/completions: the body without messages, then the prompt's ids and an empty text."""
    document = _document(body, limits)
    prompt = _prompt(tokenizer, limits, ChatBody.parse(document).parsed_request())
    document["messages"] = _ignored_keys(document["messages"], MessageBody)
    document.pop("chat_template_kwargs", None)
    return [_rest(document, ChatBody), *prompt]


def response(
    tokenizer: ModelTokenizer,
    limits: RequestLimits,
    body: bytes,
    earlier: bytes = b"",
    *,
    earlier_id: str | None = None,
    stores: bool = False,
) -> Parts:
    """POST /v1/responses: the body without input, then the prompt's ids, an empty text, and the items that
    are stored with the response; empty unless it is stored. `stores`: whether responses are.

    `earlier`: the items of the response with the id `earlier_id`. The body alone where it continues another
    one, or none.
    """
    document = _document(body, limits)
    parsed = ResponsesBody.parse(document)
    check_storage(parsed, enabled=stores)
    items = document["input"] if isinstance(document["input"], list) else []
    document["input"] = _ignored_keys(items, InputItem)
    document.pop("chat_template_kwargs", None)
    rest = _rest(document, ResponsesBody)
    if parsed.previous_response_id != earlier_id:
        return [rest]
    if earlier_id is not None:
        parsed = continued(parsed, earlier, limits.max_context_tokens)
    prompt = _prompt(tokenizer, limits, parsed.parsed_request())
    stored = encode_lines(stored_items(parsed)) if stores and parsed.is_to_be_stored else b""
    return [rest, *prompt, stored]


def generate(tokenizer: ModelTokenizer, limits: RequestLimits, data: bytes) -> Parts:
    """RouterService.Generate: the message without its prompt, then the prompt's ids and text."""
    request = parse_message(GenerateRequest, data)
    sizes.check_message(request, limits.max_context_tokens)
    prompt = _prompt(tokenizer, limits, parsed_request(request))
    if request.WhichOneof("prompt") == "chat":
        del request.chat.messages[:]  # its tools are needed
        request.chat.ClearField("chat_template_kwargs")
    else:
        request.text = ""
    rest = request.SerializeToString()
    _check_rest(rest)
    return [rest, *prompt]


def tokenize(tokenizer: ModelTokenizer, limits: RequestLimits, body: bytes) -> Parts:
    """POST /tokenize: the JSON response, and the names of ignored fields as a JSON list."""
    parsed = TokenizeBody.parse(_document(body, limits))
    return [tokenize_response(tokenizer, limits, parsed), json.dumps(parsed.ignored).encode()]


def detokenize(tokenizer: ModelTokenizer, limits: RequestLimits, body: bytes) -> Parts:
    """POST /detokenize: the JSON response, and the names of ignored fields as a JSON list."""
    parsed = DetokenizeBody.parse(_document(body, limits))
    return [detokenize_response(tokenizer, limits, parsed), json.dumps(parsed.ignored).encode()]


def decode(
    tokenizer: ModelTokenizer, limits: RequestLimits, ids: bytes, skip_special_tokens: bool, offsets: bool
) -> Parts:
    """The text of int32 ids and, if `offsets`, where each token's text begins, as int32."""
    numbers = array("i", ids)
    if not offsets:
        return [tokenizer.decode(numbers, skip_special_tokens=skip_special_tokens).encode(), b""]
    decoded, starts = tokenizer.decode_with_offsets(numbers, skip_special_tokens=skip_special_tokens)
    return [decoded.encode(), array("i", starts).tobytes()]


JOBS: dict[str, Callable[..., Parts]] = {
    job.__name__: job for job in (completion, chat, response, generate, tokenize, detokenize, decode)
}


def _document(body: bytes, limits: RequestLimits) -> dict[str, Any]:
    check_counts(body, limits.max_context_tokens)
    document = parse_json(body)
    if not isinstance(document, dict):
        raise FieldError("the body must be a JSON object")
    sizes.check_document(document, limits.max_context_tokens)
    return document


def _prompt(tokenizer: ModelTokenizer, limits: RequestLimits, parsed: ParsedRequest) -> tuple[bytes, bytes]:
    """The token ids of a prompt as int32, and its text if that is to be echoed."""
    fields = validate.check_fields(parsed, limits)
    ids = tokenizer.encode(parsed, limits.max_context_tokens)
    validate.check_prompt(parsed, fields, ids, limits)
    return array("i", ids).tobytes(), parsed.text.encode() if parsed.echo and parsed.text else b""


def _ignored_keys(messages: list[dict[str, Any]], model: type[Part]) -> list[dict[str, Any]]:
    """A message that stands for all of them, with the undocumented keys of each; none if there is no such
    key."""
    keys = {key for message in messages for key in message if key not in model.model_fields}
    return [{"role": "user", "content": "", **dict.fromkeys(sorted(keys))}] if keys else []


def _rest(document: dict[str, Any], body: type[Body]) -> bytes:
    """The document, of whose undocumented fields only the names stay."""
    rest = json.dumps(
        {name: value if name in body.table else None for name, value in document.items()}
    ).encode()
    _check_rest(rest)
    return rest


def _check_rest(rest: bytes) -> None:
    if len(rest) > MAX_REST_BYTES:
        raise FieldError(f"the fields besides the prompt have more than {MAX_REST_BYTES} bytes")
