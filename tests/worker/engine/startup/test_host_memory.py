"""Settings that take more memory than the host has are refused by name, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.worker.engine.startup.host_memory import check_available, check_installed
from tests.worker.engine.stepped_engine import SteppedEngine


@pytest.mark.parametrize("setting", ["kv_blocks", "host_kv_mb", "prefix_host_mb", "lookahead_table_mb"])
def test_an_engine_refuses_more_than_the_host_has(tmp_path: Path, setting: str) -> None:
    settings: dict[str, Any] = {"speculation": "lookup", setting: 10**9}
    with pytest.raises(BatonError) as refused:
        SteppedEngine(tmp_path, **settings)
    assert refused.value.kind is ErrorKind.INVALID
    assert f"engine.{setting} of " in refused.value.message
    assert "does not fit" in refused.value.message


def test_sizes_are_those_of_the_host(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  9000 kB\nMemAvailable:       7000 kB\n")
    check_available("one", 7000 * 1024, memory)
    check_installed("one", 9000 * 1024, memory)
    for check, size, left in (
        (check_available, 7000, "0.00717 GB of memory are available"),
        (check_installed, 9000, "0.00922 GB of memory are there"),
    ):
        with pytest.raises(BatonError, match=f"engine.one of 0.00[79].* GB does not fit: {left}"):
            check("one", size * 1024 + 1, memory)
    memory.write_text("nothing of that\n")
    check_installed("one", 1 << 60, memory)
