"""Counting GPUs: the driver's answer, with a deadline."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from services.cluster.gpus.available_gpus import available_gpus
from services.cluster.gpus.gpu_count import gpu_count
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import Device, EngineConfig, WorkerConfig


class FakeDriver:
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
    assert gpu_count(FakeDriver(count=3)) == 3
    assert gpu_count(FakeDriver(init=100)) == 0  # no device, or CUDA_VISIBLE_DEVICES is empty


@pytest.mark.parametrize("driver", [FakeDriver(init=803), FakeDriver(counting=999)])
def test_a_driver_that_fails_is_no_zero(driver: FakeDriver) -> None:
    with pytest.raises(RuntimeError, match=r"803|999"):
        gpu_count(driver)


async def test_its_number_is_taken() -> None:
    assert await available_gpus(cluster(), saying("print(4)")) == 4


async def test_on_a_cpu_the_driver_is_not_called() -> None:
    assert await available_gpus(cluster("cpu"), ("/no/such/program",)) == 0


async def test_this_machine_can_be_asked() -> None:
    assert await available_gpus(cluster("auto")) >= 0


async def test_a_failing_driver_is_logged_and_counts_as_no_gpus() -> None:
    with capture_logs() as logs:
        assert await available_gpus(cluster(), saying("print('error 803'); raise SystemExit(1)")) == 0
    assert [(line["event"], line["reason"]) for line in logs] == [("gpu_count_failed", "error 803")]


async def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = saying(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(BatonError, match=r"did not report .* within 0\.5 s") as caught:
        await available_gpus(cluster(), hangs, within_s=0.5)
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    if pid.exists() and pid.read_text():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
