"""Prints the figures of one case."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def settings_of(case: DataclassInstance) -> dict[str, object]:
    """What a case was run with, by name, its precision's parts among the others."""
    settings = asdict(case)
    return {**settings.pop("precision"), **settings}


def show(case: dict[str, object], as_json: bool) -> None:
    """Prints one JSON object per line on stdout, or one line per figure for people."""
    if as_json:
        print(json.dumps(case), flush=True)
        return
    for key, value in case.items():
        print(f"{key:24} {value}")
    print()
