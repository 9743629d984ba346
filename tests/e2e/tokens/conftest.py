"""A cluster for the modules of this folder that compare its tokens with those of a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import CUT
from tests.e2e.support.cluster import Cluster, baton_up


@pytest.fixture(scope="package")
def unlike(model: Path) -> Iterator[Cluster]:
    """A prefill worker of two devices, and a decode worker that verifies drafts; otherwise as `cluster`."""
    flags = ("--prefill-tensor-parallel", "2", "--speculation", "lookup")
    with baton_up(model, "--dtype", "float64", "--numerics", "exact", *CUT, *flags) as running:
        yield running
