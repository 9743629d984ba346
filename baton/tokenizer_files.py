"""How a model's folder turns text into tokens: its tokenizer, chat template and special tokens. Torch-free.

Router and workers both digest these files: a router sends requests only to workers whose digest is its own,
since token ids mean nothing to a model with another vocabulary or template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError, ErrorKind
from baton.model_files import ConfigFile

TOKENIZER_FILE = "tokenizer.json"
# In place of a tokenizer's content where there is none: one token for each byte.
_BYTES = b"one token for each byte"


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
