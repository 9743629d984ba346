"""Reads recorded loads: Mooncake's JSONL with its prefix ids, Azure's and BurstGPT's CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from loadgen.common.errors import LoadgenError, reason_of
from loadgen.common.settings import Settings, TraceFormat, TraceSettings
from loadgen.load.alphabet import WordAlphabet, alphabet_of
from loadgen.load.prompts import PromptMaker
from loadgen.load.workload import Conversation, Mix

# Tokens of a block with one of Mooncake's hash ids.
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded request; `at` in seconds since the first. Requests whose `blocks` begin alike share these
    tokens."""

    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """All requests of a file, by time. `skipped` entries had no output: they failed when recorded."""

    entries: tuple[Entry, ...]
    skipped: int
    block_tokens: int = BLOCK_TOKENS


def sniff(path: str) -> TraceFormat:
    """The format of the file, by its first line. Raises LoadgenError where it is unknown."""
    try:
        with Path(path).open(encoding="utf-8-sig") as lines:
            first = lines.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadgenError(f"{path}: {reason_of(error)}") from None
    if first.startswith("{") and "input_length" in first:
        return "mooncake"
    if "ContextTokens" in first:
        return "azure"
    if "Request tokens" in first:
        return "burstgpt"
    raise LoadgenError(f"{path} is no trace of Mooncake's, Azure's or BurstGPT's")


def read_trace(path: str, kind: TraceFormat) -> Trace:
    """Reads the file. Raises LoadgenError for the first invalid line."""
    entries: list[Entry] = []
    skipped = 0
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            for at, inputs, outputs, blocks in _READERS[kind](lines):
                if inputs < 1 or outputs < 1:
                    skipped += 1
                else:
                    entries.append(Entry(at, inputs, outputs, blocks))
    except (OSError, UnicodeDecodeError) as error:
        raise LoadgenError(f"{path}: {reason_of(error)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise LoadgenError(f"{path}: entry {len(entries) + skipped + 1}: {reason_of(error)}") from None
    if not entries:
        raise LoadgenError(f"{path} has no request")
    entries.sort(key=lambda entry: entry.at)
    first = entries[0].at
    return Trace(tuple(replace(one, at=one.at - first) for one in entries), skipped)


def write_mooncake(trace: Trace, path: str) -> None:
    """Writes the trace in Mooncake's format."""
    with Path(path).open("w") as lines:
        for entry in trace.entries:
            document: dict[str, object] = {
                "timestamp": round(entry.at * 1e3),
                "input_length": entry.input_tokens,
                "output_length": entry.output_tokens,
            }
            if entry.blocks:
                document["hash_ids"] = list(entry.blocks)
            lines.write(json.dumps(document) + "\n")


class TraceWorkload:
    """A trace's requests as conversations of one turn; prompts are drawn with the trace's lengths and
    sharing."""

    def __init__(self, settings: Settings, trace: Trace) -> None:
        self._trace = trace
        self._mix = Mix(settings)
        self._alphabet = alphabet_of(settings.prompts)
        self._maker = PromptMaker(settings.prompts, self._alphabet, settings.load.seed)

    def conversation(self, number: int) -> Conversation | None:
        """Entry `number`; numbers past the end (of a warm-up) share nothing with others."""
        entry = self._trace.entries[number % len(self._trace.entries)]
        blocks = entry.blocks if number < len(self._trace.entries) else ()
        random = self._mix.random(number)
        klass = self._mix.klass(random)
        tokens = entry.input_tokens
        parts = [self._maker.block(block, self._trace.block_tokens) for block in blocks]
        rest = tokens - len(blocks) * self._trace.block_tokens
        if rest > 0:
            parts.append(self._maker.own(random, rest))
        content = self._alphabet.content(np.concatenate(parts), tokens)
        if isinstance(self._alphabet, WordAlphabet):
            tokens = self._alphabet.counted(tokens)
        turn = self._mix.turn(random, content, tokens, entry.output_tokens, first=True)
        return Conversation(number, klass, (turn,))


def scaled(trace: Trace, settings: TraceSettings) -> Trace:
    """The trace accelerated by `speed`, with lengths times `length_scale`; blocks shrink alike, so that
    sharing is preserved."""
    scale = settings.length_scale
    entries = tuple(
        replace(
            entry,
            at=entry.at / settings.speed,
            input_tokens=max(1, round(entry.input_tokens * scale)),
            output_tokens=max(1, round(entry.output_tokens * scale)),
        )
        for entry in trace.entries
    )
    return Trace(entries, trace.skipped, max(1, round(trace.block_tokens * scale)))


_Row = tuple[float, int, int, tuple[int, ...]]


def _mooncake(lines: Iterable[str]) -> Iterator[_Row]:
    for line in lines:
        if line.strip():
            one = json.loads(line)
            blocks = tuple(int(block) for block in one.get("hash_ids") or ())
            yield float(one["timestamp"]) / 1e3, int(one["input_length"]), int(one["output_length"]), blocks


def _azure(lines: Iterable[str]) -> Iterator[_Row]:
    for row in csv.DictReader(lines):
        # Seven decimal places: one more than Python parses.
        day, _, fraction = row["TIMESTAMP"].strip().partition(".")
        at = datetime.fromisoformat(day).timestamp() + float(f"0.{fraction.rstrip('Z').split('+')[0] or 0}")
        yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()


def _burstgpt(lines: Iterable[str]) -> Iterator[_Row]:
    for row in csv.DictReader(lines):
        yield float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]), ()


_READERS: dict[str, Callable[[Iterable[str]], Iterator[_Row]]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "burstgpt": _burstgpt,
}
