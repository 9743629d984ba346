"""Files with the chart's output when it was last looked at, one for each of ci/.

    python -m tests.deploy.golden_files        writes them

`default` and `split` are whole; each other file is what differs from the one of them with its topology.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from tests.deploy.chart import CASES, DUMPER, VERSION, Object, case, load_yaml, values_of

FOLDER = Path(__file__).parent / "golden"
# What golden files show as the chart's version, so that a release does not change them.
SHOWN_VERSION = "0.1.0"

_COMMON = (
    *(f"app.kubernetes.io/{name}" for name in ("name", "instance", "part-of", "version", "managed-by")),
    "helm.sh/chart",
    *("baton/prefix", "baton/cluster"),
)


def golden_of(name: str) -> str:
    """The text that the golden file of a case should hold."""
    base = "split" if values_of(name).get("topology") == "split" else "default"
    if name == base:
        return _whole(name)
    changes = difflib.unified_diff(
        _whole(base).splitlines(), _whole(name).splitlines(), base, name, lineterm="", n=2
    )
    return "\n".join("@@" if line.startswith("@@") else line for line in changes) + "\n"


@cache
def _whole(name: str) -> str:
    """All objects that the chart renders with a file of ci/, and its notes. Labels that every object has are
    left out, and files within ConfigMaps are shown parsed."""
    parts = [_text(made) for made in sorted(case(name).objects, key=_place)]
    notes = "\n".join(line.rstrip() for line in case(name).notes.strip().splitlines())
    whole = "".join(parts) + "---\n" + notes + "\n"
    place = rf"(baton-(?:router|worker):|^Baton ){re.escape(VERSION)}\b"
    return re.sub(place, rf"\g<1>{SHOWN_VERSION}", whole, flags=re.MULTILINE)


def _place(made: Object) -> tuple[str, str]:
    return made["kind"], made["metadata"]["name"]


def _text(made: Object) -> str:
    shown = copy.deepcopy(made)
    for metadata in _metadata(shown):
        metadata["labels"] = {key: value for key, value in metadata["labels"].items() if key not in _COMMON}
    if shown["kind"] == "ConfigMap" and "data" in shown:
        shown["data"] = {name: load_yaml(text) for name, text in shown["data"].items()}
    return "---\n" + yaml.dump(shown, Dumper=DUMPER, default_flow_style=None, width=115)


def _metadata(made: object) -> Iterator[Object]:
    """Metadata with labels anywhere in an object."""
    if isinstance(made, list):
        for part in made:
            yield from _metadata(part)
    elif isinstance(made, dict):
        for key, part in made.items():
            if key == "metadata" and "labels" in part:
                yield part
            yield from _metadata(part)


def difference(name: str) -> str:
    """A diff of the golden file and what is rendered now; empty where they are equal."""
    file = FOLDER / f"{name}.txt"
    golden = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = difflib.unified_diff(
        golden.splitlines(), golden_of(name).splitlines(), "golden", "now", lineterm=""
    )
    return "\n".join(lines)


def main() -> None:
    """Writes all golden files and deletes those without a case."""
    for file in FOLDER.glob("*.txt"):
        if file.stem not in CASES:
            file.unlink()
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.txt").write_text(golden_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
