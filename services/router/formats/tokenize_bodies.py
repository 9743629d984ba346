"""The bodies of /tokenize and /detokenize, and their answers as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from baton.errors import FieldError
from services.router.formats.openai_chat import ChatFields, Messages
from services.router.formats.openai_fields import Body, Neutral, parse
from services.router.request import validate
from services.router.request.request import Asked

if TYPE_CHECKING:
    from services.router.request.served_model import Model
    from services.router.text.tokenizer import ModelText

_NEUTRAL: Neutral = {"continue_final_message": (False,), "chat_template": (), "tools": ([],)}


class TokenizeBody(ChatFields):
    """A prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("needs either prompt or messages")
        return self


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


def parse_tokenize(document: object) -> TokenizeBody:
    """The body as a checked model; FieldError names the first field that is wrong."""
    return parse(document, TokenizeBody, _NEUTRAL)


def parse_detokenize(document: object) -> DetokenizeBody:
    """The same for /detokenize."""
    return parse(document, DetokenizeBody, {})


def tokenize_answer(text: ModelText, model: Model, body: TokenizeBody) -> bytes:
    """The ids that a completion of the same prompt or messages would be given; FieldError where there are
    more than one answer lists."""
    _check_model(body.model, model)
    ids = _ids(text, body)
    if len(ids) > model.most_listed:
        message = f"the prompt has {len(ids)} tokens; at most {model.most_listed} are listed"
        raise FieldError(
            message,
            param="prompt" if body.prompt is not None else "messages",
            code="context_length_exceeded",
        )
    answer = {
        "count": len(ids),
        "max_model_len": model.context,
        "tokens": ids,
        "token_strs": text.spellings(ids) if body.return_token_strs else None,
    }
    return _to_json(answer)


def detokenize_answer(text: ModelText, model: Model, body: DetokenizeBody) -> bytes:
    """The text of the ids, special tokens included."""
    _check_model(body.model, model)
    if len(body.tokens) > model.most_listed:
        raise FieldError(f"at most {model.most_listed} tokens; got {len(body.tokens)}", param="tokens")
    ids = validate.check_token_ids("tokens", body.tokens, model.vocab_size)
    return _to_json({"prompt": text.decode(ids, skip_special_tokens=False)})


def _ids(text: ModelText, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return text.encode_text(body.prompt, special=body.add_special_tokens is not False)
    if body.add_special_tokens:
        message = "add_special_tokens with messages is not supported: the template writes them"
        raise FieldError(message, param="add_special_tokens", code="unsupported_parameter")
    return text.encode_chat(body.chat())


def _check_model(name: str | None, model: Model) -> None:
    if name is not None:
        validate.check_model(Asked(model=name), model.served_name)


def _to_json(answer: dict[str, object]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
