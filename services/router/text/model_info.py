"""What the router must know of a model: its limits, its end-of-sequence ids, its chat template.

Read from the small JSON files of the model's folder; weights are the workers' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import BatonError, ErrorKind
from baton.tokenizer_files import TokenizerFiles, read_json


@dataclass(frozen=True)
class ModelInfo:
    """The facts the door needs; `special_tokens` are the names a chat template may use."""

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]
    # SHA-256 of tokenizer, template and special tokens; a worker's must be equal.
    tokenizer_digest: bytes

    @classmethod
    def load(cls, folder: Path, *, byte_tokenizer: bool | None = None) -> ModelInfo:
        """Reads a model folder; BatonError(INVALID) names the file or field that is missing.

        `byte_tokenizer`: as for `TokenizerFiles.read`.
        """
        if not folder.is_dir():
            raise BatonError(ErrorKind.INVALID, f"model folder {folder} does not exist")
        config = read_json(folder / "config.json")
        generation = read_json(folder / "generation_config.json", required=False)
        files = TokenizerFiles.read(folder, byte_tokenizer=byte_tokenizer)
        return cls(
            vocab_size=_positive(config, "vocab_size", folder),
            max_context_tokens=_positive(config, "max_position_embeddings", folder),
            eos_token_ids=_eos_ids(generation) or _eos_ids(config),
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
            tokenizer_digest=files.digest,
        )


def _positive(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BatonError(ErrorKind.INVALID, f"{folder / 'config.json'} has no usable {key}")
    return value


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(dict.fromkeys(value))
    return ()
