"""What the router must know of a model: its limits, its end-of-sequence ids, its chat template.

Read from the small JSON files of the model's folder; weights are the workers' business.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import BatonError, ErrorKind


@dataclass(frozen=True)
class ModelInfo:
    """The facts the door needs; `special_tokens` are the names a chat template may use."""

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> ModelInfo:
        """Reads a model folder; BatonError(INVALID) names the file or field that is missing."""
        if not folder.is_dir():
            raise _refuse(f"model folder {folder} does not exist")
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json", required=False)
        tokenizer = _read_json(folder / "tokenizer_config.json", required=False)
        return cls(
            vocab_size=_positive(config, "vocab_size", folder),
            max_context_tokens=_positive(config, "max_position_embeddings", folder),
            eos_token_ids=_eos_ids(generation) or _eos_ids(config),
            chat_template=_chat_template(folder, tokenizer),
            special_tokens=_special_tokens(tokenizer),
        )


def _refuse(message: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, message)


def _read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise _refuse(f"model folder {path.parent} has no {path.name}")
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refuse(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise _refuse(f"{path} is not a JSON object")
    return document


def _positive(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refuse(f"{folder / 'config.json'} has no usable {key}")
    return value


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(dict.fromkeys(value))
    return ()


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer: dict[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    found = {name: tokenizer.get(name) for name in names}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
