"""What the router must know of a model, read from the JSON files of its folder: limits, end-of-sequence ids,
chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError, ErrorKind
from baton.model_files import ConfigFile, ModelLimits, TokenizerFiles


@dataclass(frozen=True)
class ModelInfo:
    """`special_tokens` are the names a chat template may use."""

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
        limits = ModelLimits.read(ConfigFile.read(folder / "config.json"))
        files = TokenizerFiles.read(folder, byte_tokenizer=byte_tokenizer)
        return cls(
            vocab_size=limits.vocab_size,
            max_context_tokens=limits.max_positions,
            eos_token_ids=limits.eos_token_ids,
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
            tokenizer_digest=files.digest,
        )
