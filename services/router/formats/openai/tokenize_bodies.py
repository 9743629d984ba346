"""POST /tokenize and /detokenize: request bodies and responses."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from baton.base.errors import FieldError
from services.router.formats.field_table import DETOKENIZE, TOKENIZE, FieldTable
from services.router.formats.json_bodies import encode
from services.router.formats.openai.chat import ChatFields, Messages
from services.router.formats.openai.fields import Body, FailFast, whole_numbers
from services.router.request import sizes, validate
from services.router.request.request import ParsedRequest
from services.router.request.validate import RequestLimits
from services.router.text.tokenizer import ModelTokenizer


class TokenizeBody(ChatFields):
    """The body of /tokenize: a prompt or messages."""

    table: ClassVar[FieldTable] = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one_given(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("needs either prompt or messages")
        return self


def _whole(tokens: object) -> object:
    return whole_numbers(tokens) if isinstance(tokens, list) else tokens


class DetokenizeBody(Body):
    """The body of a POST to /detokenize."""

    table: ClassVar[FieldTable] = DETOKENIZE

    model: str | None = None
    tokens: Annotated[list[int], FailFast(), BeforeValidator(_whole)]


def tokenize_response(tokenizer: ModelTokenizer, limits: RequestLimits, body: TokenizeBody) -> bytes:
    """The JSON response with the ids that a completion would use; FieldError if there are too many."""
    _check_model(body.model, limits)
    ids = _ids(tokenizer, body)
    if len(ids) > _max_listed(limits):
        message = f"the prompt has {len(ids)} tokens; at most {_max_listed(limits)} are listed"
        raise FieldError(
            message,
            param="prompt" if body.prompt is not None else "messages",
            code="context_length_exceeded",
        )
    response = {
        "count": len(ids),
        "max_model_len": limits.max_context_tokens,
        "tokens": ids,
        "token_strs": tokenizer.spellings(ids) if body.return_token_strs else None,
    }
    return encode(response).encode()


def detokenize_response(tokenizer: ModelTokenizer, limits: RequestLimits, body: DetokenizeBody) -> bytes:
    """The JSON response with the text of the ids, special tokens included."""
    _check_model(body.model, limits)
    if len(body.tokens) > _max_listed(limits):
        raise FieldError(f"at most {_max_listed(limits)} tokens; got {len(body.tokens)}", param="tokens")
    ids = validate.check_token_ids("tokens", body.tokens, limits.vocab_size)
    return encode({"prompt": tokenizer.decode(ids, skip_special_tokens=False)}).encode()


def _ids(tokenizer: ModelTokenizer, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode_text(body.prompt, special=body.add_special_tokens is not False)
    if body.add_special_tokens:
        message = "add_special_tokens with messages is not supported: the template writes them"
        raise FieldError(message, param="add_special_tokens", code="unsupported_parameter")
    chat = body.chat()
    validate.check_roles(chat)
    return tokenizer.encode_chat(chat)


def _check_model(name: str | None, limits: RequestLimits) -> None:
    if name is not None:
        validate.check_model(ParsedRequest(model=name), limits.served_name)


def _max_listed(limits: RequestLimits) -> int:
    """Tokens that one request may have."""
    return max(limits.max_context_tokens, sizes.MAX_LISTED_TOKENS)
