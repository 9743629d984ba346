"""The common fields of OpenAI's request bodies, and the extra fields of vLLM's API that Baton supports.

A field that is not supported yet is accepted at its neutral value, since clients send those, and refused at
any other. Unknown fields are refused too, because ignoring a setting silently is worse than an error. Hints
change no token of the output, so they are accepted whatever their value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import BatonError, ErrorKind, FieldError
from services.router.request.request import OPTIONAL_FIELDS, ParsedRequest

# Field → its neutral values. null is always neutral.
Neutral = Mapping[str, tuple[object, ...]]
NEUTRAL: Neutral = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}
# Labels of a request, and advice on how to run it. Not used.
HINTS = frozenset(
    {
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "user",
    }
)

Stop = str | list[str]


class Body(BaseModel):
    """Strict validation: no type conversion, no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # The fields that are not supported yet.
    neutral: ClassVar[Neutral] = {}

    @classmethod
    def parse(cls, document: object) -> Self:
        """Validates a JSON document; FieldError names the first invalid field.

        The error never contains a value, which may be part of a prompt.
        """
        if not isinstance(document, dict):
            raise FieldError("the body must be a JSON object")
        known = {name: value for name, value in document.items() if name not in HINTS}
        for name, allowed in cls.neutral.items():
            value = known.pop(name, None)
            if value is not None and not any(_same(value, one) for one in allowed):
                raise FieldError(f"{name} is not supported yet", param=name, code="unsupported_parameter")
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            raise _field_error(error) from None


class StreamOptions(Body):
    """What a stream carries besides its tokens. Unknown options are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    # A last chunk with the usage, and the usage so far in every chunk.
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """The fields of sampling and output that both kinds of completion have."""

    neutral: ClassVar[Neutral] = NEUTRAL

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def sampling(self) -> ParsedRequest:
        """Converts these fields; the caller adds the prompt and the fields of its API."""
        return ParsedRequest(
            model=self.model,
            logit_bias=tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=self.ignore_eos is True,
            **{name: getattr(self, name) for name in OPTIONAL_FIELDS},
        )


def is_token_id(item: object) -> bool:
    """Whether a JSON value is an integer."""
    return isinstance(item, int) and not isinstance(item, bool)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise FieldError("logit_bias: a key must be a token id", param="logit_bias")
    return int(key)


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _field_error(error: ValidationError) -> BatonError:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    # The location also has the branches of a union, which pydantic names after their types.
    steps = [step for step in first["loc"] if not (isinstance(step, str) and _is_branch(step))]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:65]
    param = str(steps[0])[:64] if steps else None
    if first["type"] == "extra_forbidden":
        return FieldError(f"unknown field {path!r}", param=param, code="unknown_parameter")
    if param is None:
        return BatonError(ErrorKind.INVALID, first["msg"])
    return FieldError(f"{path}: {first['msg']}", param=param)


def _is_branch(step: str) -> bool:
    return step in ("str", "int", "float", "bool", "none") or step.endswith("]")
