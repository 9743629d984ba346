"""Parses `--class chat weight:3 tenant:acme priority:1 input-len:200 ttft:300 tpot:30`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loadgen.analysis.slo import parse_goodput
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import RequestClass

_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "weight": ("weight", float),
    "tenant": ("tenant", str),
    "priority": ("priority", int),
    "input-len": ("input_len", str),
    "output-len": ("output_len", str),
}


def parse_class(words: Sequence[str]) -> RequestClass:
    """Parses a class: its name, its fields, and limits. Raises LoadgenError for an invalid word."""
    name, *rest = words
    fields: dict[str, Any] = {"name": name}
    limits: list[str] = []
    for word in rest:
        key, _, value = word.partition(":")
        if key not in _FIELDS:
            limits.append(word)
            continue
        field, kind = _FIELDS[key]
        try:
            fields[field] = kind(value)
        except ValueError:
            raise LoadgenError(f"--class {name}: {word!r} is not a valid {key}") from None
    return RequestClass(**fields, goodput=parse_goodput(limits))
