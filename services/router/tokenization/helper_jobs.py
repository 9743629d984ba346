"""The jobs of a helper process: it parses, checks and tokenises one large request.

The result is the valid request without prompt and prediction, and the token ids of both as int32. Requests
are checked by the same functions as small ones, in the same order: sizes, fields, then token ids and limits
(see `lifecycle.admission`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable

from baton.base.errors import FieldError
from baton.v1.router_pb2 import GenerateRequest
from services.router.formats.grpc.generate_message import parse_message, parsed_request
from services.router.formats.json_bodies import encode_lines
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.openai.fields import Body
from services.router.formats.openai.prediction import without_text
from services.router.formats.openai.tokenize_bodies import (
    DetokenizeBody,
    TokenizeBody,
    detokenize_response,
    tokenize_response,
)
from services.router.formats.responses.body import ResponsesBody
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


def completion(tokenizer: ModelTokenizer, limits: RequestLimits, data: bytes) -> Parts:
    """POST /v1/completions: the body with empty prompts, the prediction's ids, then ids and text of each
    prompt. The text is empty unless it is echoed."""
    body = CompletionBody.read(data, limits.max_context_tokens)
    requests = body.parsed_requests()
    prompts = [_prompt(tokenizer, limits, one) for one in requests]
    prediction = _prediction(tokenizer, limits, requests[0])
    parts = (part for ids, echo in prompts for part in (ids, echo))
    rest = _rest(body, prompt=[""] * len(prompts), prediction=without_text(body.prediction))
    return [rest, prediction, *parts]


def chat(tokenizer: ModelTokenizer, limits: RequestLimits, data: bytes) -> Parts:
    """POST /v1/chat/completions: the body without messages, the ids of prediction and prompt, and an empty
    text."""
    body = ChatBody.read(data, limits.max_context_tokens)
    parsed = body.parsed_request()
    prompt = _prompt(tokenizer, limits, parsed)
    prediction = _prediction(tokenizer, limits, parsed)
    rest = _rest(body, messages=[], chat_template_kwargs=None, prediction=without_text(body.prediction))
    return [rest, prediction, *prompt]


def response(
    tokenizer: ModelTokenizer,
    limits: RequestLimits,
    data: bytes,
    earlier: bytes = b"",
    *,
    judged: bool = False,
    stores: bool = False,
) -> Parts:
    """POST /v1/responses: the body without input, then the prompt's ids, an empty text, and the items that
    are stored with the response; empty unless it is stored. `stores`: whether responses are.

    For a body that continues a response: the body, packed, and that response's id. It comes again with the
    items of that response, `earlier`, and is `judged` then: it was read and checked before.
    """
    body = ResponsesBody.unpacked(data) if judged else ResponsesBody.read(data, limits.max_context_tokens)
    if not judged:
        check_storage(body, enabled=stores)
        if body.previous_response_id is not None:
            return [body.packed(), body.previous_response_id.encode()]
    rest = _rest(body, input=[], chat_template_kwargs=None)
    if earlier:
        body = continued(body, earlier, limits.max_context_tokens)
    prompt = _prompt(tokenizer, limits, body.parsed_request())
    stored = encode_lines(stored_items(body)) if stores and body.is_to_be_stored else b""
    return [rest, *prompt, stored]


def generate(tokenizer: ModelTokenizer, limits: RequestLimits, data: bytes) -> Parts:
    """RouterService.Generate: the message without its prompt, the ids of prediction and prompt, and the
    prompt's text."""
    request = parse_message(GenerateRequest, data)
    sizes.check_message(request, limits.max_context_tokens)
    parsed = parsed_request(request)
    prompt = _prompt(tokenizer, limits, parsed)
    prediction = _prediction(tokenizer, limits, parsed)
    if request.HasField("prediction"):
        request.prediction = ""
    if request.WhichOneof("prompt") == "chat":
        del request.chat.messages[:]  # its tools are needed
        request.chat.ClearField("chat_template_kwargs")
    else:
        request.text = ""
    rest = request.SerializeToString()
    _check_rest(rest)
    return [rest, prediction, *prompt]


def tokenize(tokenizer: ModelTokenizer, limits: RequestLimits, body: bytes) -> Parts:
    """POST /tokenize: the JSON response, and the names of ignored fields as a JSON list."""
    parsed = TokenizeBody.read(body, limits.max_context_tokens)
    return [tokenize_response(tokenizer, limits, parsed), json.dumps(parsed.ignored).encode()]


def detokenize(tokenizer: ModelTokenizer, limits: RequestLimits, body: bytes) -> Parts:
    """POST /detokenize: the JSON response, and the names of ignored fields as a JSON list."""
    parsed = DetokenizeBody.read(body, limits.max_context_tokens)
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


def _prompt(tokenizer: ModelTokenizer, limits: RequestLimits, parsed: ParsedRequest) -> tuple[bytes, bytes]:
    """The token ids of a prompt as int32, and its text if that is to be echoed."""
    fields = validate.check_fields(parsed, limits)
    ids = tokenizer.encode(parsed, limits.max_context_tokens)
    validate.check_prompt(parsed, fields, ids, limits)
    return array("i", ids).tobytes(), parsed.text.encode() if parsed.echo and parsed.text else b""


def _prediction(tokenizer: ModelTokenizer, limits: RequestLimits, parsed: ParsedRequest) -> bytes:
    """The token ids of a prediction as int32; none where there is no prediction."""
    if not isinstance(parsed.prediction, str):
        return b""
    ids = validate.check_prediction(tokenizer.encode_prediction(parsed.prediction), limits)
    return array("i", ids).tobytes()


def _rest(body: Body, **changed: object) -> bytes:
    """The packed body, some of whose fields are changed."""
    rest = body.model_copy(update=changed).packed()
    _check_rest(rest)
    return rest


def _check_rest(rest: bytes) -> None:
    if len(rest) > MAX_REST_BYTES:
        raise FieldError(f"the fields besides the prompt have more than {MAX_REST_BYTES} bytes")
