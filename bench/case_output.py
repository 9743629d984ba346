"""Prints the figures of one case."""

from __future__ import annotations

import json


def show(case: dict[str, object], as_json: bool) -> None:
    """Prints one JSON object per line on stdout, or one line per figure for people."""
    if as_json:
        print(json.dumps(case), flush=True)
        return
    for key, value in case.items():
        print(f"{key:24} {value}")
    print()
