"""Mistakes in values are refused with a message that names the key."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import HelmError

from tests.deploy.chart import Values, case, put, render, values_of
from tests.deploy.values.wrong_values import REFUSED_BY_CHART, REFUSED_BY_SCHEMA, REFUSED_BY_STRICT


def test_there_are_enough_of_them() -> None:
    assert len(REFUSED_BY_SCHEMA) >= 25


@pytest.mark.parametrize(("path", "value", "named"), REFUSED_BY_SCHEMA)
def test_schema_refuses(path: str, value: Any, named: str) -> None:
    values: Values = {}
    put(values, path, value)
    message = _refusal(values)
    assert named in message
    assert "these values do not fit" not in message


@pytest.mark.parametrize(("values", "named"), REFUSED_BY_CHART)
def test_chart_refuses_what_does_not_fit(values: dict[str, Any], named: str) -> None:
    changed = values_of("default")
    for path, value in values.items():
        put(changed, path, value)
    if named.startswith("set "):
        del changed["secrets"]
    message = _refusal(changed)
    assert "these values do not fit" in message
    assert named in message


@pytest.mark.parametrize(("path", "value", "named"), REFUSED_BY_STRICT)
def test_strict_refuses_what_is_for_trials(path: str, value: Any, named: str) -> None:
    assert case("production").objects
    values = values_of("production")
    put(values, path, value)
    assert named in _refusal(values)


def test_all_mistakes_are_named_at_once() -> None:
    message = _refusal({"router": {"replicas": "two"}, "logLevel": "trace"})
    assert "router/replicas" in message
    assert "logLevel" in message


def _refusal(values: Values) -> str:
    with pytest.raises(HelmError) as refused:
        render(values)
    return str(refused.value)
