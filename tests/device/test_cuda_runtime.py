"""Which devices a link is tried between, by a CUDA that is played."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from baton.device.cuda_runtime import CudaError, CudaRuntime, call

NOT_THERE = 101


class PlayedCuda:
    """Its devices by the names that this process sees; `peers` write each other's memory."""

    def __init__(self, devices: dict[str, int], peers: set[tuple[int, int]]) -> None:
        self._devices, self._peers = devices, peers

    def cudaDeviceGetByPCIBusId(self, found: Any, name: bytes) -> int:  # noqa: N802
        if name.decode() not in self._devices:
            return NOT_THERE
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self._devices[name.decode()]
        return 0

    def cudaDeviceCanAccessPeer(self, can: Any, index: int, other: int) -> int:  # noqa: N802
        ctypes.cast(can, ctypes.POINTER(ctypes.c_int))[0] = (index, other) in self._peers
        return 0

    def cudaGetErrorString(self, error: int) -> bytes:  # noqa: N802
        return b"invalid device ordinal"

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    runtime = CudaRuntime.__new__(CudaRuntime)
    played = PlayedCuda({"0000:01:00.0": 0, "0000:02:00.0": 1, "0000:03:00.0": 2}, {(0, 1)})
    monkeypatch.setattr(runtime, "_runtime", played, raising=False)
    return runtime


def test_itself_and_its_peers_are_reached(runtime: CudaRuntime) -> None:
    assert runtime.reaches(0, "0000:01:00.0")
    assert runtime.reaches(0, "0000:02:00.0")
    assert not runtime.reaches(0, "0000:03:00.0")


def test_a_device_that_this_process_does_not_see_is_tried(runtime: CudaRuntime) -> None:
    assert runtime.reaches(0, "0000:04:00.0")


def test_a_call_that_fails_is_named() -> None:
    class PlayedDriver:
        def cuStreamWriteValue64_v2(self, *arguments: int) -> int:  # noqa: N802
            return 0 if arguments == (1, 2, 3, 0) else 700

    driver: Any = PlayedDriver()
    call(driver, "cuStreamWriteValue64_v2", 1, 2, 3, 0)
    with pytest.raises(CudaError, match="cuStreamWriteValue64_v2: error 700"):
        call(driver, "cuStreamWriteValue64_v2", 1, 2, 4, 0)
