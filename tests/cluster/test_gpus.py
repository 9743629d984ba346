"""How many GPUs there are is the driver's word, heard in time."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.cluster.gpu_count import gpu_count
from baton.cluster.gpus import gpus_here
from baton.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.config.engine import EngineConfig
from services.common.config.types import Device
from services.common.config.worker import WorkerConfig


class PlayedDriver:
    def __init__(self, count: int = 0, init: int = 0, counting: int = 0) -> None:
        self._count, self._init, self._counting = count, init, counting

    def cuInit(self, flags: int, /) -> int:  # noqa: N802
        return self._init

    def cuDeviceGetCount(self, count: Any, /) -> int:  # noqa: N802
        assert self._init == 0, "it is asked in vain"
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._count
        return self._counting


def cluster(device: Device = "cuda") -> ClusterConfig:
    worker = WorkerConfig(name="a", role="both", model="m", engine=EngineConfig(device=device))
    return ClusterConfig(cluster_id="x", workers=(worker,))


def saying(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_the_driver_counts() -> None:
    assert gpu_count(PlayedDriver(count=3)) == 3
    assert gpu_count(PlayedDriver(init=100)) == 0  # no device, or CUDA_VISIBLE_DEVICES is empty


@pytest.mark.parametrize("driver", [PlayedDriver(init=803), PlayedDriver(counting=999)])
def test_a_driver_that_fails_is_no_zero(driver: PlayedDriver) -> None:
    with pytest.raises(RuntimeError, match=r"803|999"):
        gpu_count(driver)


async def test_its_number_is_taken() -> None:
    assert await gpus_here(cluster(), saying("print(4)")) == 4


async def test_a_cpu_needs_nobody_asked() -> None:
    assert await gpus_here(cluster("cpu"), ("/nobody/here",)) == 0


async def test_this_machine_can_be_asked() -> None:
    assert await gpus_here(cluster("auto")) >= 0


async def test_a_failing_driver_is_told_of_and_its_gpus_are_not_there() -> None:
    with capture_logs() as logs:
        assert await gpus_here(cluster(), saying("print('error 803'); raise SystemExit(1)")) == 0
    assert [(line["event"], line["why"]) for line in logs] == [("gpus_not_counted", "error 803")]


async def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = saying(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(BatonError, match=r"has not said for 0\.5 s") as caught:
        await gpus_here(cluster(), hangs, within_s=0.5)
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    if pid.exists() and pid.read_text():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
