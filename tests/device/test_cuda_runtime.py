"""Devices that a link is tried between, and the enqueueing of copies, with a fake CUDA."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from baton.device.cuda_runtime import CudaError, CudaRuntime, call

NOT_THERE = 101


class FakeCuda:
    """A CUDA with devices by the names that this process sees; devices of `peers` write each other's
    memory."""

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
def runtime() -> CudaRuntime:
    fake = FakeCuda({"0000:01:00.0": 0, "0000:02:00.0": 1, "0000:03:00.0": 2}, {(0, 1)})
    return CudaRuntime(cast(Any, fake), cast(Any, object()))


def test_itself_and_its_peers_are_reached(runtime: CudaRuntime) -> None:
    assert runtime.reaches(0, "0000:01:00.0")
    assert runtime.reaches(0, "0000:02:00.0")
    assert not runtime.reaches(0, "0000:03:00.0")


def test_a_device_that_this_process_does_not_see_is_tried(runtime: CudaRuntime) -> None:
    assert runtime.reaches(0, "0000:04:00.0")


def test_a_call_that_fails_is_named() -> None:
    class FakeDriver:
        def cuStreamWriteValue64_v2(self, *arguments: int) -> int:  # noqa: N802
            return 0 if arguments == (1, 2, 3, 0) else 700

    driver: Any = FakeDriver()
    call(driver, "cuStreamWriteValue64_v2", 1, 2, 3, 0)
    with pytest.raises(CudaError, match="cuStreamWriteValue64_v2: error 700"):
        call(driver, "cuStreamWriteValue64_v2", 1, 2, 4, 0)


class FakeCopies:
    """Records copies, single or batched; a driver with this `answer`."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.copies: list[tuple[int, int, int]] = []
        self.batches = 0

    def cuMemcpyBatchAsync_v2(self, there: Any, here: Any, sizes: Any, count: int, *how: Any) -> int:  # noqa: N802
        self.batches += 1
        attributes, first, kinds, stream = how
        assert (list(attributes.hints), list(first), kinds, stream) == ([1, 3, 1, 3], [0], 1, 9)
        if not self.answer:
            self.copies += zip(there[:count], here[:count], sizes[:count], strict=True)
        return self.answer

    def cudaMemcpyAsync(self, there: int, here: int, size: int, kind: int, stream: int) -> int:  # noqa: N802
        assert stream == 9
        self.copies.append((there, here, size))
        return 0


@pytest.mark.parametrize(("answer", "batches"), [(0, 2), (801, 1)])
def test_copies_are_batched_where_the_driver_supports_it(answer: int, batches: int) -> None:
    fake = FakeCopies(answer)
    runtime = CudaRuntime(cast(Any, fake), cast(Any, fake))
    for _ in range(2):
        runtime.copy_batch(1000, [7, 5, 6], 10, 3, 9)
    runtime.copy_batch(2000, [8], 10, 3, 9)
    three = [(1000, 7, 10), (1010, 5, 10), (1020, 6, 10)]
    assert fake.copies == [*three, *three, (2000, 8, 10)]
    assert fake.batches == batches
