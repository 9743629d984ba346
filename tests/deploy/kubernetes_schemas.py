"""Strict validation of objects: those of Kubernetes by its own schemas, those of others by the parts of their
definitions that the chart uses (`custom_resources.yaml`)."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator, Draft202012Validator
from kubernetes_validate.utils import all_versions, major_minor
from referencing import Registry, Resource

Object = dict[str, Any]

OWN = Path(__file__).parent / "custom_resources.yaml"
NEWEST = major_minor(all_versions()[-1])


def errors_in(made: Object, version: str) -> list[str]:
    """Faults of an object by the schemas of a Kubernetes of this version ("1.31")."""
    return list(_errors_in(json.dumps(made), version))


@cache
def _errors_in(text: str, version: str) -> tuple[str, ...]:
    """Checks an object once, though many values give the same one. `text`: the object as JSON."""
    made = json.loads(text)
    name = f"{made['kind']}/{made['metadata']['name']}"
    validator = _validator(made["apiVersion"], made["kind"], version)
    return tuple(f"{name} {error.json_path}: {error.message}" for error in validator.iter_errors(made))


@cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator | Draft7Validator:
    custom = _custom()
    if f"{api_version}/{kind}" in custom["kinds"]:
        schema = _strict(custom["kinds"][f"{api_version}/{kind}"], custom["types"])
        return Draft7Validator(schema)
    group = re.sub(r"^([^./]*)(?:[.][^/]*)?/", r"\1-", api_version)
    return Draft202012Validator(
        _read(version, f"{kind.lower()}-{group}.json"), registry=_definitions(version)
    )


@cache
def _custom() -> Any:
    return yaml.safe_load(OWN.read_text(encoding="utf-8"))


@cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_read(version, "_definitions.json")) @ Registry()


def _read(version: str, file: str) -> Any:
    full = next(known for known in all_versions() if major_minor(known) == version)
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{full}-local-strict"
    return json.loads((folder / file).read_text(encoding="utf-8"))


def _strict(schema: Any, types: dict[str, Any]) -> Any:
    """A schema with names of types replaced, whose objects refuse unknown keys and need those with `!`."""
    if isinstance(schema, str):
        return _strict(types[schema], types)
    if isinstance(schema, list):
        return {"type": "array", "items": _strict(schema[0], types)}
    if not isinstance(schema, dict) or "type" in schema or "enum" in schema or not schema:
        return schema
    properties = {key.rstrip("!"): _strict(value, types) for key, value in schema.items()}
    required = [key.rstrip("!") for key in schema if key.endswith("!")]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
