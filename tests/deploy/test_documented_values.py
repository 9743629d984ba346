"""The pages of docs/ name values, files and Secrets' keys that the chart has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, at, case, render, values_of
from tests.deploy.kubernetes_schemas import NEWEST, errors_in
from tests.deploy.merge_keys import repeated

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("kubernetes.md", "sizing.md")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
# Sections whose keys are Baton's own.
FREE = ("engine", "transfer", "router.config")


def _named(page: str) -> set[str]:
    """Values in backticks, with or without what they are set to, and those of `--set`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    quoted = re.findall(r"`([a-zA-Z][\w.]*)(?:: [^`]+)?`", text)
    given = re.findall(r"--set ([\w.]+)=", text)
    # DOMAIN and the like stand for a part of a name.
    named = {name for name in (*quoted, *given) if not re.search(r"[A-Z]{2}", name)}
    return {name for name in named if name.partition(".")[0] in VALUES}


@pytest.mark.parametrize("page", PAGES)
def test_values_exist(page: str) -> None:
    named = {name for name in _named(page) if not name.startswith(tuple(f"{part}." for part in FREE))}
    assert len(named) > 3
    for name in named:
        at(VALUES, name)


def test_a_value_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(KeyError):
        at(VALUES, "router.replica")


def test_files_of_values_exist() -> None:
    text = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
    files = set(re.findall(r"deploy/helm/baton/(values-[\w-]+\.yaml)", text))
    assert files
    assert [file for file in files if not (CHART / file).is_file()] == []


def test_keys_of_secrets_are_those_that_pods_read() -> None:
    text = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
    table = text.partition("### Secrets")[2].partition("\n\nContainers")[0]
    documented = set(re.findall(r"`([a-z-]+)`", table))
    names = ("production", "kuberay-production", "ray")
    pods = [pod for name in names for pod in case(name).pods().values()]
    volumes = [volume for pod in pods for volume in pod["volumes"]]
    secrets = [
        source["secret"] for volume in volumes for source in volume.get("projected", {}).get("sources", [])
    ]
    keys = {item["key"] for secret in secrets for item in secret["items"]}
    assert {key for key in keys if not key.endswith((".crt", ".key"))} <= documented


def test_the_second_pool_of_the_page_joins_the_first_release() -> None:
    text = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
    values = yaml.safe_load("#" + text.partition("```yaml\n# values-v2.yaml")[2].partition("```")[0])
    first = case("default")
    cluster = first.one("ConfigMap", "demo-baton-router")["metadata"]["labels"]["app.kubernetes.io/part-of"]
    made = set(first.of_kind("Secret"))
    second = render(values)
    assert not second.of_kind("Service").keys() & first.of_kind("Service").keys()
    # The page's first release is called chat, the tests' one demo.
    assert values["cluster"]["name"].replace("chat", "demo") == cluster
    wanted = {values["secrets"]["existingSecret"], values["redis"]["existingSecret"]}
    assert {name.replace("chat", "demo") for name in wanted} <= made


def _snippets() -> list[tuple[str, str]]:
    """Files of values on the page, by name."""
    text = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
    return re.findall(r"```yaml\n# (values-[\w-]+\.yaml)(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("name", "rest"), _snippets())
def test_files_of_values_on_the_page_render_and_are_valid(name: str, rest: str) -> None:
    head, _, body = rest.partition("\n")
    values = values_of("production" if "values-production.yaml" in head else "default")
    if name == "values-v2.yaml" or "secrets" in body:
        values.pop("secrets", None)
    rendered = render(_merged(values, yaml.safe_load(body)))
    foreign = {"BackendTrafficPolicy"}
    objects = [made for made in rendered.objects if made["kind"] not in foreign]
    assert objects
    assert [error for made in objects for error in errors_in(made, NEWEST)] == []
    assert [one for made in objects for one in repeated(made)] == []


def test_there_is_a_file_of_values_for_every_task() -> None:
    assert len(_snippets()) >= 10


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            values[key] = _merged(values[key], value)
        else:
            values[key] = value
    return values
