"""Prints what parts of a measurement found, in so few characters that the end of an output has room for all.

    python tools/part_summary.py FOLDER... [--most 11500]

A FOLDER has the logs of `tools/parts.sh`, and `parts.txt`: a line a part with its name, exit code, seconds
and command. Figures come first, a line of JSON each, without settings; then a line a part; last the names of
tests that failed, by file, all of them unless they alone are too long. Each part's figures have a share of
what is left.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SETTINGS = """
    dtype act_dtype weight_dtype kv_dtype quantization quantize_head shape shapes sampling numerics context
    mean_context text lookahead_mb ends graphs front burners tables device torch triton cuda
"""
SETTINGS = frozenset(_SETTINGS.split())
# As pytest's summary has them, as its lines of several processes do, and as those of one do.
_SUMMARY = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:FAILED|ERROR) (tests/\S+?\.py\b.*?)(?: - (.*))?$")
_LINE = re.compile(r"^(tests/\S+?\.py::.*?) (?:FAILED|ERROR)\b")
_COUNTS = re.compile(r"\d+ (?:passed|failed|error|skipped|deselected)")
_LINE_WIDTH, _MESSAGE_WIDTH = 230, 110


@dataclass(frozen=True)
class Part:
    """One part as it ended. `code`: its exit code, or "skipped"; `failed`: what went wrong, by test."""

    name: str
    code: str
    seconds: str
    counts: str
    figures: list[str]
    failed: dict[str, str]

    @property
    def line(self) -> str:
        """The part's name, and how it ended."""
        ended = self.code if self.code == "skipped" else f"exit code {self.code}"
        return f"{self.name}: {ended}, {self.seconds} s" + (f", {self.counts}" if self.counts else "")


def parts_of(folder: Path) -> Iterator[Part]:
    """The parts of a folder, in the order in which they ended."""
    index = folder / "parts.txt"
    for line in index.read_text("utf-8").splitlines() if index.exists() else ():
        name, code, seconds, *_ = line.split("\t")
        log = folder / f"{name}.log"
        lines = log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []
        counted = [line.strip("= ") for line in lines if line.startswith("=") and _COUNTS.search(line)]
        counted += [line for line in lines[-3:] if _COUNTS.match(line)]
        figures = [figure(line) for line in lines if line.startswith("{")]
        failed = failures(lines)
        if code not in ("0", "skipped") and not failed and not counted and lines:
            figures.append(lines[-1][:_LINE_WIDTH])
        yield Part(name, code, seconds, counted[-1] if counted else "", figures, failed)


def failures(lines: Iterable[str]) -> dict[str, str]:
    """Tests that failed, each with the beginning of what it said."""
    found: dict[str, str] = {}
    for line in lines:
        match = _SUMMARY.match(line.rstrip()) or _LINE.match(line)
        if match is not None:
            message = match[2] if match.re is _SUMMARY and match[2] else ""
            found[match[1]] = message[:_MESSAGE_WIDTH] or found.get(match[1], "")
    return found


def figure(line: str) -> str:
    """A line of JSON without its settings, in few characters."""
    try:
        values = json.loads(line)
    except ValueError:
        return line[:_LINE_WIDTH]
    shown = (f"{key} {_short(value)}" for key, value in values.items() if key not in SETTINGS)
    return ", ".join(shown)[:_LINE_WIDTH]


def _short(value: object) -> str:
    return json.dumps(value, separators=(",", ":")).replace('"', "")


def by_file(failed: dict[str, str]) -> Iterator[str]:
    """A line for each file: the names of its tests, and what the first of them said."""
    files: dict[str, list[str]] = {}
    for name in failed:
        file, _, test = name.partition("::")
        files.setdefault(file, []).append(test)
    for file, tests in files.items():
        message = next((failed[f"{file}::{test}" if test else file] for test in tests), "")
        yield f"FAILED {file}: {', '.join(tests)}" + (f" ({message})" if message else "")


def summary(folders: Iterable[Path], most: int) -> str:
    """The text, of `most` characters at most."""
    parts = [part for folder in folders for part in parts_of(folder)]
    ends = "\n".join(
        [
            *(part.line for part in parts),
            *(f"{part.name}: {line}" for part in parts for line in by_file(part.failed)),
        ]
    )
    if len(ends) >= most:
        return ends[: most - 4] + " ..."
    measured = [part for part in parts if part.figures]
    left, blocks = most - len(ends) - 1, []
    for number, part in enumerate(measured):
        block = _block(part, left // (len(measured) - number))
        blocks.append(block)
        left -= len(block)
    return "".join(blocks) + ends


def _block(part: Part, most: int) -> str:
    """A part's figures, as many lines as there is room for."""
    shown, left = [f"== {part.name}"], most - len(part.name) - 20
    for line in part.figures:
        left -= len(line) + 1
        if left < 0:
            shown.append(f"... of {len(part.figures)} lines")
            break
        shown.append(line)
    return "\n".join(shown) + "\n" if len(shown) > 1 and most > 60 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=11_500, help="characters")
    arguments = parser.parse_args()
    print(summary(arguments.folders, arguments.most))


if __name__ == "__main__":
    main()
