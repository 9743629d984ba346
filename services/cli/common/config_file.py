"""Reads the configuration file of a command, and the files of secrets that it names.

Flags override environment variables, which override the file. An unknown key is refused, in one line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from baton.base.cluster_auth import MIN_SECRET_LENGTH
from baton.base.errors import BatonError, ErrorKind

Model = TypeVar("Model", bound=BaseModel)

_JOURNAL_KEY_DIGITS = 64
# A file has at most one key of each pair; an override of either replaces the other one too.
_ALTERNATIVES = {"redis_url": "redis_url_file"}


def add_flag(parser: argparse.ArgumentParser, help_text: str, *, required: bool = True) -> None:
    """Adds `--config`, the file of settings that a command reads."""
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", required=required, help=help_text)


def invalid(message: str) -> BatonError:
    """An operator's mistake: commands print the message and exit with code 2."""
    return BatonError(ErrorKind.INVALID, message)


def read_yaml(path: Path) -> dict[str, object]:
    """The settings of a YAML file, by name. Raises `BatonError(INVALID)` with one line."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise invalid(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise invalid(f"{path} must hold settings by name, not a {type(values).__name__}")
    return values


def load(path: Path, model: type[Model], overrides: dict[str, object]) -> Model:
    """The file's settings with `overrides`, by dotted path, in their place.

    Raises `BatonError(INVALID)` with one line that names the key.
    """
    values = read_yaml(path)
    for place, value in overrides.items():
        *sections, key = place.split(".")
        inner = values
        for section in sections:
            below = inner.setdefault(section, {})
            if not isinstance(below, dict):
                break  # validation reports it
            inner = below
        else:
            inner[key] = value
            if key in _ALTERNATIVES:
                inner.pop(_ALTERNATIVES[key], None)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid(f"{path}: {first_problem(error)}") from None


def first_problem(error: ValidationError, place: Callable[[str, object], str] | None = None) -> str:
    """The first of a validation's errors, in one line; without the rejected value, unless `place`, which is
    given the key and the value, has it in its text."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{key} is missing"
    described = place(key, first["input"]) if place else key
    return f"{described}: {first['msg'][0].lower()}{first['msg'][1:]}"


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys of a model's file, for `--help`; those of a section within braces."""
    keys = []
    for name, field in model.model_fields.items():
        inner = [one for one in (field.annotation, *get_args(field.annotation)) if _is_model(one)]
        keys.append(f"{name}.{{{', '.join(inner[0].model_fields)}}}" if inner else name)
    return keys


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def read_secret(path: Path, name: str) -> str:
    """The content of a file of one secret, without surrounding white space. Raises `BatonError(INVALID)`."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise invalid(f"cannot read {name} {path}: {reason}") from None
    if not secret:
        raise invalid(f"{name} {path} is empty")
    return secret


def read_shared_secret(path: Path, name: str) -> str:
    """A secret that a cluster's processes share. Raises `BatonError(INVALID)` where it is too short, too."""
    secret = read_secret(path, name)
    if len(secret) < MIN_SECRET_LENGTH:
        raise invalid(f"{name} {path} holds fewer than {MIN_SECRET_LENGTH} characters")
    return secret


def read_journal_key(path: Path) -> str:
    """The journal's key, 64 hex digits. Raises `BatonError(INVALID)`."""
    key = read_secret(path, "journal_key_file")
    if len(key) != _JOURNAL_KEY_DIGITS or not set(key.lower()) <= set("0123456789abcdef"):
        raise invalid(f"journal_key_file {path} does not hold {_JOURNAL_KEY_DIGITS} hex digits")
    return key
