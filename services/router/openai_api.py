"""The bodies of OpenAI's completions API, with the extra fields of vLLM's that Baton knows.

A field that is not supported yet is accepted at the value that changes nothing, since clients
send those; at any other value it is refused. A field nobody knows is refused too: a setting
silently lost costs more than a request refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.errors import BatonError, ErrorKind
from services.common.errors import FieldError
from services.router.request import Asked, Finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.v1.router_pb2 import Usage

MAX_PROMPTS = 256

# Field → the values that ask for nothing. null always does.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "logprobs": (),
    "echo": (False,),
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
}

# A prompt is text or token ids, or a list of either; whether a list is one is told by its items.
Prompt = str | list[Any]
Stop = str | list[str]


class _Body(BaseModel):
    """Strict: no text for a number, no unknown field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(_Body):
    """What a stream carries beside its tokens."""

    include_usage: bool | None = None


class CompletionBody(_Body):
    """POST /v1/completions, without the fields of `_NEUTRAL`."""

    model: str
    prompt: Prompt
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # Says who asks; not used.
    user: Annotated[str | None, Field(max_length=1024)] = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def asked(self) -> list[Asked]:
        """One request a prompt, in the validator's words."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return [
            Asked(
                model=self.model,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=None if isinstance(prompt, str) else prompt,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seed,
                max_tokens=self.max_tokens,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                stop=stop,
                ignore_eos=self.ignore_eos is True,
                skip_special_tokens=self.skip_special_tokens,
            )
            for prompt in _prompts(self.prompt)
        ]


def parse_completion(document: object) -> CompletionBody:
    """The body as a checked model; FieldError names the first field that is wrong.

    The error never repeats a value: it may be part of a prompt.
    """
    if not isinstance(document, dict):
        raise FieldError("the body must be a JSON object")
    known = dict(document)
    for name, neutral in _NEUTRAL.items():
        value = known.pop(name, None)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            raise FieldError(f"{name} is not supported yet", param=name, code="unsupported_parameter")
    try:
        body = CompletionBody.model_validate(known)
    except ValidationError as error:
        raise _field_error(error) from None
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options needs stream to be true", param="stream_options")
    return body


def usage_body(*usages: Usage) -> dict[str, int]:
    """OpenAI's usage of one or more outputs."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def choice_body(
    index: int, text: str, finish: Finish | None, token_ids: list[int] | None
) -> dict[str, object]:
    """One choice, of a whole answer or of a chunk; `token_ids` only where they were asked for."""
    reason = finish.name.lower() if finish is not None else None
    choice: dict[str, object] = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _prompts(prompt: str | list[Any]) -> list[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise FieldError("the prompt is empty", param="prompt")
    if all(_is_id(item) for item in prompt):
        return [tuple(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise FieldError(f"at most {MAX_PROMPTS} prompts in one request; got {len(prompt)}", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) and all(_is_id(token) for token in item) for item in prompt):
        return [tuple(item) for item in prompt]
    raise FieldError("prompt must be a text, token ids, or a list of either", param="prompt")


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _field_error(error: ValidationError) -> BatonError:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part not in _BRANCHES)
    if first["type"] == "extra_forbidden":
        return FieldError(f"unknown field {name[:64]!r}", param=name[:64], code="unknown_parameter")
    if not name:
        return BatonError(ErrorKind.INVALID, first["msg"])
    return FieldError(f"{name}: {first['msg']}", param=name)


# What pydantic adds to the place of an error to say which branch of a union it means.
_BRANCHES = frozenset({"str", "int", "float", "bool", "list[any]", "list[str]", "list[int]"})
