"""Files that are made of others are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.helm import build_readme, build_schema
from deploy.helm.values_comments import CHART, read_values


def test_schema_is_what_its_sources_give() -> None:
    assert build_schema.TARGET.read_text(encoding="utf-8") == build_schema.build(), (
        "python -m deploy.helm.build_schema"
    )


def test_readme_is_what_values_say() -> None:
    assert build_readme.TARGET.read_text(encoding="utf-8") == build_readme.build(), (
        "python -m deploy.helm.build_readme"
    )


def test_checks_notice_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_schema.main(["--check"]) == 0
    assert build_readme.main(["--check"]) == 0
    for module in (build_schema, build_readme):
        monkeypatch.setattr(module, "TARGET", tmp_path / module.TARGET.name)
        assert module.main(["--check"]) == 1
        assert module.main([]) == 0
        assert module.main(["--check"]) == 0


def test_values_are_short_and_each_has_a_comment() -> None:
    values = read_values()
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 400
    assert max(len(line) for line in text.splitlines()) <= 120
    table = build_readme.build()
    assert all(f"| `{'.'.join(value.path)}` |" in table for value in values if value.comment)
