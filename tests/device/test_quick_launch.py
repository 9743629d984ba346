"""A launch past Triton's binder: only where the binder would find the same compiled form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.device.quick_launch import QuickKernel

BUFFER = torch.zeros(64)


class Compiled:
    """One form: says what it was launched with."""

    def __init__(self, said: list[tuple[Any, ...]]) -> None:
        self._said = said

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self._said.append((grid, arguments))


class Kernel:
    """As a JITFunction of x, y, n, scale and a constant WIDTH; counts what its binder is asked."""

    arg_names = ("x", "y", "n", "scale", "WIDTH")

    def __init__(self, *, interpreted: bool = False) -> None:
        self.bound = 0
        self.direct: list[tuple[Any, ...]] = []
        self._interpreted = interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def bind(*arguments: Any, **named: Any) -> Compiled | None:
            self.bound += 1
            return None if self._interpreted else Compiled(self.direct)

        return bind


def launch(kernel: QuickKernel, **changed: Any) -> None:
    asked: dict[str, Any] = {"x": BUFFER, "y": BUFFER, "n": 48, "scale": 0.5, "WIDTH": 64, "num_warps": 4}
    asked |= changed
    grid = asked.pop("grid", (3,))
    places = [asked.pop(name) for name in ("x", "y", "n", "scale")]
    kernel[grid](*places, **asked)


def test_the_second_launch_of_a_form_is_direct() -> None:
    kernel = Kernel()
    quick = QuickKernel(kernel)
    launch(quick)
    launch(quick, grid=(5, 2), n=32, scale=2.0, y=BUFFER[16:])
    assert kernel.bound == 1
    ((grid, (x, y, n, scale, width)),) = kernel.direct
    assert (grid, n, scale, width) == ((5, 2, 1), 32, 2.0, 64)
    assert x is BUFFER
    assert y.data_ptr() == BUFFER[16:].data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        {"n": 1},
        {"n": 7},
        {"n": 1 << 31},
        {"n": 48.0},
        {"scale": 1},
        {"WIDTH": 32},
        {"num_warps": 8},
        {"y": BUFFER[1:]},
        {"y": BUFFER.half()},
        {"y": torch.zeros(4, dtype=torch.int32)},
    ],
    ids=str,
)
def test_what_may_be_another_form_is_bound(other: dict[str, Any]) -> None:
    kernel = Kernel()
    quick = QuickKernel(kernel)
    launch(quick)
    launch(quick, **other)
    assert kernel.bound == 2
    assert not kernel.direct
    launch(quick)
    launch(quick, **other)
    assert kernel.bound == 2


def test_the_interpreter_is_always_asked() -> None:
    kernel = Kernel(interpreted=True)
    quick = QuickKernel(kernel)
    for _ in range(3):
        launch(quick)
    assert kernel.bound == 3
