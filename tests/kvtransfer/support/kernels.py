"""The device on which kernels are tested: a GPU, marked so, if there is one, otherwise Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., None])

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A parameter beside "reference".
KERNEL = pytest.param("kernel", marks=[pytest.mark.gpu] if DEVICE == "cuda" else [])


def on_kernel(test: Test) -> Test:
    """Marks a test that runs a kernel whatever its parameters."""
    return pytest.mark.gpu(test) if DEVICE == "cuda" else test
