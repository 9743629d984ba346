"""One small cluster for the modules of this folder whose requests are short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support.cluster import Cluster, baton_up
from tests.support.otlp_collector import OtlpCollector, otlp_collector

CONTEXT = 128
FLAGS = ("--dtype", "float64", "--slots", "4", "--kv-blocks", "65", "--max-context-tokens", str(CONTEXT))


@pytest.fixture(scope="package")
def collector() -> Iterator[OtlpCollector]:
    with otlp_collector() as running:
        yield running


@pytest.fixture(scope="package")
def small(
    model: Path, collector: OtlpCollector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One worker of each role, which traces only the requests whose clients wish it."""
    headers = tmp_path_factory.mktemp("secret") / "headers"
    headers.write_text("Authorization: Bearer of-the-collector\n")
    traced = ["--otlp-endpoint", collector.url, "--otlp-headers-file", str(headers)]
    traced += ["--trace-sample-ratio", "0", "--transport", "grpc"]
    with baton_up(model, *FLAGS, *traced) as running:
        yield running
