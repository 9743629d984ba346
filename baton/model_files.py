"""The files of a model's folder beside its weights: configuration, and how text becomes tokens. Torch-free.

Router and engine read `config.json` and `generation_config.json` through this module alone, and so agree on
what both of them use: vocabulary, context and end-of-sequence ids. Errors name the file and the key.

Both digest tokenizer, chat template and special tokens: a router sends requests only to workers whose digest
is its own, since token ids mean nothing to a model with another vocabulary or template.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError, ErrorKind

TOKENIZER_FILE = "tokenizer.json"
# In place of a tokenizer's content where there is none: one token for each byte.
_BYTES = b"one token for each byte"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A JSON object and where it came from. Every reader raises BatonError(INVALID) in one line.

    A key that is null counts as missing for all readers but `has`.
    """

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BatonError(ErrorKind.INVALID, f"{path}: no such file") from None
        except OSError as error:
            raise BatonError(ErrorKind.INVALID, f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise BatonError(ErrorKind.INVALID, f"{path}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise BatonError(ErrorKind.INVALID, f"{path}: expected a JSON object")
        return cls(path, values)

    def error(self, key: str, message: str) -> BatonError:
        return BatonError(ErrorKind.INVALID, f"{self.path}: {key}: {message}")

    def section(self, key: str) -> ConfigFile | None:
        """The object under `key`."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"expected an object, got {value!r}")
        return ConfigFile(self.path, value)

    def has(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> object:
        return self.values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, got {value!r}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number ≥ 0."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(key, f"expected a whole number, got {value!r}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number ≥ 1."""
        value = self.count(key, default)
        if value == 0:
            raise self.error(key, "must not be 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, f"expected a number, got {value!r}")
        return float(value)

    def positive_number(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, f"expected a number above 0, got {value!r}")
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing")
        return default


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a model's text: ids below `vocab_size`, sequences of up to `max_positions` tokens, and the
    ids that end one, ascending."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, config: ConfigFile) -> ModelLimits:
        """Reads `config.json` and, beside it, `generation_config.json` if there is one.

        The end-of-sequence ids are those of the latter where it names any. Raises BatonError(INVALID).
        """
        vocab_size = config.positive("vocab_size")
        generation = config.path.with_name("generation_config.json")
        sources = [ConfigFile.read(generation)] if generation.is_file() else []
        ids = (_eos_token_ids(source, vocab_size) for source in (*sources, config))
        return cls(vocab_size, config.positive("max_position_embeddings"), next(filter(None, ids), ()))


def _eos_token_ids(source: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    value = source.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size for i in ids):
        raise source.error("eos_token_id", f"expected token ids below {vocab_size}, got {value!r}")
    return tuple(sorted(set(ids)))


@dataclass(frozen=True)
class TokenizerFiles:
    """`special_tokens` are the names that a chat template may use; `digest` is a SHA-256 over all of it."""

    chat_template: str | None
    special_tokens: dict[str, str]
    digest: bytes

    @classmethod
    def read(cls, folder: Path, *, byte_tokenizer: bool | None = None) -> TokenizerFiles:
        """Reads a model's folder.

        `byte_tokenizer`: whether text is split into bytes, whatever tokenizer.json holds; unset: where there
        is no such file. Raises BatonError(INVALID) naming a file that cannot be read.
        """
        settings = folder / "tokenizer_config.json"
        config = ConfigFile.read(settings).values if settings.is_file() else {}
        template, special = _chat_template(folder, config), _special_tokens(config)
        file = folder / TOKENIZER_FILE
        if byte_tokenizer is None:
            byte_tokenizer = not file.is_file()
        content = _BYTES if byte_tokenizer else _read(file)
        return cls(template, special, _digest(content, template, special))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BatonError(ErrorKind.INVALID, f"{path} cannot be read: {error.strerror}") from error


def _digest(tokenizer: bytes, template: str | None, special: dict[str, str]) -> bytes:
    digest = hashlib.sha256()
    for part in (tokenizer, (template or "").encode(), json.dumps(special, sort_keys=True).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        try:
            return _read(beside).decode()
        except UnicodeDecodeError as error:
            raise BatonError(ErrorKind.INVALID, f"{beside} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    found = {name: config.get(name) for name in names}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
