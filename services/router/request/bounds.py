"""The bounds of a request's fields, for both APIs: validation enforces them, OpenAPI documents them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

U32 = 2**32 - 1
U64 = 2**64 - 1


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a number may be; `above`: the least itself is excluded. `default`: if it is
    not set."""

    least: float
    most: float
    default: float | None = None
    above: bool = False


DEFAULT_MAX_TOKENS = 16
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 8
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_MODEL_CHARS = 1024
MAX_GRAMMAR_BYTES = 128 * 1024
MAX_TOOLS = 128
MAX_TEMPLATE_VARIABLES = 128

# Field → the bounds of its number. Those of repetition_penalty keep a float32 logit finite.
NUMBERS: Mapping[str, Bounds] = {
    "temperature": Bounds(0, 100, 1),
    "top_k": Bounds(0, U32, 0),
    "top_p": Bounds(0, 1, 1, above=True),
    "min_p": Bounds(0, 1, 0),
    "repetition_penalty": Bounds(0.01, 100, 1),
    "presence_penalty": Bounds(-2, 2, 0),
    "frequency_penalty": Bounds(-2, 2, 0),
    "logit_bias": Bounds(-100, 100, 0),
    "seed": Bounds(0, U64),
    "n": Bounds(1, 128, 1),
    "max_tokens": Bounds(1, U32),
    "min_tokens": Bounds(0, U32, 0),
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "priority": Bounds(-(2**31), 2**31 - 1, 0),
}
# Field → the most items of its list or object.
LENGTHS: Mapping[str, int] = {
    "logit_bias": MAX_LOGIT_BIASES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "tools": MAX_TOOLS,
    "chat_template_kwargs": MAX_TEMPLATE_VARIABLES,
}
