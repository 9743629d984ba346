"""The bounds of a request's fields, for both APIs: validation enforces them, OpenAPI documents them.

They are at least as wide as OpenAI's and vLLM's: what either of them takes is taken. Where workers compute
with less, a number beyond theirs is used as the nearest one of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

U32 = 2**32 - 1
U64 = 2**64 - 1
I64 = 2**63 - 1


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a number may be, which is finite; `above`: the least itself is excluded.
    `default`: if it is not set. `used`: the least and the most that are computed with, where that is less."""

    least: float
    most: float
    default: float | None = None
    above: bool = False
    used: tuple[float, float] | None = None

    def nearest(self, value: float) -> float:
        """The number that is computed with for this one."""
        return value if self.used is None else min(max(value, self.used[0]), self.used[1])


DEFAULT_MAX_TOKENS = 16
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 8
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_MODEL_CHARS = 1024
MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICES = 10_000
MAX_RULES = 2_000
MAX_TOOLS = 128
MAX_TEMPLATE_VARIABLES = 128

# Field → the bounds of its number. What is used of repetition_penalty keeps a float32 logit finite.
NUMBERS: Mapping[str, Bounds] = {
    "temperature": Bounds(0, math.inf, 1, used=(0, 1e6)),
    "top_k": Bounds(-1, I64, 0, used=(0, U32)),
    # No more than the most likely token has this probability.
    "top_p": Bounds(0, 1, 1, used=(2.0**-40, 1)),
    "min_p": Bounds(0, 1, 0),
    "repetition_penalty": Bounds(0, math.inf, 1, above=True, used=(1e-6, 1e6)),
    "presence_penalty": Bounds(-2, 2, 0),
    "frequency_penalty": Bounds(-2, 2, 0),
    "logit_bias": Bounds(-math.inf, math.inf, 0, used=(-100, 100)),
    "seed": Bounds(-I64 - 1, U64),
    "n": Bounds(1, 128, 1),
    "max_tokens": Bounds(0, I64, used=(0, U32)),
    "min_tokens": Bounds(0, I64, 0, used=(0, U32)),
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "priority": Bounds(-I64 - 1, I64, 0, used=(-(2**31), 2**31 - 1)),
}
# Field → the most items of its list or object.
LENGTHS: Mapping[str, int] = {
    "logit_bias": MAX_LOGIT_BIASES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "tools": MAX_TOOLS,
    "chat_template_kwargs": MAX_TEMPLATE_VARIABLES,
}
