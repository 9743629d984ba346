"""Writes the chart's values.schema.json (draft-07) from schema/*.yaml, values.yaml and Baton's own settings.

    python -m deploy.helm.build_schema            writes it
    python -m deploy.helm.build_schema --check    exit code 1 where it is not what would be written

The result refuses unknown keys everywhere but in parts that Kubernetes checks itself.
Descriptions are the comments of values.yaml, or those of the settings that a key becomes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.helm.values_comments import CHART, LOADER, read_values
from services.common.config.router import RouterSettings
from services.common.config.settings_tree.listing import without_links
from services.common.config.transfer import TransferConfig
from services.common.config.types import StrictModel
from services.common.config.worker import EngineConfig

Schema = dict[str, Any]

SOURCES = Path(__file__).parent / "schema"
TARGET = CHART / "values.schema.json"
WIDTH = 200

# Settings that the chart makes itself, or that have no meaning in a pod.
SET_BY_CHART: dict[type[StrictModel], set[str]] = {
    EngineConfig: {"kernel_cache"},
    TransferConfig: {"transfer_port", "frames_port"},
    RouterSettings: {
        *("host", "http_port", "grpc_port", "public_metrics"),
        *("admin_host", "admin_http_host", "admin_grpc_port", "admin_http_port", "request_timeout_s"),
    },
}
_DROPPED = ("title", "default", "format", "who", "unit", "flag")


def build() -> str:
    """Returns the text of values.schema.json."""
    types: dict[str, Any] = {}
    for name in ("types", "roles", "parts"):
        types |= _source(name)
    types["engine"] = _settings(EngineConfig)
    types["engine"]["properties"]["dtype"]["enum"] += ["bf16", "fp16", "fp32", "fp64"]
    for setting in types["engine"]["properties"].values():
        if "off" in setting.get("enum", ()):  # without quotes Helm reads it as false, which workers take
            setting["enum"].append(False)
            setting["type"] = ["string", "boolean"]
    types["transfer"] = _settings(TransferConfig)
    types["routerSettings"] = _settings(RouterSettings)
    expansion = _Expansion(types)
    schema = expansion.expand(_source("values"))
    for value in read_values():
        if value.comment:
            _describe(schema, value.path, value.comment)
    of_pods = schema["properties"]["pod"]
    for role in ("router", "workerGroup", "prefill", "decode", "redis", "supervisor"):
        _describe_as(of_pods, schema["properties"][role])
    _describe_as(of_pods, schema["properties"]["ray"]["properties"]["head"])
    for role in ("prefill", "decode"):
        _describe_as(schema["properties"]["workerGroup"], schema["properties"][role])
    definitions = dict(sorted(expansion.definitions.items()))
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart baton"}
    return _text(head | schema | {"definitions": definitions}) + "\n"


def _source(name: str) -> dict[str, Any]:
    text = (SOURCES / f"{name}.yaml").read_text(encoding="utf-8")
    parsed: dict[str, Any] = yaml.load(text, LOADER)  # noqa: S506 (a safe loader)
    return parsed


class _Expansion:
    """Replaces names of types: by references where they are objects or lists, else by the types."""

    def __init__(self, types: dict[str, Any]) -> None:
        self._types = types
        self.definitions: dict[str, Schema] = {}

    def expand(self, source: str | Schema) -> Schema:
        if isinstance(source, str):
            schema = self._whole(source)
            if schema.get("type") not in ("object", "array"):
                return schema
            self.definitions[source] = schema
            return {"$ref": f"#/definitions/{source}"}
        schema = {}
        for merged in source.get("merge", ()):
            schema = _merged(schema, self._whole(merged))
        own = {key: value for key, value in source.items() if key != "merge"}
        for key in ("items", "additionalProperties", "propertyNames"):
            if isinstance(own.get(key), str | dict):
                own[key] = self.expand(own[key])
        if "properties" in own:
            own["properties"] = {name: self.expand(value) for name, value in own["properties"].items()}
            own = {"type": "object", "additionalProperties": False} | own
        return _merged(schema, own)

    def _whole(self, name: str) -> Schema:
        return self.expand(self._types[name])


def _text(schema: object, indent: int = 0) -> str:
    """JSON, with what fits into a line on one."""
    line = json.dumps(schema, ensure_ascii=False)
    if not isinstance(schema, dict) or len(line) + indent <= WIDTH:
        return line
    inner = " " * (indent + 1)
    lines = [f"{inner}{json.dumps(key)}: {_text(value, indent + 1)}" for key, value in schema.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def _merged(first: Schema, second: Schema) -> Schema:
    properties = first.get("properties", {}) | second.get("properties", {})
    return first | second | ({"properties": properties} if properties else {})


def _settings(model: type[StrictModel]) -> Schema:
    """The schema of a section of Baton's configuration, less what the chart sets."""
    source = model.model_json_schema()
    schema = _plain(source, source.get("$defs", {}))
    for name in SET_BY_CHART[model]:
        del schema["properties"][name]
    schema.pop("description", None)
    return schema


def _plain(source: Schema, definitions: dict[str, Schema]) -> Schema:
    """Draft-07 without references; `X | None` becomes X, since a value that is not given is unset."""
    if "$ref" in source:
        name = source["$ref"].rpartition("/")[2]
        return _plain(definitions[name] | {k: v for k, v in source.items() if k != "$ref"}, definitions)
    if "anyOf" in source:
        one = next(choice for choice in source["anyOf"] if choice.get("type") != "null")
        return _plain(one | {k: v for k, v in source.items() if k != "anyOf"}, definitions)
    plain = {key: value for key, value in source.items() if key not in (*_DROPPED, "$defs")}
    if isinstance(plain.get("description"), str):
        plain["description"] = without_links(plain["description"])
    if "properties" in plain:
        public = {name: value for name, value in plain["properties"].items() if "fixed" not in value}
        plain["properties"] = {name: _plain(value, definitions) for name, value in public.items()}
    if isinstance(plain.get("items"), dict):
        plain["items"] = _plain(plain["items"], definitions)
    return plain


def _describe(schema: Schema, path: tuple[str, ...], comment: str) -> None:
    for key in path[:-1]:
        schema = schema.get("properties", {}).get(key, {})
    if path[-1] in schema.get("properties", {}):
        described = schema["properties"][path[-1]]
        schema["properties"][path[-1]] = {"description": comment} | described


def _describe_as(source: Schema, target: Schema) -> None:
    """Descriptions of keys that several roles have, stated once."""
    for name, schema in target["properties"].items():
        described = source["properties"].get(name, {}).get("description")
        if described:
            schema.setdefault("description", described)


def main(arguments: list[str]) -> int:
    """Writes or checks the file; the exit code."""
    text = build()
    if "--check" not in arguments:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET} is out of date: python -m deploy.helm.build_schema", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
