"""A row of the table of request fields: name, whose meaning, one sentence, type, endpoints, bounds, wire."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import Enum, Flag
from functools import cached_property


class Endpoint(Flag):
    """HTTP endpoints with a body."""

    COMPLETIONS = 1
    CHAT = 2
    RESPONSES = 4
    TOKENIZE = 8
    DETOKENIZE = 16
    NONE = 0
    GENERATING = COMPLETIONS | CHAT | RESPONSES


class Kind(Enum):
    """Types of values, as the documentation names them. A field of kind OTHER has a type of its own, which
    the body that uses it declares."""

    FLOAT = "number"
    INTEGER = "integer"
    FLAG = "true or false"
    TEXT = "string"
    TEXTS = "list of strings"
    STOP = "string, or list of strings"
    TOKEN_IDS = "list of token ids"
    BIASES = "object: token id → number"
    LOGPROBS = "integer; in a chat true or false"
    OBJECT = "object"
    OTHER = "see the API"


class Stage(Enum):
    """Steps of sampling: PENALTY changes logits by the tokens before, FILTER drops tokens before a draw."""

    PENALTY = "penalty"
    FILTER = "filter"


class Treatment(Enum):
    """Ways in which the router treats a field; the values are the words of the documentation."""

    USED = "used"
    NO_EFFECT = "accepted, no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a number may be, which is finite; `above`: the least itself is excluded.
    `used`: the least and the most that are computed with, where that is less."""

    least: float
    most: float
    above: bool = False
    used: tuple[float, float] | None = None

    def nearest(self, value: float) -> float:
        """The number that is computed with for this one."""
        return value if self.used is None else min(max(value, self.used[0]), self.used[1])

    def has_float32(self, value: float) -> bool:
        """True for a float32 within the float32 of both ends of what is computed with. False for NaN."""
        least, most = self._float32_ends
        return least <= value <= most and math.isfinite(value)

    @cached_property
    def _float32_ends(self) -> tuple[float, float]:
        least, most = self.used or (self.least, self.most)
        return float32(least), float32(most)


@dataclass(frozen=True)
class Wire:
    """A field's protobuf type and its number in `GenerateRequest` and, of a sampling parameter, in
    `Sampling`, where it has the same name."""

    type: str
    request: int
    sampling: int | None = None


@dataclass(frozen=True)
class RequestField:
    """One row. `source`: whose API defines what the field means.

    `neutral`: values at which it is accepted where it is otherwise refused. `default`: of an unset field,
    where that is a value; `off`: where it differs, the value at which a sampling parameter changes nothing.
    `most_items`: of a list or object; `most_chars`: of a string, or of each in a list. `stage`: of a sampling
    parameter. `wire`: None where gRPC does not have the field, or has it elsewhere.
    """

    name: str
    source: str
    meaning: str = ""
    kind: Kind = Kind.OTHER
    used: Endpoint = Endpoint.NONE
    no_effect: Endpoint = Endpoint.NONE
    refused: Endpoint = Endpoint.NONE
    neutral: tuple[object, ...] = ()
    bounds: Bounds | None = None
    default: float | bool | None = None
    off: float | None = None
    most_items: int | None = None
    most_chars: int | None = None
    wire: Wire | None = None
    stage: Stage | None = None

    def treatment_at(self, endpoint: Endpoint) -> Treatment | None:
        """Returns how the endpoint treats the field; None where it is undocumented. An endpoint that
        generates refuses what only others of them use: a `prompt` in a chat is a mistake."""
        if endpoint & self.used:
            return Treatment.USED
        if endpoint & self.no_effect:
            return Treatment.NO_EFFECT
        of_another = self.used & Endpoint.GENERATING and endpoint & Endpoint.GENERATING
        return Treatment.REFUSED if of_another or endpoint & self.refused else None

    @property
    def is_value(self) -> bool:
        """True where every API has the field as one number or flag of one meaning, or leaves it unset."""
        scalar = self.kind in (Kind.FLOAT, Kind.INTEGER, Kind.FLAG)
        return scalar and bool(self.used) and self.wire is not None and self.wire.type.startswith("optional ")

    @property
    def unused(self) -> float | bool | None:
        """The value at which a sampling parameter changes nothing."""
        return self.default if self.off is None else self.off


def float32(value: float) -> float:
    """The nearest float32; infinite, with its sign, if the number is out of range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
