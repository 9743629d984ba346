"""Workers for all modules of this folder, without a supervisor; a module starts again those that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config.types import Role
from tests.e2e.support.workers import Loose, loose_workers
from tests.support.checkpoints import make_checkpoint

ENGINE = {"dtype": "float64", "chunk_tokens": 16, "slots": 8}
TRANSFER = {"piece_bytes": 4096, "window_pieces": 4}


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=8)


@pytest.fixture(scope="package")
def loose(model: Path) -> Iterator[Loose]:
    """Two of each role; proxied, so that one that a test takes away can be started again."""
    roles: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
    with loose_workers(model, *roles, proxied=True, engine=ENGINE, transfer=TRANSFER) as running:
        yield running
