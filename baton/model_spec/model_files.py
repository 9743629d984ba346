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

from baton.base.errors import BatonError, ErrorKind

TOKENIZER_FILE = "tokenizer.json"
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
# The names that chat templates know special tokens by.
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
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
        """Returns the object under `key`, or None. Raises an error that names the key if it is no object."""
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
        """Returns the finite number under `key`, or `default`. Raises an error that names the key for
        anything else."""
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
    """Bounds of a model's text: ids below `vocab_size`, sequences of up to `max_positions` tokens, and the
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
    """`chat_templates` are the model's by name, mostly `default` alone; `special_tokens` are the names that
    they may use; `digest` is a SHA-256 over all of it."""

    chat_templates: Mapping[str, str]
    special_tokens: dict[str, str]
    digest: bytes

    @property
    def chat_template(self) -> str | None:
        """The template of conversations without tools, and of all where there is no other."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    @property
    def tool_template(self) -> str | None:
        """The template of conversations with tools."""
        return self.chat_templates.get(TOOL_TEMPLATE, self.chat_template)

    @classmethod
    def read(cls, folder: Path, *, byte_tokenizer: bool | None = None) -> TokenizerFiles:
        """Reads a model's folder.

        `byte_tokenizer`: whether text is split into bytes, whatever tokenizer.json holds; unset: where there
        is no such file. Raises BatonError(INVALID) naming a file that cannot be read.
        """
        config = _optional(folder / "tokenizer_config.json")
        templates, special = _chat_templates(folder, config), _special_tokens(folder, config)
        file = folder / TOKENIZER_FILE
        if byte_tokenizer is None:
            byte_tokenizer = not file.is_file()
        content = _BYTES if byte_tokenizer else _read(file)
        return cls(templates, special, _digest(content, templates, special))


def _optional(path: Path) -> Mapping[str, object]:
    """The content of a JSON file; empty where there is none."""
    return ConfigFile.read(path).values if path.is_file() else {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BatonError(ErrorKind.INVALID, f"{path} cannot be read: {error.strerror}") from error


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise BatonError(ErrorKind.INVALID, f"{path} cannot be read: {error}") from error


def _digest(tokenizer: bytes, templates: Mapping[str, str], special: Mapping[str, str]) -> bytes:
    default = templates.get(DEFAULT_TEMPLATE, "")
    named = [text for pair in sorted(templates.items()) if pair[0] != DEFAULT_TEMPLATE for text in pair]
    digest = hashlib.sha256()
    for part in (tokenizer, default.encode(), json.dumps(special, sort_keys=True).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    for text in named:
        part = text.encode()
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The templates by name, from where `transformers` reads them: files of their own, or else the
    tokenizer's configuration, or else that of a multimodal model's processor."""
    default, named = folder / "chat_template.jinja", folder / "additional_chat_templates"
    files = {path.stem: path for path in sorted(named.glob("*.jinja"))}
    if default.is_file():
        files[DEFAULT_TEMPLATE] = default
    if files:
        return {name: _text(path) for name, path in files.items()}
    template = config.get("chat_template") or _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        pairs = ((item.get("name"), item.get("template")) for item in template if isinstance(item, dict))
        template = dict(pairs)
    found = template if isinstance(template, dict) else {DEFAULT_TEMPLATE: template}
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}


def _special_tokens(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The texts of special tokens by name. Those of the older file `special_tokens_map.json` precede only
    where the configuration does not list the tokens itself, as in `transformers`."""
    older = _optional(folder / "special_tokens_map.json")
    files = (older, config) if "added_tokens_decoder" in config else (config, older)
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        for file in files:
            token = file.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
    return found
