"""Charts that have this one as a part, once or several times under other names."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml
from helm_python import Chart

from tests.deploy.chart import CHART, Rendered, Values, objects_in


def make_umbrella(folder: Path, aliases: Sequence[str]) -> Path:
    """A chart with this chart under each of the aliases, which the value `ALIAS.enabled` switches."""
    parts = [
        {"name": "baton", "version": ">=0.0.0", "alias": alias, "condition": f"{alias}.enabled"}
        for alias in aliases
    ]
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "0.1.0", "dependencies": parts}
    shutil.copytree(CHART, folder / "charts" / "baton")
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart), encoding="utf-8")
    return folder


def render_umbrella(folder: Path, values: Values, release: str = "up", namespace: str = "llm") -> Rendered:
    """The umbrella chart with these values. Raises HelmError where they are refused."""
    with Chart.load(folder) as chart:
        texts = chart.render(values, name=release, namespace=namespace)
    made = [
        one for name in sorted(texts) if not name.endswith("NOTES.txt") for one in objects_in(texts[name])
    ]
    return Rendered(texts, tuple(made))
