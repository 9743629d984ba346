"""Resolves a model's name: a folder, or a hub id where there is a network. Torch-free."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind

# What a worker and a router read; no code and no pickled weights are ever fetched.
CONFIG_FILES = ("config.json", "generation_config.json")
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def resolve_model(model: str, files: Sequence[str] = _PATTERNS) -> Path:
    """The folder of a model given by folder or hub id (`owner/name`), whose `files` are downloaded if need
    be; by default all that a worker and a router read.

    Raises BatonError(INVALID) in one line where there is no such folder and it cannot be fetched.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise BatonError(ErrorKind.INVALID, f"{model}: not a folder")
    if model.startswith((".", "/", "~")) or len(Path(model).parts) != 2:
        raise BatonError(ErrorKind.INVALID, f"{model}: no such folder")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise BatonError(
            ErrorKind.INVALID,
            f"{model}: no such folder, and huggingface_hub is not installed to fetch it: "
            "pip install 'baton-serve[hub]'",
        )
    return _download(model, files)


def _download(hub_id: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except Exception as error:  # the library raises many kinds, down to its HTTP client's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BatonError(
            ErrorKind.INVALID, f"{hub_id}: no such folder, and the hub does not give it: {reason}"
        ) from error
