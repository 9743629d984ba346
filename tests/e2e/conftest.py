"""One cluster for all tests that need no other: they leave it as they found it, idle and serving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support.cluster import Cluster, baton_up
from tests.support.checkpoints import FAMILIES

# Blocks and chunks that short prompts fill, and slots for as many as a module asks at once.
CUT = ("--block-tokens", "7", "--chunk-tokens", "17", "--slots", "32", "--tool-calls", "hermes")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two small layers: half of the tests' processor time is that of the engines' steps."""
    return FAMILIES[0].make(tmp_path_factory.mktemp("model"), seed=3, hidden_size=64, num_hidden_layers=2)


@pytest.fixture(scope="package")
def cluster(model: Path) -> Iterator[Cluster]:
    """One worker of each role, and stored responses. What its workers count goes on between modules."""
    config = model.parent / "baton.yaml"
    config.write_text("router: {stored_responses: {ttl_s: 60}}\n")
    flags = ("--config", str(config), "--dtype", "float64", "--numerics", "exact", *CUT)
    with baton_up(model, *flags) as running:
        yield running
