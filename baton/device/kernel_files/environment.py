"""Names the versions and the GPU that kernels are compiled for in this environment.

python -m baton.device.kernel_files.environment GPU     prints a KernelManifest, or why there is none
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from baton.base.errors import BatonError, ErrorKind
from baton.device.kernel_files.manifest import KernelManifest

_DISTRIBUTION = "baton-serve"


def kernels_here(device_index: int) -> KernelManifest:
    """Returns the manifest of kernels that this process compiles for a GPU. Raises BatonError(INVALID) if
    torch finds none."""
    if not torch.cuda.is_available():
        raise BatonError(ErrorKind.INVALID, "kernels are compiled for a GPU, and torch finds none")
    import triton  # an engine on a CPU starts without

    major, minor = torch.cuda.get_device_capability(device_index)
    return KernelManifest(_baton(), str(torch.__version__), triton.__version__, f"{major}.{minor}")


def _baton() -> str:
    """The installed version; "unknown" in a checkout on PYTHONPATH."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    try:
        print(kernels_here(int(sys.argv[1])).text())
    except BatonError as error:
        sys.exit(error.message)
