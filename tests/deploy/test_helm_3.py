"""Helm 3 gives what Helm 4 gives, and refuses what it refuses."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import pytest

from tests.deploy import tools
from tests.deploy.chart import (
    CASES,
    CHART,
    NAMESPACE,
    RELEASE,
    Values,
    case,
    objects_in,
    put,
    render,
    values_of,
)
from tests.deploy.values.test_combinations import SEEDS, drawn_values
from tests.deploy.values.test_documented_values import values_on_page
from tests.deploy.values.wrong_values import REFUSED_BY_CHART, REFUSED_BY_SCHEMA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools.helm_3()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _template(values: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return _helm(
        *("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "-f", str(values)),
        *("--kube-version", "1.28", *more),
    )


@pytest.mark.parametrize("name", CASES)
def test_lint_finds_nothing(name: str) -> None:
    done = _helm("lint", "--strict", str(CHART), "-f", str(CASES[name]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


@pytest.mark.parametrize("name", CASES)
def test_output_is_that_of_helm_4(name: str) -> None:
    done = _template(CASES[name])
    assert done.returncode == 0, done.stderr
    made = sorted(objects_in(done.stdout), key=json.dumps)
    assert made == sorted(case(name).objects, key=json.dumps)


@pytest.mark.parametrize("apis", [(), ("gateway.envoyproxy.io/v1alpha1/BackendTrafficPolicy",)])
def test_a_policy_for_envoy_gateway_where_the_api_server_has_its_kinds(apis: tuple[str, ...]) -> None:
    done = _template(CASES["outside"], *(f"--api-versions={api}" for api in apis))
    assert done.returncode == 0, done.stderr
    kinds = [made["kind"] for made in objects_in(done.stdout)]
    assert kinds.count("BackendTrafficPolicy") == len(apis)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_features_together_are_rendered_as_helm_4_does(seed: int, tmp_path: Path) -> None:
    _same_as_helm_4(drawn_values(seed), tmp_path)


@pytest.mark.parametrize("name", sorted(values_on_page()))
def test_values_of_the_page_are_rendered_as_helm_4_does(name: str, tmp_path: Path) -> None:
    values = values_on_page()[name]
    # Drawn at random, where the page has an installation without Secrets of its own.
    values.setdefault("secrets", values_of("default")["secrets"])
    _same_as_helm_4(values, tmp_path)


def _same_as_helm_4(values: Values, folder: Path) -> None:
    file = folder / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    done = _template(file)
    assert done.returncode == 0, done.stderr
    made = sorted(objects_in(done.stdout), key=json.dumps)
    assert made == sorted(render(values).objects, key=json.dumps)


@pytest.mark.parametrize(("path", "value", "named"), REFUSED_BY_SCHEMA)
def test_schema_refuses(path: str, value: object, named: str, tmp_path: Path) -> None:
    values: Values = {}
    put(values, path, value)
    # Helm 3 writes paths with dots.
    assert named.replace("/", ".") in _refusal(values, tmp_path)


@pytest.mark.parametrize(("values", "named"), REFUSED_BY_CHART[:5])
def test_chart_refuses_what_does_not_fit(values: Values, named: str, tmp_path: Path) -> None:
    changed = copy.deepcopy(values_of("default"))
    for path, value in values.items():
        put(changed, path, value)
    assert named in _refusal(changed, tmp_path)


def _refusal(values: Values, folder: Path) -> str:
    file = folder / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    done = _template(file)
    assert done.returncode != 0
    return done.stderr
