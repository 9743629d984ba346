"""Kernels in CUDA C++, compiled for the host by g++ behind a file that emulates what they need of a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

_COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(_COMPILER is None, reason="no g++")


def host_library(source: str, emulation: Path, folder: Path) -> ctypes.CDLL:
    """Compiles a kernel's source in `folder`. `emulation` includes it as SOURCE, and `fibers.h`; it is
    compiled with the source's constants, which are needed before it."""
    assert _COMPILER is not None
    kernel, host, library = folder / "kernel.cu", folder / "host.cpp", folder / "kernel.so"
    kernel.write_text(source)
    defines = [line for line in source.splitlines() if line.startswith("#define ")]
    host.write_text("\n".join([*defines, f'#define SOURCE "{kernel}"', emulation.read_text()]))
    options = ["-O1", "-w", "-fPIC", "-shared", "-std=c++17", f"-I{Path(__file__).parent}"]
    command = [_COMPILER, *options, "-o", str(library), str(host)]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(library))
