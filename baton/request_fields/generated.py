"""Types made from the table of request fields by tools/request_types.py: do not edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict


class RequestArguments(TypedDict, total=False):
    """Arguments that the client sends as they are; the server chooses the default of those left out."""

    # Added to the logits of these tokens, before all else.
    logit_bias: Mapping[int, float]
    # Divides the positive and multiplies the negative logits of tokens in prompt or output.
    repetition_penalty: float
    # Subtracted from the logits of tokens that the output has.
    presence_penalty: float
    # Subtracted from a token's logit for each time that the output has the token.
    frequency_penalty: float
    # Keeps tokens whose logit is at most this many standard deviations of the row's logits below the largest;
    # 0 and less keep all.
    top_n_sigma: float
    # Divides the logits; 0 takes the likeliest token.
    temperature: float
    # Keeps this many of the likeliest tokens; 0 and -1 keep all.
    top_k: int
    # Keeps the fewest likeliest tokens, of those that top_k left, whose probabilities reach this sum.
    top_p: float
    # Keeps tokens of at least this share of the likeliest token's probability.
    min_p: float
    # Decides every draw together with the token's position; chosen by the router where unset. Output number i
    # of n draws with seed + i.
    seed: int
    # Reports this many of the likeliest tokens at each position, beside the drawn one; in a chat true, and
    # top_logprobs is the number.
    logprobs: int
    # Most tokens of an output; where unset 16, in a chat the rest of the context.
    max_tokens: int
    # Tokens of an output before which no stop id and no stop string ends it.
    min_tokens: int
    # Strings that end an output, without being part of it.
    stop: str | Sequence[str]
    # Tokens that end an output; the model's own count among the 8.
    stop_token_ids: Sequence[int]
    # Continues past the model's end-of-sequence tokens.
    ignore_eos: bool
    # Leaves special tokens out of the text.
    skip_special_tokens: bool
    # Number of outputs for each prompt.
    n: int
    # Begins the text with the prompt, and logprobs with those of its tokens.
    echo: bool
    # Requests with lower ones are placed first; below 0 counts as 0.
    priority: int
    # Objective for the time to the first token in milliseconds; over HTTP a header.
    ttft_slo_ms: float
    # Objective for the mean time per output token after the first, in milliseconds; over HTTP a header.
    tpot_slo_ms: float
    # Most draft tokens that a decode step verifies for an output, 0 for none; where unset as many as the
    # worker does.
    max_draft_tokens: int
    # Adds the tokenizer's special tokens, such as BOS, to a text.
    add_special_tokens: bool


@dataclass(frozen=True, kw_only=True)
class RequestValues:
    """Numbers and flags of a request, whatever the API, as the client sent them; None means unset."""

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_n_sigma: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    priority: int | None = None
    max_draft_tokens: int | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """The sampling parameters that an engine is given; each default changes nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    top_n_sigma: float = 0.0
