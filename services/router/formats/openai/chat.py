"""POST /v1/chat/completions: the request body and the response format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, JsonValue

from baton.base.errors import FieldError
from baton.request_fields.field import Endpoint
from services.router.formats.field_table import CHAT, FieldTable
from services.router.formats.json_bodies import encode, encode_with_lists
from services.router.formats.openai.fields import Body, FailFast, Integer, Part, SamplingBody, with_fields_of
from services.router.formats.openai.logprobs import chat_logprobs
from services.router.formats.openai.prediction import PredictionBody, text_of
from services.router.formats.openai.structured_choice import StructuredChoice
from services.router.formats.openai.tools import ToolBody, calls_sent_back, tool_use
from services.router.request.request import Chat, ChatTurn, Delta, ParsedRequest, Request
from services.router.request.validate import ROLES
from services.router.text.token_texts import TokenTexts

_ROLES: list[JsonValue] = [*sorted(ROLES)]


class MessageBody(Part):
    """One message. What assistant messages of a response have may be sent back."""

    # Validation checks it, for both APIs (`validate.ROLES`).
    role: str = Field(json_schema_extra={"enum": [*_ROLES]})
    # A string or a list of text parts; `_turn` checks it, for a better error message than pydantic's.
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: None = None
    reasoning_content: str | None = None
    # vLLM's name of it.
    reasoning: str | None = None
    # What the model answered in place of a content.
    refusal: str | None = None
    audio: None = None
    annotations: list[Any] | None = None


Messages = Annotated[list[MessageBody], FailFast()]


class ChatFields(Body):
    """The fields that define how a conversation is rendered; shared with /tokenize."""

    nested: ClassVar[Mapping[str, type[BaseModel]]] = {"messages": MessageBody, "tools": ToolBody}

    messages: Messages
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def chat(self) -> Chat:
        """The conversation; FieldError if a message is not text."""
        return Chat(
            tuple(_turn(number, message) for number, message in enumerate(self.messages)),
            add_generation_prompt=self.add_generation_prompt is not False,
            template_variables=self.chat_template_kwargs,
            tools=[] if self.tool_choice == "none" else [tool.for_template() for tool in self.tools or ()],
        )


@with_fields_of(Endpoint.CHAT)
class ChatBody(SamplingBody, ChatFields):
    """The body of POST /v1/chat/completions."""

    table: ClassVar[FieldTable] = CHAT
    nested: ClassVar[Mapping[str, type[BaseModel]]] = {
        **SamplingBody.nested,
        **ChatFields.nested,
        "prediction": PredictionBody,
    }

    prediction: PredictionBody | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None

    def parsed_request(self) -> ParsedRequest:
        """Converts the body. An unset max_tokens means the rest of the context."""
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs needs logprobs to be true", param="top_logprobs")
        common = self.common()
        common["api_names"] |= {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            common["api_names"]["max_tokens"] = "max_completion_tokens"
            common["max_tokens"] = self.max_completion_tokens
        return ParsedRequest(
            **common,
            chat=self.chat(),
            fills_context=True,
            structured=True,
            tools=tool_use(
                self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False
            ),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prediction=text_of(self.prediction),
        )


class ChatFormatter:
    """Formats deltas as choices of a chat completion."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, texts: TokenTexts) -> None:
        self._with_ids = body.return_token_ids is True
        self._texts = texts
        # By index, of outputs with structure.
        self._structured: dict[int, StructuredChoice] = {}

    def take(self, index: int, request: Request, delta: Delta) -> None:
        """Reads more of an output that is sent as a whole."""
        if (structured := self._of(index, request)) is not None:
            structured.take(delta)

    def reasoning_tokens(self) -> int | None:
        """Counts the tokens of reasoning of all outputs, so far; None where there is no reasoning."""
        counts = [count for one in self._structured.values() if (count := one.reasoning_tokens) is not None]
        return sum(counts) if counts else None

    def whole(self, index: int, request: Request, delta: Delta) -> dict[str, object]:
        """One choice of a response that is not streamed."""
        structured = self._of(index, request)
        if structured is None:
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            return self._choice(index, request, delta, message=message)
        choice = self._choice(index, request, delta, message=structured.message())
        if delta.finish is not None:
            choice["finish_reason"] = structured.reason(delta.finish)
        return choice

    def chunks(self, index: int, request: Request, delta: Delta) -> list[str]:
        """Returns up to three chunks: the role (first delta only), content if there is some, the finish
        reason."""
        rare = delta.opening or delta.finish is not None or request.structure is not None
        if rare or self._with_ids or request.wants_logprobs:
            return [encode_with_lists(chunk) for chunk in self._chunks(index, request, delta)]
        if not delta.text:
            return []
        # The same for most tokens, a few times faster.
        content = f'{{"content":{encode(delta.text)}}}'
        return [f'{{"index":{index},"delta":{content},"logprobs":null,"finish_reason":null}}']

    def _chunks(self, index: int, request: Request, delta: Delta) -> list[dict[str, object]]:
        chunks: list[dict[str, object]] = []
        if delta.opening:
            chunks.append(_chunk(index, {"role": "assistant", "content": ""}))
        structured = self._of(index, request)
        if structured is not None:
            return chunks + self._structured_chunks(index, request, delta, structured)
        if delta.text or (delta.token_ids and (request.wants_logprobs or self._with_ids)):
            content = dataclasses.replace(delta, finish=None)
            chunks.append(self._choice(index, request, content, delta={"content": delta.text}))
        if delta.finish is not None:
            chunks.append(_chunk(index, {}, delta.finish.reason))
        return chunks

    def _structured_chunks(
        self, index: int, request: Request, delta: Delta, structured: StructuredChoice
    ) -> list[dict[str, object]]:
        """A chunk for each piece; the tokens are those of the first one."""
        deltas = structured.deltas(delta)
        if not deltas and delta.token_ids and (request.wants_logprobs or self._with_ids):
            deltas = [{"content": ""}]
        chunks: list[dict[str, object]] = []
        for number, piece in enumerate(deltas):
            if number:
                chunks.append(_chunk(index, piece))
            else:
                content = dataclasses.replace(delta, finish=None)
                chunks.append(self._choice(index, request, content, delta=piece))
        if delta.finish is not None:
            chunks.append(_chunk(index, {}, structured.reason(delta.finish)))
        return chunks

    def _of(self, index: int, request: Request) -> StructuredChoice | None:
        """The parser of an output; None where it is plain text."""
        if request.structure is None:
            return None
        return self._structured.setdefault(index, StructuredChoice(request.structure))

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


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _turn(number: int, message: MessageBody) -> ChatTurn:
    calls = calls_sent_back(number, message.tool_calls) if message.tool_calls else None
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal or ""
    if isinstance(content, list):
        refuses = message.role == "assistant"
        content = "\n".join(_part(number, part, refuses=refuses) for part in content)
    if not isinstance(content, str):
        raise FieldError(
            f"messages[{number}].content must be a string or a list of text parts", param="messages"
        )
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return ChatTurn(message.role, content, message.name, message.tool_call_id, reasoning, calls)


def _part(number: int, part: object, *, refuses: bool) -> str:
    """The text of a part. `refuses`: it may be a refusal."""
    kind = part.get("type") if isinstance(part, dict) else None
    known = kind == "text" or (kind == "refusal" and refuses)
    text = part.get(kind) if isinstance(part, dict) and known else None
    if not isinstance(text, str):
        raise FieldError(f"messages[{number}].content: only text parts are supported", param="messages")
    return text
