"""From `--model` to a folder on this machine and the name that clients use."""

from __future__ import annotations

from pathlib import Path

from baton.cli.random_checkpoint import random_checkpoint
from baton.cli.settings import invalid
from baton.engine.model_source import resolve_model
from services.common.config import UpConfig, Weights

RANDOM_NAME = "baton-random"


def with_model(config: UpConfig) -> tuple[UpConfig, Path]:
    """The configuration with its served name settled, and the folder; `BatonError(INVALID)` if there is none.

    Without a model it makes the small random checkpoint; a hub id is downloaded.
    """
    if config.model is None:
        folder, name = random_checkpoint(), RANDOM_NAME
    else:
        folder = resolve_model(config.model).resolve()
        name = folder.name if Path(config.model).is_dir() else config.model
    require_weights(folder, config.engine.weights)
    if not (folder / "tokenizer.json").is_file() and config.engine.weights == "file":
        raise invalid(f"model {folder}: tokenizer.json is missing")
    return config.model_copy(update={"served_model_name": config.served_model_name or name}), folder


def require_weights(folder: Path, weights: Weights) -> None:
    """Names the commonest gaps before any process starts; the workers check the rest."""
    if not (folder / "config.json").is_file():
        raise invalid(f"model {folder}: config.json is missing")
    if weights == "file" and not any(folder.glob("*.safetensors")):
        raise invalid(f"model {folder}: no .safetensors file (or use --weights random)")
