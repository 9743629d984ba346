"""Every file of ci/ renders, is clean and is what Kubernetes accepts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from services.common.config.settings_tree.settings import Settings
from services.common.config.types import Role
from tests.deploy.chart import CASES, CHART, Object, case, findings, render, render_with, values_of
from tests.deploy.golden_files import difference
from tests.deploy.kubernetes_schemas import NEWEST, errors_in
from tests.support.fewer import one_in

# An image volume is known from 1.31 on.
NEEDS = {"model-image": "1.31"}
VERSIONS = ("1.28", "1.31", "1.36", NEWEST)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 12


@pytest.mark.parametrize("name", one_in(3, list(CASES)))
def test_lint_finds_nothing(name: str) -> None:
    assert findings(values_of(name)) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_kubernetes_accepts_every_object(name: str, version: str) -> None:
    if version < NEEDS.get(name, "1.00"):
        pytest.skip(f"needs Kubernetes {NEEDS[name]}")
    objects = [*case(name).objects, *_ray_pods(case(name).objects)]
    assert [error for made in objects for error in errors_in(made, version)] == []


@pytest.mark.parametrize("name", CASES)
def test_output_is_the_golden_file(name: str) -> None:
    assert difference(name) == "", f"{sys.executable} -m tests.deploy.golden_files"


@pytest.mark.parametrize("name", CASES)
def test_no_two_objects_share_a_name(name: str) -> None:
    names = [(made["kind"], made["metadata"]["name"]) for made in case(name).objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", sorted(CHART.glob("values-*.yaml")), ids=lambda file: Path(file).stem)
def test_values_files_fit_the_schema(file: Path) -> None:
    import yaml

    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert [error.message for error in Draft7Validator(schema).iter_errors(values)] == []


def test_values_for_hardware_render() -> None:
    import yaml

    for name in ("values-cpu", "values-h100-8b", "values-h200-70b", "values-h200-70b-bf16"):
        assert render(yaml.safe_load((CHART / f"{name}.yaml").read_text(encoding="utf-8"))).objects


@pytest.mark.parametrize(
    ("name", "component"), [("default", "workers"), ("split", "decode"), ("ray", "supervisor")]
)
def test_off_without_quotes_is_off(name: str, component: str) -> None:
    """Helm reads it as false, and so does the file that workers get: they take that for off."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    engine = schema["definitions"]["engine"]["properties"]
    words = [key for key, setting in engine.items() if False in setting.get("enum", ())]
    assert words
    everywhere = {f"engine__{key}": False for key in words}
    rendered = render_with(name, **everywhere, decode__engine=dict.fromkeys(words, False)).config(component)
    config = Settings.model_validate({key: rendered.get(key, {}) for key in ("engine", "engine_of_role")})
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        assert {getattr(config.engine_of(role), key) for key in words} == {"off"}


def test_schema_is_draft_07_and_refuses_unknown_keys_everywhere() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    Draft7Validator.check_schema(schema)
    open_parts = [path for path, part in _parts(schema, "") if part.get("additionalProperties") is True]
    # Parts that the API server checks, the objects that are added, and what Helm itself adds.
    assert set(open_parts) == {
        "/definitions/free",
        "/definitions/named/items",
        "/properties/extraObjects/items",
    }
    assert [
        path
        for path, part in _parts(schema, "")
        if "properties" in part and "additionalProperties" not in part
    ] == []


def _parts(schema: object, path: str) -> list[tuple[str, Object]]:
    if isinstance(schema, list):
        return [found for index, part in enumerate(schema) for found in _parts(part, f"{path}/{index}")]
    if not isinstance(schema, dict):
        return []
    below = [found for key, part in schema.items() for found in _parts(part, f"{path}/{key}")]
    return [(path, schema), *below] if not path.endswith("properties") else below


def _ray_pods(objects: tuple[Object, ...]) -> list[Object]:
    """The pods of RayClusters, for the schema of pods."""
    pods = []
    for made in objects:
        if made["kind"] == "RayCluster":
            groups = [made["spec"]["headGroupSpec"], *made["spec"]["workerGroupSpecs"]]
            templates = [group["template"] for group in groups]
            pods += [
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    **template,
                    "metadata": {"name": "ray", **template["metadata"]},
                }
                for template in templates
            ]
    return pods
