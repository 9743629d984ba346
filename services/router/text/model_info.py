"""The properties of a model that the router needs, read from the JSON files of its folder: limits,
end-of-sequence ids, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.model_spec.model_files import ConfigFile, ModelLimits, TokenizerFiles


@dataclass(frozen=True)
class ModelInfo:
    """`tokenizer.special_tokens` are the names a chat template may use; a worker's `tokenizer.digest` must be
    the same."""

    limits: ModelLimits
    tokenizer: TokenizerFiles

    @classmethod
    def load(cls, folder: Path, *, byte_tokenizer: bool | None = None) -> ModelInfo:
        """Reads a model folder; BatonError(INVALID) names the file or field that is missing.

        `byte_tokenizer`: as for `TokenizerFiles.read`.
        """
        if not folder.is_dir():
            raise BatonError(ErrorKind.INVALID, f"model folder {folder} does not exist")
        limits = ModelLimits.read(ConfigFile.read(folder / "config.json"))
        return cls(limits, TokenizerFiles.read(folder, byte_tokenizer=byte_tokenizer))
