"""NVIDIA's libraries: where they are found, and which of two torch uses for matrix products. Torch-free."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# cuBLASLt in place of cuBLAS. torch reads the choice when it is imported, so it is set in the environment of
# a process before it starts. Measured on an H100 (bf16, W [4096, 14336]): 45.6 µs instead of 53.4 at 128
# rows, 49.3 instead of 60.9 at 192; nowhere slower. The product tables are measured with it.
ENVIRONMENT = {"TORCH_BLAS_PREFER_CUBLASLT": "1"}
EAGER_LOADING = "CUDA_MODULE_LOADING", "EAGER"
"""Variable and value by which CUDA loads a module's kernels with it, and not when they are first launched."""
NO_RUNTIME = "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
"""Variable and value by which torch asks NVML whether there is a GPU, and not CUDA's runtime."""


def load_library(name: str) -> ctypes.CDLL:
    """The library that this process has loaded or the system has, or else that of a package installed with
    torch. OSError where there is none."""
    packaged = (str(file) for path in sys.path for file in Path(path).glob(f"nvidia/*/lib/{name}"))
    for file in (name, *packaged):
        try:
            return ctypes.CDLL(file)
        except OSError:
            continue
    raise OSError(f"{name} is not installed")
