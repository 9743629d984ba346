"""From `--model` to a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from baton.cli.random_checkpoint import random_checkpoint
from baton.cli.settings import invalid
from services.common.config import UpConfig

# What a model needs: weights as safetensors, its configuration, its tokenizer. Never code, never pickles.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(config: UpConfig) -> tuple[UpConfig, Path]:
    """The configuration with its served name settled, and the folder; `BatonError(INVALID)` if there is none.

    Without a model it makes the small random checkpoint. A name like `owner/model` that is no folder is
    taken from the hub, which needs a network and the extra `hub`.
    """
    if config.model is None:
        folder, name = random_checkpoint(), "baton-random"
    elif Path(config.model).is_dir():
        folder = Path(config.model).resolve()
        name = folder.name
    elif _HUB_ID.fullmatch(config.model):
        folder, name = _download(config), config.model
    else:
        raise invalid(f"model {config.model}: no such folder")
    _require_files(folder, config)
    return config.model_copy(update={"served_model_name": config.served_model_name or name}), folder


def _require_files(folder: Path, config: UpConfig) -> None:
    """Names the commonest gap before any process starts; the workers check the rest."""
    if not (folder / "config.json").is_file():
        raise invalid(f"model {folder}: config.json is missing")
    if config.engine.weights == "file" and not any(folder.glob("*.safetensors")):
        raise invalid(f"model {folder}: no .safetensors file (or use --weights random)")


def _download(config: UpConfig) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise invalid(f"model {config.model}: no such folder, and huggingface_hub is not installed") from None
    assert config.model is not None
    patterns = [
        pattern for pattern in _HUB_FILES if config.engine.weights == "file" or pattern != "*.safetensors"
    ]
    try:
        return Path(snapshot_download(config.model, allow_patterns=patterns))
    except Exception as error:  # the hub, its HTTP client and the file system each have their own errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise invalid(f"model {config.model}: no such folder, and not from the hub: {reason}") from error
