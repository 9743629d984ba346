"""POST /v1/completions: the request body and the response format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel

from baton.base.errors import FieldError
from baton.request_fields.field import Endpoint
from services.router.formats.field_table import COMPLETIONS, FieldTable
from services.router.formats.json_bodies import encode, encode_with_lists
from services.router.formats.openai.fields import (
    Integer,
    SamplingBody,
    are_token_ids,
    whole_numbers,
    with_fields_of,
)
from services.router.formats.openai.logprobs import legacy_logprobs
from services.router.formats.openai.prediction import PredictionBody, text_of
from services.router.request.request import Delta, ParsedRequest, Request
from services.router.request.sizes import MAX_PROMPTS
from services.router.text.token_texts import TokenTexts

MAX_CHOICES = 1024

# Text, token ids, or a list of either. What a list is, is decided by its items.
Prompt = str | list[Any]


@with_fields_of(Endpoint.COMPLETIONS)
class CompletionBody(SamplingBody):
    """The body of POST /v1/completions."""

    table: ClassVar[FieldTable] = COMPLETIONS
    nested: ClassVar[Mapping[str, type[BaseModel]]] = {**SamplingBody.nested, "prediction": PredictionBody}

    prompt: Prompt
    prediction: PredictionBody | None = None
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None

    def parsed_requests(self) -> list[ParsedRequest]:
        """Converts the body: one request for each prompt."""
        common = ParsedRequest(
            **self.common(),
            echo=self.echo is True,
            logprobs=self.logprobs,
            best_of=self.best_of,
            prediction=text_of(self.prediction),
        )
        prompts = _prompts(self.prompt)
        if len(prompts) > 1 and len(prompts) * (common.n or 1) > MAX_CHOICES:
            raise FieldError(f"at most {MAX_CHOICES} choices in one request", param="n")
        return [
            dataclasses.replace(common, text=prompt)
            if isinstance(prompt, str)
            else dataclasses.replace(common, token_ids=prompt)
            for prompt in prompts
        ]


class CompletionFormatter:
    """Formats deltas as choices of a text completion, the same way for whole responses and chunks."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, texts: TokenTexts) -> None:
        self._with_ids = body.return_token_ids is True
        self._texts = texts

    def take(self, index: int, request: Request, delta: Delta) -> None:
        """Does nothing: a text is formatted once it is whole."""

    def reasoning_tokens(self) -> None:
        """Does nothing: a completion has no reasoning."""

    def whole(self, index: int, request: Request, delta: Delta) -> dict[str, object]:
        """One choice of a response or of a chunk."""
        text = delta.text
        if delta.opening and request.echo is not None:
            text = request.echo.text + text
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None}
        if request.wants_logprobs:
            choice["logprobs"] = legacy_logprobs(self._texts, request, delta)
        choice["finish_reason"] = delta.finish.reason if delta.finish is not None else None
        if self._with_ids:
            choice["token_ids"] = iter(delta.token_ids)
        return choice

    def chunks(self, index: int, request: Request, delta: Delta) -> list[str]:
        """One choice for a chunk of its own, as JSON."""
        if self._with_ids or delta.opening or delta.finish is not None or request.wants_logprobs:
            return [encode_with_lists(self.whole(index, request, delta))]
        # The same for most tokens, a few times faster.
        return [f'{{"index":{index},"text":{encode(delta.text)},"logprobs":null,"finish_reason":null}}']


def _prompts(prompt: str | list[Any]) -> list[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        return [prompt]
    if are_token_ids(prompt := whole_numbers(prompt)):  # an empty list too: `check_fields` refuses it
        return [tuple(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise FieldError(f"at most {MAX_PROMPTS} prompts in one request; got {len(prompt)}", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    lists = [whole_numbers(item) for item in prompt if isinstance(item, list)]
    if len(lists) == len(prompt) and all(map(are_token_ids, lists)):
        return [tuple(item) for item in lists]
    raise FieldError("prompt must be a text, token ids, or a list of either", param="prompt")
