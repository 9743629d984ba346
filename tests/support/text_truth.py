"""Meaning of an output's tokens: its text, where it ends, how tokens are spelled and where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.checkpoints import ASSISTANT_ID, BEGIN_ID, END_ID, SPECIAL_TOKENS, USER_ID

_UNCERTAIN = 3


@dataclass(frozen=True)
class Ends:
    """Conditions that end an output, stop ids with those of the model."""

    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True)
class Ended:
    """The number of an output's tokens, its text, and OpenAI's word for the reason of its end."""

    count: int
    text: str
    finish: str


class TextTruth:
    """The reference for a byte-level tokenizer: decodes the whole text again for every question."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        ids: Any = self.tokenizer.get_vocab()
        spellings: list[str] = sorted(ids, key=ids.__getitem__)
        self._data = [
            spelling.encode() if spelling in SPECIAL_TOKENS else bytes(byte_of[one] for one in spelling)
            for spelling in spellings
        ]
        self.id_of = {self.spelled(token): token for token in range(len(self._data))}
        assert len(self.id_of) == len(self._data), "two tokens have one spelling"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def chat(self, question: str) -> list[int]:
        """The prompt that the checkpoints' template makes of one user's message."""
        ids: list[int] = self.tokenizer.encode(question, add_special_tokens=False).ids
        return [BEGIN_ID, USER_ID, *ids, END_ID, ASSISTANT_ID]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def data(self, token: int) -> bytes:
        """The bytes of one token."""
        return self._data[token]

    def spelled(self, token: int) -> str:
        """A token as OpenAI writes it: what is no text by itself as its bytes."""
        data = self.data(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def certain(self, ids: Sequence[int], *, skip_special: bool = True) -> list[str]:
        """The text that no later token can change, after each number of tokens from 0 on."""
        found = [""]
        for count in range(1, len(ids) + 1):
            text = self.decode(ids[:count], skip_special=skip_special)
            replacements = len(text) - len(text.rstrip("\ufffd"))
            text = text[: len(text) - min(replacements, _UNCERTAIN)]
            found.append(max(text, found[-1], key=len))
        return found

    def offsets(self, ids: Sequence[int], *, skip_special: bool = True) -> list[int]:
        """Offsets in the text of all ids at which each one's text begins."""
        return [len(text) for text in self.certain(ids, skip_special=skip_special)[:-1]]

    def ended(self, ids: Sequence[int], ends: Ends, *, skip_special: bool = True) -> Ended | None:
        """The end of an output that begins with these tokens; None where more must come."""
        certain = self.certain(ids, skip_special=skip_special)
        if ends.max_tokens == 0:
            return Ended(0, "", "length")
        for count in range(1, len(ids) + 1):
            if ids[count - 1] in ends.stop_ids:
                return Ended(count, self.decode(ids[: count - 1], skip_special=skip_special), "stop")
            before = len(certain[min(count, ends.min_tokens)])
            cut = first_match(certain[count][before:], ends.stops)
            if cut is not None:
                return Ended(count, certain[count][: before + cut], "stop")
            if count == ends.max_tokens:
                return Ended(count, self.decode(ids[:count], skip_special=skip_special), "length")
        return None


def first_match(text: str, stops: Sequence[str]) -> int | None:
    """The offset of the stop string that is the first to be complete, the longest of several."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None
