"""Memory that devices of a worker reach of one another, with a fake CUDA; allocators whose memory no peer
reaches."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from baton.base.errors import BatonError
from baton.device.cuda_runtime import CudaError, CudaRuntime
from baton.device.peer_memory import (
    enable_peer_access,
    refuse_launches_that_wait,
    refuse_lazy_loading,
    refuse_other_allocators,
)

ALREADY_ENABLED, OUT_OF_MEMORY = 704, 2


class FakeCuda:
    """Devices of which `pairs` have peer access; `results` of enabling it."""

    def __init__(self, pairs: set[tuple[int, int]], results: dict[tuple[int, int], int]) -> None:
        self._pairs, self._results = pairs, results
        self.current = -1
        self.enabled: list[tuple[int, int]] = []
        self.cleared = 0

    def cudaSetDevice(self, index: int) -> int:  # noqa: N802
        self.current = index
        return 0

    def cudaDeviceCanAccessPeer(self, can: Any, index: int, other: int) -> int:  # noqa: N802
        ctypes.cast(can, ctypes.POINTER(ctypes.c_int))[0] = (index, other) in self._pairs
        return 0

    def cudaDeviceEnablePeerAccess(self, other: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.enabled.append((self.current, other))
        return self._results.get((self.current, other), 0)

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.cleared += 1
        return 0


def runtime_of(fake: FakeCuda) -> CudaRuntime:
    return CudaRuntime(cast(Any, fake), cast(Any, object()))


def test_each_device_reaches_each_other_one() -> None:
    pairs = {(0, 3), (3, 0), (0, 5), (5, 0), (3, 5), (5, 3)}
    fake = FakeCuda(pairs, {(3, 0): ALREADY_ENABLED})
    enable_peer_access([0, 3, 5], runtime_of(fake))
    assert set(fake.enabled) == pairs
    assert fake.cleared == 1


def test_a_pair_that_lacks_it_in_one_direction_is_named() -> None:
    fake = FakeCuda({(0, 1)}, {})
    with pytest.raises(BatonError, match=r"devices \[0, 1\] .* device 1 has no peer access to device 0"):
        enable_peer_access([0, 1], runtime_of(fake))


def test_a_device_that_is_named_twice() -> None:
    with pytest.raises(BatonError, match=r"devices \[1, 1\] of a worker: one is named twice"):
        enable_peer_access([1, 1], runtime_of(FakeCuda(set(), {})))


def test_another_error_is_an_error() -> None:
    fake = FakeCuda({(0, 1), (1, 0)}, {(0, 1): OUT_OF_MEMORY})
    with pytest.raises(CudaError, match="cudaDeviceEnablePeerAccess: error 2"):
        enable_peer_access([0, 1], runtime_of(fake))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, backend: cudaMallocAsync"),
    ],
)
def test_allocators_that_no_peer_reaches_are_refused(name: str, value: str) -> None:
    with pytest.raises(BatonError, match=f"{name}="):
        refuse_other_allocators({name: value})


def test_other_settings_of_allocators_pass() -> None:
    refuse_other_allocators({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"})
    refuse_other_allocators({})


def test_a_launch_must_not_wait_for_its_kernel() -> None:
    refuse_launches_that_wait({"CUDA_LAUNCH_BLOCKING": "0"})
    refuse_launches_that_wait({})
    with pytest.raises(BatonError, match=r"CUDA_LAUNCH_BLOCKING=1: .* unset it"):
        refuse_launches_that_wait({"CUDA_LAUNCH_BLOCKING": "1"})


class FakeDriver:
    """A driver with this CUmoduleLoadingMode."""

    def __init__(self, mode: int) -> None:
        self._mode = mode

    def cuModuleGetLoadingMode(self, mode: Any) -> int:  # noqa: N802
        ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0] = self._mode
        return 0


def test_kernels_must_not_be_loaded_when_they_are_first_launched() -> None:
    eager, lazy = (CudaRuntime(cast(Any, object()), cast(Any, FakeDriver(mode))) for mode in (1, 2))
    refuse_lazy_loading(eager)
    with pytest.raises(BatonError, match="need CUDA_MODULE_LOADING=EAGER from its start"):
        refuse_lazy_loading(lazy)
