"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator
from starlette.responses import JSONResponse
from starlette.routing import Route

from baton.errors import FieldError
from services.router import validate
from services.router.http_body import Cancelling, read_json
from services.router.openai_chat import ChatFields, MessageBody
from services.router.openai_fields import Body, Neutral, parse
from services.router.request import Asked

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Send

    from services.router.intake import Intake

_NEUTRAL: Neutral = {"continue_final_message": (False,), "chat_template": (), "tools": ([],)}


class TokenizeBody(ChatFields):
    """A prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] = Field(default_factory=list)
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


class TokenizeDoor:
    """Text to tokens and back with the model's own tokenizer; no worker is asked."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.routes = [
            Route("/tokenize", Cancelling(self.tokenize), methods=["POST"]),
            Route("/detokenize", Cancelling(self.detokenize), methods=["POST"]),
        ]

    async def tokenize(self, request: HttpRequest, send: Send) -> None:
        """The ids that a completion of the same prompt or messages would be given."""
        body = parse(read_json(request), TokenizeBody, _NEUTRAL)
        self._check_model(body.model)
        ids = await self._ids(body)
        answer = {
            "count": len(ids),
            "max_model_len": self._intake.max_context_tokens,
            "tokens": ids,
            "token_strs": self._intake.pool.vocabulary_strings(ids) if body.return_token_strs else None,
        }
        await JSONResponse(answer)(request.scope, request.receive, send)

    async def detokenize(self, request: HttpRequest, send: Send) -> None:
        """The text of the ids, special tokens included."""
        body = parse(read_json(request), DetokenizeBody, {})
        self._check_model(body.model)
        ids = validate.check_token_ids("tokens", tuple(body.tokens), self._intake.vocab_size)
        text = await self._intake.pool.decode(ids, skip_special_tokens=False)
        await JSONResponse({"prompt": text})(request.scope, request.receive, send)

    async def _ids(self, body: TokenizeBody) -> tuple[int, ...]:
        pool = self._intake.pool
        if body.prompt is not None:
            return await pool.encode_text(body.prompt, special=body.add_special_tokens is not False)
        if body.add_special_tokens:
            message = "add_special_tokens with messages is not supported: the template writes them"
            raise FieldError(message, param="add_special_tokens", code="unsupported_parameter")
        return await pool.encode_chat(body.chat())

    def _check_model(self, model: str | None) -> None:
        if model is not None:
            validate.check_model(Asked(model=model), self._intake.served_name)
