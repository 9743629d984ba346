"""Triton kernels launched past Triton's binder, which takes the host some 40 µs a launch to find out what it
found out the last time: which compiled form these arguments want.

    @quick
    @triton.jit
    def kernel(x, n, WIDTH: tl.constexpr): …

    kernel[(rows,)](x, n, WIDTH=64)        as ever; the second launch of a form goes to the driver directly
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Grid = tuple[int, ...]
_INT32 = range(-(1 << 31), 1 << 31)


class QuickKernel:
    """A kernel whose compiled forms are kept by what Triton makes forms of: constants, dtypes, addresses and
    numbers that are multiples of 16, numbers that are 1 or wider than 32 bits.

    Arguments come by their place, the first of them a tensor; constants and options by name.
    """

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 a JITFunction, or the interpreter's
        self._kernel = kernel
        self._forms: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*arguments: object, **named: object) -> None:
            self._launch(grid, arguments, named)

        return launch

    def _launch(self, grid: Grid, arguments: tuple[Any, ...], named: dict[str, object]) -> None:
        key = (arguments[0].get_device(), *map(_kind, arguments), *named.items())
        form = self._forms.get(key)
        if form is None:
            compiled = self._kernel[grid](*arguments, **named)
            if compiled is not None:  # the interpreter compiles nothing
                constants = tuple(named[name] for name in self._kernel.arg_names[len(arguments) :])
                self._forms[key] = compiled, constants
            return
        compiled, constants = form
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def quick(kernel: Any) -> QuickKernel:  # noqa: ANN401
    """For kernels that are launched over and over outside of graphs."""
    return QuickKernel(kernel)


def _kind(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return type(argument), argument == 1, argument % 16 == 0, argument in _INT32
    return type(argument)
