"""Distributions of lengths and delays: `128`, `uniform:64-256`, `normal:128,32`, `lognormal:128,0.5`,
`exp:0.5`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from loadgen.common.errors import LoadgenError

_NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
_FORMS = {
    "fixed": re.compile(_NUMBER),
    "uniform": re.compile(rf"uniform:{_NUMBER}-{_NUMBER}"),
    "normal": re.compile(rf"normal:{_NUMBER},{_NUMBER}"),
    "lognormal": re.compile(rf"lognormal:{_NUMBER},{_NUMBER}"),
    "exp": re.compile(rf"exp:{_NUMBER}"),
}
FORMS_HELP = "N | uniform:A-B | normal:MEAN,STD | lognormal:MEAN,CV | exp:MEAN"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of non-negative values; it draws from the caller's generator."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Parses `text`. Raises LoadgenError for an invalid one."""
        for kind, form in _FORMS.items():
            if match := form.fullmatch(text.strip()):
                return cls(kind, *(float(value) for value in match.groups()))
        raise LoadgenError(f"{text!r} is no distribution ({FORMS_HELP})")

    def draw(self, random: np.random.Generator) -> float:
        """One value; negative draws of a normal distribution become 0."""
        if self.kind == "fixed":
            return self.first
        if self.kind == "uniform":
            return float(random.uniform(self.first, self.second))
        if self.kind == "normal":
            return max(0.0, float(random.normal(self.first, self.second)))
        if self.kind == "lognormal":
            variance = math.log1p(self.second**2)
            return float(random.lognormal(math.log(self.first) - variance / 2, math.sqrt(variance)))
        return float(random.exponential(self.first))

    def draw_length(self, random: np.random.Generator) -> int:
        """A whole number, at least 1; uniform lengths include both ends."""
        if self.kind == "uniform":
            return int(random.integers(max(1, round(self.first)), round(self.second) + 1))
        return max(1, round(self.draw(random)))
