"""The pages of docs/ name values, files and Secrets' keys that the chart has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, VERSION, Rendered, Values, at, case, render, values_of
from tests.deploy.kubernetes_schemas import NEWEST, errors_in
from tests.deploy.values.merge_keys import repeated
from tests.deploy.values.umbrella import make_umbrella, render_umbrella

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("kubernetes.md", "sizing.md")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
# Sections whose keys are Baton's own.
FREE = ("engine", "transfer", "router.config")
VERSIONS = ("1.28", "1.31", "1.36", NEWEST)


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


@pytest.mark.parametrize(("name", "rest"), _snippets(), ids=[name for name, _ in _snippets()])
def test_files_of_values_on_the_page_render_and_are_valid(name: str, rest: str, tmp_path: Path) -> None:
    head, _, body = rest.partition("\n")
    if "umbrella" in head:
        aliases = [key for key in yaml.safe_load(body) if key != "global"]
        rendered = render_umbrella(make_umbrella(tmp_path / "umbrella", aliases), yaml.safe_load(body))
    else:
        rendered = render(_over(body, head))
    _check(rendered)


def values_on_page() -> dict[str, Values]:
    """Values of the page's files for this chart over those that they stand beside, by name."""
    found = {name: rest.partition("\n") for name, rest in _snippets()}
    return {name: _over(body, head) for name, (head, _, body) in found.items() if "umbrella" not in head}


def _over(body: str, head: str = "") -> Values:
    """Values of the page over those of a file in ci/."""
    values = values_of("production" if "values-production.yaml" in head else "default")
    if "secrets" in body:
        values.pop("secrets", None)
    return _merged(values, yaml.safe_load(body))


def _check(rendered: Rendered) -> None:
    """Objects that Kubernetes accepts, from the oldest version to the newest."""
    assert rendered.objects
    wrong = [error for made in rendered.objects for version in VERSIONS for error in errors_in(made, version)]
    assert wrong == []
    repeats = [one for made in rendered.objects if made["kind"] != "ScaledObject" for one in repeated(made)]
    assert repeats == []


# Where the objects of GitOps tools have the chart's values.
GIT_OPS = {
    "helmrelease.yaml": ("HelmRelease", "spec.values"),
    "application.yaml": ("Application", "spec.source.helm.valuesObject"),
}


@pytest.mark.parametrize("name", GIT_OPS)
def test_values_in_objects_of_git_ops_tools_render(name: str) -> None:
    kind, path = GIT_OPS[name]
    (body,) = re.findall(rf"```yaml\n# {name}\n(.*?)```", _page(), re.DOTALL)
    made = yaml.safe_load(body)
    assert made["kind"] == kind
    _check(render(_over(yaml.safe_dump(at(made, path)))))
    assert VERSION in body, "the version of this chart"


def test_every_snippet_is_values_or_is_checked_by_name() -> None:
    heads = re.findall(r"```yaml\n#? ?([^\n ,]*)", _page())
    others = [head for head in heads if not head.startswith("values-")]
    assert sorted(others) == sorted(["Chart.yaml", *GIT_OPS])
    assert len(heads) >= 20


def test_the_umbrella_of_the_page_has_this_version_of_the_chart() -> None:
    (body,) = re.findall(r"```yaml\n# Chart.yaml\n(.*?)```", _page(), re.DOTALL)
    parts = yaml.safe_load(body)["dependencies"]
    assert {part["version"] for part in parts} == {VERSION}
    assert all(part["condition"] == f"{part['alias']}.enabled" for part in parts)


# Sections that are no tasks.
NO_TASKS = {"Troubleshooting", "What has no key"}


def test_every_task_says_how_it_was_tried() -> None:
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", _page(), re.MULTILINE | re.DOTALL))
    assert len(sections) >= 18
    untold = {name for name, text in sections.items() if "\n*Tried:* " not in text}
    assert untold == NO_TASKS


def _page() -> str:
    return (DOCS / "kubernetes.md").read_text(encoding="utf-8")


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            values[key] = _merged(values[key], value)
        else:
            values[key] = value
    return values
