"""Libraries that the processes of a cluster without a GPU load: each is memory, and seconds of a start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from services.common.processes.process_tree import descendants
from tests.e2e.support.cluster import Cluster


def _libraries(pid: int) -> set[str]:
    """Packages that a process has compiled code of."""
    return set(re.findall(r"/site-packages/(\w+)/", Path(f"/proc/{pid}/maps").read_text()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for a GPU need Triton")
def test_torch_is_in_engines_alone_and_triton_in_none(cluster: Cluster) -> None:
    pids = descendants(cluster.process.pid)
    engines = [
        pid for pid in pids if b"services.worker.engine.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(engines) == 2
    loaded = {pid: _libraries(pid) for pid in pids}
    assert {pid for pid in pids if "torch" in loaded[pid]} == set(engines)
    assert not [pid for pid in pids if "triton" in loaded[pid]]
