"""What a measuring program says of one case."""

from __future__ import annotations

import json


def show(case: dict[str, object], as_json: bool) -> None:
    """One JSON object a line on stdout, or a key a line for people."""
    if as_json:
        print(json.dumps(case), flush=True)
        return
    for key, value in case.items():
        print(f"{key:24} {value}")
    print()
