"""Memory that loading all kernels takes, by what is free before and after it, with a fake driver."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest
import torch

from baton.device.cuda_runtime import CudaError
from baton.device.kernel_loading import LoadedKernels, load_kernels

CONTEXT = 0x1234


class FakeDriver:
    """A driver that notes its calls; `results` by their names."""

    def __init__(self, free: int, results: dict[str, int] | None = None) -> None:
        self.calls: list[str] = []
        self._free, self._results = free, results or {}

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGet":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = arguments[1]
            elif name == "cuDevicePrimaryCtxRetain":
                assert arguments[1].value == 3
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = CONTEXT
            elif name == "cuCtxPushCurrent_v2":
                assert arguments[0].value == CONTEXT
            elif name == "cuMemGetInfo_v2":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_size_t))[0] = self._free
            return self._results.get(name, 0)

        return called


@pytest.mark.parametrize(("left", "taken"), [(70 * 10**9, 4 * 10**9), (75 * 10**9, 0)])
def test_it_takes_what_is_free_in_an_empty_context_and_not_afterwards(
    monkeypatch: pytest.MonkeyPatch, left: int, taken: int
) -> None:
    driver, times = FakeDriver(74 * 10**9), iter((1.0, 3.5))

    def mem_get_info(index: int) -> tuple[int, int]:
        assert index == 3
        driver.calls.append("runtime")
        return left, 80 * 10**9

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert load_kernels(3, cast(Any, driver), lambda: next(times)) == LoadedKernels(2.5, taken)
    # The context is no longer the current one when the runtime begins.
    assert driver.calls[-4:] == ["cuCtxPushCurrent_v2", "cuMemGetInfo_v2", "cuCtxPopCurrent_v2", "runtime"]


def test_a_call_that_fails_is_named() -> None:
    with pytest.raises(CudaError, match="cuDevicePrimaryCtxRetain: error 2"):
        load_kernels(3, cast(Any, FakeDriver(0, {"cuDevicePrimaryCtxRetain": 2})))
