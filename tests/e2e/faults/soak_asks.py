"""Requests of the soak: long and short, greedy and drawn, over each API, and when a client
disconnects."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from baton.engine.sequence import SamplingParams
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.support.cluster import MODEL
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.sampling.random_sampling import random_params

# Longer than any answer takes where nothing is broken: a client that still waits then was forgotten.
LIMIT_S = 90.0
_FEATURES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "frequency_penalty",
)
_MOST_LOGPROBS = 5


class Api(Enum):
    """The API and the form of the answer."""

    GRPC = "gRPC stream"
    EVENTS = "HTTP stream"
    WHOLE = "HTTP, in one body"


class Way(Enum):
    """The way in which a client goes away."""

    CANCEL = "it cancels its call"
    DISCONNECT = "its connection is closed"
    DEADLINE = "its deadline passes"


@dataclass(frozen=True)
class Leave:
    """The moment of a client's disconnect: after `after_s` seconds, or with its `at_token`-th token if that
    is sooner, or with the end of its outputs, before that of the call (`at_end`)."""

    way: Way
    after_s: float = LIMIT_S
    at_token: int | None = None
    at_end: bool = False

    @classmethod
    def draw(cls, dice: random.Random, api: Api, max_tokens: int) -> Leave:
        """Soon rather than late, or at a token where something begins or ends."""
        if api is not Api.WHOLE and dice.random() < 0.5:
            way = dice.choice([Way.CANCEL, Way.DISCONNECT]) if api is Api.GRPC else Way.DISCONNECT
            at_token = dice.choice([1, 2, (max_tokens + 1) // 2, max_tokens])
            return cls(way, at_token=at_token, at_end=at_token == max_tokens and dice.random() < 0.5)
        way = dice.choice(list(Way)) if api is Api.GRPC else Way.DISCONNECT
        return cls(way, after_s=1.5 * dice.random() ** 2)


@dataclass(frozen=True)
class Ask:
    """One request. Choice i of `n` draws with the seed + i."""

    api: Api
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    n: int = 1
    stop: tuple[str, ...] = ()
    leave: Leave | None = None

    @classmethod
    def draw(cls, dice: random.Random) -> Ask:
        """Three of five stay to the end."""
        api = dice.choice(list(Api))
        length = dice.randint(200, 600) if dice.random() < 0.2 else dice.randint(1, 60)
        max_tokens = dice.randint(80, 150) if dice.random() < 0.15 else dice.randint(2, 30)
        features = (
            frozenset(dice.sample(_FEATURES, dice.randint(1, 4))) if dice.random() < 0.5 else frozenset()
        )
        params = random_params(dice, features, VOCAB_SIZE)
        with_logprobs = dice.random() < 0.15
        return cls(
            api=api,
            prompt=tuple(dice.randrange(VOCAB_SIZE) for _ in range(length)),
            # The HTTP API's seeds are JSON's, and below 2^63.
            params=replace(
                params,
                seed=params.seed >> 2,
                logprobs=dice.randint(0, _MOST_LOGPROBS) if with_logprobs else None,
            ),
            max_tokens=max_tokens,
            n=dice.choice([2, 3]) if dice.random() < 0.1 else 1,
            stop=tuple(dice.sample(string.ascii_lowercase, 3)) if dice.random() < 0.1 else (),
            leave=Leave.draw(dice, api, max_tokens) if dice.random() < 0.4 else None,
        )

    def params_of(self, choice: int) -> SamplingParams:
        return replace(self.params, seed=self.params.seed + choice)

    @property
    def _fields(self) -> dict[str, Any]:
        """The fields that both APIs name alike."""
        fields: dict[str, Any] = {
            "temperature": self.params.temperature,
            "top_k": self.params.top_k,
            "top_p": self.params.top_p,
            "min_p": self.params.min_p,
            "top_n_sigma": self.params.top_n_sigma,
            "repetition_penalty": self.params.repetition_penalty,
            "frequency_penalty": self.params.frequency_penalty,
            "seed": self.params.seed,
            "max_tokens": self.max_tokens,
            "n": self.n,
            "ignore_eos": True,
        }
        return fields if self.params.logprobs is None else {**fields, "logprobs": self.params.logprobs}

    def message(self) -> GenerateRequest:
        return GenerateRequest(
            model=MODEL, token_ids=TokenIds(ids=self.prompt), stop=self.stop, **self._fields
        )

    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "stop": list(self.stop),
            "stream": self.api is Api.EVENTS,
            "return_token_ids": True,
            **self._fields,
        }
