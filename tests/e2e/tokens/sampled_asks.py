"""Requests that use the sampler's features, in the words of both APIs and in those of the reference."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.sequence import Limits, SamplingParams
from tests.support.checkpoints import END_ID, VOCAB_SIZE
from tests.support.sampling.random_sampling import FEATURES, as_float32, random_params
from tests.support.text_truth import Ends, TextTruth

# What a request may ask beside what its draws depend on.
OTHERS = (
    "echo",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "text",
    "chat",
    "prompt_only",
)
EVERY = (*FEATURES, *OTHERS)
# Each at the edge of what may be asked.
EXTREMES: tuple[dict[str, Any], ...] = (
    {"temperature": 100.0},
    {"temperature": 1e-3},
    {"temperature": 1e-40},
    {"top_k": 1},
    {"top_k": 2**32 - 1},
    {"top_p": 1e-7},
    {"min_p": 1.0},
    {"top_n_sigma": 1e-3},
    {"top_n_sigma": 1e6},
    {"top_k": 2, "top_p": 0.999, "min_p": 0.999, "logprobs": 20},
    {"repetition_penalty": 100.0, "temperature": 0},
    {"repetition_penalty": 0.01},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.5},
    {"logit_bias": {5: 100.0, 6: -100.0}, "logprobs": 20, "temperature": 0},
    {"logit_bias": dict.fromkeys(range(300), -100.0), "logprobs": 0},
    {"logit_bias": {9: 100.0}, "stop_token_ids": [9, *range(300, 307)], "min_tokens": 11},
    {"seed": 2**64 - 1, "n": 3},
)
_SINGLE = (
    "temperature",
    "top_p",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class Ask:
    """One request. `prompt`: token ids, a text, or with `chat` what the user says. `fields` are those of
    `baton.client`, numbers as a client writes them."""

    prompt: tuple[int, ...] | str
    fields: dict[str, Any]
    chat: bool = False
    features: frozenset[str] = frozenset()

    @property
    def choices(self) -> int:
        n: int = self.fields.get("n", 1)
        return n

    @property
    def logprobs(self) -> int | None:
        """The number of likeliest tokens that are asked for; None: no logprobs."""
        return self.fields.get("logprobs")

    @property
    def echo(self) -> bool:
        return self.fields.get("echo") is True

    @property
    def skip_special(self) -> bool:
        return self.fields.get("skip_special_tokens") is not False

    def prompt_ids(self, texts: TextTruth) -> tuple[int, ...]:
        if isinstance(self.prompt, tuple):
            return self.prompt
        return tuple(texts.chat(self.prompt) if self.chat else texts.encode(self.prompt))

    def echoed(self, texts: TextTruth) -> str:
        """The text that the answer begins with."""
        if not self.echo:
            return ""
        if isinstance(self.prompt, str):
            return self.prompt
        return texts.decode(self.prompt, skip_special=self.skip_special)

    def params(self, choice: int) -> SamplingParams:
        """The sampling parameters of a choice."""
        numbers = {name: as_float32(self.fields[name]) for name in _SINGLE if name in self.fields}
        return SamplingParams(
            **{"temperature": 1.0, **numbers},
            top_k=self.fields.get("top_k", 0),
            seed=(self.fields["seed"] + choice) % 2**64,
            logit_bias=tuple(
                (token, as_float32(bias)) for token, bias in self.fields.get("logit_bias", {}).items()
            ),
            logprobs=self.logprobs,
        )

    @property
    def ends(self) -> Ends:
        """The ids and strings that end each choice."""
        own = tuple(self.fields.get("stop_token_ids", ()))
        return Ends(
            max_tokens=self.fields["max_tokens"],
            stop_ids=own if self.fields.get("ignore_eos") else (*own, END_ID),
            stops=tuple(self.fields.get("stop", ())),
            min_tokens=self.fields.get("min_tokens", 0),
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.ends.max_tokens, self.ends.stop_ids, self.ends.min_tokens)


def features_of(rng: random.Random) -> frozenset[str]:
    """Draws a random combination of features."""
    return frozenset(rng.sample(EVERY, rng.randint(2, len(EVERY) - 2)))


def random_ask(rng: random.Random, features: frozenset[str], longest: int) -> Ask:
    """A request with these features, as far as one may have them at once, of at most `longest` tokens."""
    if "chat" in features:  # has no echo, and its prompt is a text
        features = features - {"echo", "prompt_only", "text"}
    if "prompt_only" in features:
        features = features - {"min_tokens"} | {"echo"}
    fields = _sampling_fields(rng, features)
    fields["max_tokens"] = 0 if "prompt_only" in features else rng.randint(longest // 2, longest)
    _add_ends(rng, features, fields)
    fields |= {name: True for name in ("echo", "ignore_eos") if name in features}
    if "skip_special_tokens" in features:
        fields["skip_special_tokens"] = False
    if "n" in features:
        fields["n"] = rng.randint(2, 3)
    prompt = tuple(rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 7, 8, rng.randint(2, 150)])))
    if features & {"text", "chat"}:
        text = "".join(rng.choices("naïve 接力 🏃 relay", k=rng.randint(1, 60)))
        return Ask(text, fields, "chat" in features, features)
    return Ask(prompt, fields, features=features)


def _sampling_fields(rng: random.Random, features: frozenset[str]) -> dict[str, Any]:
    params = random_params(rng, features, VOCAB_SIZE)
    # Single precision has none of these decimals: both APIs must narrow them alike.
    fields: dict[str, Any] = {
        name: round(getattr(params, name), 3)
        for name in _SINGLE
        if name == "temperature" or getattr(params, name) != getattr(SamplingParams(), name)
    }
    fields["seed"] = params.seed
    if params.top_k:
        fields["top_k"] = params.top_k
    if params.logit_bias:
        fields["logit_bias"] = {token: round(bias, 3) for token, bias in params.logit_bias}
    if params.logprobs is not None:
        fields["logprobs"] = params.logprobs
    return fields


def _add_ends(rng: random.Random, features: frozenset[str], fields: dict[str, Any]) -> None:
    """Stops that random text is likely to meet."""
    if features & {"stop_token_ids", "min_tokens"}:
        fields["stop_token_ids"] = rng.sample([i for i in range(VOCAB_SIZE) if i != END_ID], 7)
    if "min_tokens" in features:
        fields["min_tokens"] = rng.randint(1, fields["max_tokens"])
    if "stop" in features:
        letters = rng.sample(string.ascii_letters + string.digits, 12)
        fields["stop"] = [*letters, *_pairs(rng)]


def _pairs(rng: random.Random) -> Sequence[str]:
    return ["".join(rng.choices(string.ascii_lowercase, k=2)) for _ in range(4)]
