"""Renders the chart with Helm 4's engine, as `helm template demo deploy/helm/baton --namespace llm` does."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart, lint

Object = dict[str, Any]
Values = dict[str, Any]

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "baton"
VERSION: str = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
RELEASE, NAMESPACE = "demo", "llm"
NOTES = "baton/templates/NOTES.txt"
CASES = {file.stem.removesuffix("-values"): file for file in sorted((CHART / "ci").glob("*-values.yaml"))}

# Built on libyaml, if PyYAML is: six times as fast, and parsing is most of what these tests do.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

POD_KINDS = ("Deployment", "Pod", "RayCluster")


@dataclass(frozen=True)
class Rendered:
    """The result of one set of values: the text of each template, and the objects in them."""

    texts: Mapping[str, str]
    objects: tuple[Object, ...]

    @property
    def notes(self) -> str:
        return self.texts[NOTES]

    def of_kind(self, kind: str) -> dict[str, Object]:
        """Objects of a kind by name."""
        found = [made for made in self.objects if made["kind"] == kind]
        named = {made["metadata"]["name"]: made for made in found}
        assert len(named) == len(found), f"two {kind} of one name"
        return named

    def one(self, kind: str, name: str = "demo-baton") -> Object:
        return self.of_kind(kind)[name]

    def pods(self) -> dict[str, Object]:
        """Pod specs by the name of what makes the pods; those of a RayCluster by group."""
        return {name: template["spec"] for name, template in self.templates().items()}

    def templates(self) -> dict[str, Object]:
        """Pod templates (metadata and spec) by name."""
        found: dict[str, Object] = {}
        for made in self.objects:
            name = made["metadata"]["name"]
            if made["kind"] == "Deployment":
                found[name] = made["spec"]["template"]
            elif made["kind"] == "Pod":
                found[name] = made
            elif made["kind"] == "RayCluster":
                groups = {"ray-head": made["spec"]["headGroupSpec"]}
                groups |= {group["groupName"]: group for group in made["spec"]["workerGroupSpecs"]}
                found |= {f"{name}-{group}": spec["template"] for group, spec in groups.items()}
        return found

    def container(self, name: str) -> Object:
        """The main container of the pods that `name` makes."""
        container: Object = self.pods()[name]["containers"][0]
        return container

    def config(self, component: str) -> Object:
        """The configuration file of a component, parsed."""
        data = self.one("ConfigMap", f"demo-baton-{component}")["data"]
        content: Object = load_yaml(data[f"{component}.yaml"])
        return content


def load_yaml(text: str) -> Any:
    """Parses a file of one YAML document."""
    return yaml.load(text, LOADER)  # noqa: S506 (a safe loader)


@cache
def _read_values(file: Path) -> Values:
    return load_yaml(file.read_text(encoding="utf-8")) or {}


def values_of(case: str) -> Values:
    """The values of a file in ci/."""
    return copy.deepcopy(_read_values(CASES[case]))


@cache
def case(name: str) -> Rendered:
    """The chart with the values of a file in ci/."""
    return render(values_of(name))


def render(values: Values) -> Rendered:
    """The chart with these values over its own, rendered once for all tests. Raises HelmError where they are
    refused."""
    return _rendered(json.dumps(values))


@cache
def _rendered(values: str) -> Rendered:
    return render_anew(json.loads(values))


def render_anew(values: Values) -> Rendered:
    """The same by an installation of its own, whose generated secrets are others."""
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    objects = [made for name in sorted(texts) if name != NOTES for made in objects_in(texts[name])]
    return Rendered(texts, tuple(objects))


def render_with(name: str, **changes: Any) -> Rendered:
    """The chart with a file of ci/ and changes by dotted path, dots spelled as double underscores."""
    values = values_of(name)
    for path, value in changes.items():
        put(values, path.replace("__", "."), value)
    return render(values)


def put(values: Values, path: str, value: Any) -> None:
    """Sets the value at a dotted path."""
    *sections, key = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[key] = value


def at(values: Object, path: str) -> Any:
    """The value at a dotted path."""
    found: Any = values
    for key in path.split("."):
        found = found[key]
    return found


def objects_in(text: str) -> Iterator[Object]:
    """The objects in a rendered template."""
    for made in yaml.load_all(text, LOADER):
        if made:
            yield made


def findings(values: Values) -> list[str]:
    """The lines that `helm lint --strict` reports."""
    report = lint(CHART, values, strict=True, namespace=NAMESPACE)
    messages = [message["error"] for message in report["messages"]]
    return [*messages, *report["errors"]]
