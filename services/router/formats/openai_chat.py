"""POST /v1/chat/completions: the request body and the response format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, FailFast

from baton.errors import FieldError
from services.router.formats.field_table import CHAT, FieldTable
from services.router.formats.openai_fields import Body, Part, SamplingBody
from services.router.formats.openai_logprobs import chat_logprobs
from services.router.request.request import Chat, ChatTurn, Delta, ParsedRequest, Request
from services.router.text.token_texts import TokenTexts


class MessageBody(Part):
    """One message. Fields that assistant messages of a response have may be sent back empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # A string or a list of text parts; `_turn` checks it, for a better error message than pydantic's.
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = None


# Validation ends at the first invalid message: an error for each could take seconds.
Messages = Annotated[list[MessageBody], FailFast()]


class ChatFields(Body):
    """The fields that define how a conversation is rendered; shared with /tokenize."""

    nested: ClassVar[Mapping[str, type[BaseModel]]] = {"messages": MessageBody}

    messages: Messages
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> Chat:
        """The conversation; FieldError if a message is not text."""
        return Chat(
            tuple(_turn(number, message) for number, message in enumerate(self.messages)),
            add_generation_prompt=self.add_generation_prompt is not False,
            template_variables=self.chat_template_kwargs,
        )


class ChatBody(SamplingBody, ChatFields):
    """The body of POST /v1/chat/completions."""

    table: ClassVar[FieldTable] = CHAT
    nested: ClassVar[Mapping[str, type[BaseModel]]] = {**SamplingBody.nested, **ChatFields.nested}

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def parsed_request(self) -> ParsedRequest:
        """Converts the body. An unset max_tokens means the rest of the context."""
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs needs logprobs to be true", param="top_logprobs")
        parsed = self.sampling()
        api_names = {**parsed.api_names, "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            api_names["max_tokens"] = "max_completion_tokens"
            parsed = dataclasses.replace(parsed, max_tokens=self.max_completion_tokens)
        return dataclasses.replace(
            parsed,
            chat=self.chat(),
            fills_context=True,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            api_names=api_names,
        )


class ChatFormatter:
    """Formats deltas as choices of a chat completion."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, texts: TokenTexts) -> None:
        self._with_ids = body.return_token_ids is True
        self._texts = texts

    def whole(self, index: int, request: Request, delta: Delta) -> dict[str, object]:
        """One choice of a response that is not streamed."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice(index, request, delta, message=message)

    def chunks(self, index: int, request: Request, delta: Delta) -> list[dict[str, object]]:
        """Up to three chunks: the role (first delta only), content if there is some, the finish reason."""
        chunks: list[dict[str, object]] = []
        if delta.opening:
            chunks.append(_chunk(index, {"role": "assistant", "content": ""}))
        if delta.text or (delta.token_ids and (request.wants_logprobs or self._with_ids)):
            content = dataclasses.replace(delta, finish=None)
            chunks.append(self._choice(index, request, content, delta={"content": delta.text}))
        if delta.finish is not None:
            chunks.append(_chunk(index, {}, delta.finish.reason))
        return chunks

    def _choice(
        self, index: int, request: Request, output: Delta, **content: dict[str, Any]
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, **content, "logprobs": None}
        if request.wants_logprobs:
            choice["logprobs"] = chat_logprobs(self._texts, output.token_ids, output.logprobs)
        choice["finish_reason"] = output.finish.reason if output.finish is not None else None
        if self._with_ids:
            choice["token_ids"] = iter(output.token_ids)
        return choice


def _chunk(index: int, delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _turn(number: int, message: MessageBody) -> ChatTurn:
    if message.tool_calls:
        raise FieldError(
            f"messages[{number}].tool_calls is not supported yet",
            param="messages",
            code="unsupported_parameter",
        )
    content = message.content
    if content is None and message.role == "assistant":
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        raise FieldError(
            f"messages[{number}].content must be a string or a list of text parts", param="messages"
        )
    return ChatTurn(message.role, content, message.name, message.tool_call_id)


def _part(number: int, part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise FieldError(f"messages[{number}].content: only text parts are supported", param="messages")
    return text
