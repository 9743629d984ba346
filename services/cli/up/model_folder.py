"""Resolves `--model` to a folder on this machine and a served model name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import baton
from baton.engine.model.source import resolve_model
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.settings import Settings
from services.common.config.worker import Weights

DEMO, RANDOM = "demo", "random"


def demo_folder() -> Path:
    """The folder of the demo checkpoint, which is part of this package."""
    assert baton.__file__ is not None
    return Path(baton.__file__).with_name("demo_model")


def random_folder() -> Path:
    """The folder of the random checkpoint, which is generated on first use."""
    from services.cli.up.random_checkpoint import (
        random_checkpoint,  # and numpy, which a command has no use for
    )

    return random_checkpoint()


# Built-in models by name; an existing folder of that name has priority.
BUILT_IN: Mapping[str, Callable[[], Path]] = {DEMO: demo_folder, RANDOM: random_folder}


def with_model(config: Settings) -> tuple[Settings, Path]:
    """The configuration with model and served name set, and the model folder.

    Unset means the demo model; the random checkpoint is generated on first use; a hub id is downloaded.
    Raises `BatonError(INVALID)` if there is no such model.
    """
    model = config.model or DEMO
    folder, name = (BUILT_IN[DEMO](), f"baton-{DEMO}") if config.model is None else model_and_name(model)
    require_weights(folder, config.engine.weights)
    if not (folder / "tokenizer.json").is_file() and config.engine.weights == "file":
        raise invalid(f"model {folder}: tokenizer.json is missing")
    served = config.served_model_name or name
    return config.model_copy(update={"model": model, "served_model_name": served}), folder


def model_of(settings: Settings) -> tuple[Path, str]:
    """The folder of the model of a router or worker by itself, which is not downloaded, and its name in the
    API. Raises `BatonError(INVALID)` where there is none."""
    model = settings.model or DEMO
    if model != DEMO and not Path(model).is_dir():
        raise invalid(f"model {model}: no such folder")
    return model_and_name(model)


def model_and_name(model: str) -> tuple[Path, str]:
    """The folder of a model, and the name by which clients ask for it unless another one is configured.

    Raises `BatonError(INVALID)` if there is no such model.
    """
    if model in BUILT_IN and not Path(model).is_dir():
        return BUILT_IN[model](), f"baton-{model}"
    folder = resolve_model(model).resolve()
    return folder, folder.name if Path(model).is_dir() else model


def require_weights(folder: Path, weights: Weights) -> None:
    """Raises `BatonError(INVALID)` for missing files before any process starts; the workers check the
    rest."""
    if not (folder / "config.json").is_file():
        raise invalid(f"model {folder}: config.json is missing")
    if weights == "file" and not any(folder.glob("*.safetensors")):
        raise invalid(f"model {folder}: no .safetensors file (or use --weights random)")
