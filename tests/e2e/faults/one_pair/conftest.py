"""One cluster for all modules of this folder: they leave it idle and serving, and the last one ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support.cluster import Cluster, baton_up
from tests.support.checkpoints import make_checkpoint

# Few slots, so that a small crowd waits for one.
SLOTS = 4
FLAGS = ("--dtype", "float64", "--slots", str(SLOTS), "--chunk-tokens", "16", "--block-tokens", "16")


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=11)


@pytest.fixture(scope="package")
def pair(model: Path) -> Iterator[Cluster]:
    """One worker of each role."""
    with baton_up(model, *FLAGS, "--prefill", "1", "--decode", "1") as running:
        yield running
