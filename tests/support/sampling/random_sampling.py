"""Random requests' parameters, every feature alone and in combination."""

from __future__ import annotations

import random
import struct

from baton.engine.sequence import Limits, SamplingParams

FEATURES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "logprobs",
)
NEED_TEMPERATURE = ("top_k", "top_p", "min_p", "top_n_sigma")


def as_float32(value: float) -> float:
    """The wire's and the slots' numbers are float32."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def random_features(rng: random.Random) -> frozenset[str]:
    return frozenset(rng.sample(FEATURES, rng.randrange(len(FEATURES) + 1)))


def random_params(rng: random.Random, features: frozenset[str], vocab_size: int) -> SamplingParams:
    """Parameters that use these features, at values where they matter."""

    def drawn(feature: str, low: float, high: float, off: float) -> float:
        return as_float32(rng.uniform(low, high)) if feature in features else off

    warm = features & {"temperature", *NEED_TEMPERATURE}
    biased = rng.sample(range(vocab_size), rng.randint(1, vocab_size // 2))
    return SamplingParams(
        temperature=as_float32(rng.uniform(0.3, 2)) if warm else 0.0,
        top_k=rng.randint(1, vocab_size // 2) if "top_k" in features else 0,
        top_p=drawn("top_p", 0.2, 0.99, 1.0),
        seed=rng.getrandbits(64),
        min_p=drawn("min_p", 0.01, 0.5, 0.0),
        repetition_penalty=drawn("repetition_penalty", 0.5, 3.0, 1.0),
        presence_penalty=drawn("presence_penalty", -2, 2, 0.0),
        frequency_penalty=drawn("frequency_penalty", -2, 2, 0.0),
        logit_bias=tuple((token, as_float32(rng.gauss(0, 3))) for token in biased)
        if "logit_bias" in features
        else (),
        logprobs=rng.choice([0, 1, 5, 20]) if "logprobs" in features else None,
        top_n_sigma=drawn("top_n_sigma", 0.3, 2.5, 0.0),
    )


def random_limits(rng: random.Random, features: frozenset[str], vocab_size: int, max_tokens: int) -> Limits:
    """Limits with eight stop ids, which would be drawn soon, where min_tokens is used."""
    if "min_tokens" not in features:
        return Limits(max_tokens)
    stops = tuple(rng.sample(range(vocab_size), 8))
    return Limits(max_tokens, stops, rng.randint(1, max_tokens))
