"""Compiles CUDA C++ at run time and launches it: for kernels that Triton cannot express.

The compiler (NVRTC) comes with torch's CUDA builds, the driver with the GPU; both are called by ctypes. Calls
raise `CudaError` where they fail.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from baton.device.cuda_runtime import CudaError, call, cuda_driver
from baton.device.kernel_files.cache import cached_code
from baton.device.nvidia_libraries import load_library

_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAP_KINDS = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128, _FETCH_256 = 3, 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64

Argument = Tensor | int | ctypes.Array[ctypes.c_char] | ctypes.Structure


def can_compile() -> bool:
    """True if the compiler and the driver are installed."""
    try:
        _compiler()
        cuda_driver()
    except OSError:
        return False
    return True


@cache
def _compiler() -> ctypes.CDLL:
    return load_library(f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}")


def compile_source(source: str, architecture: str) -> bytes:
    """Compiles to the machine code of an architecture such as "sm_90a". CudaError with the compiler's log."""
    library = _compiler()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-default-device"]
    call(library, "nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"baton.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*options)
        failed = library.nvrtcCompileProgram(program, len(options), given)
        if failed:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise CudaError(log.value.decode(errors="replace"))
        call(library, "nvrtcGetCUBINSize", program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        call(library, "nvrtcGetCUBIN", program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def cached_source(source: str, architecture: str) -> bytes:
    """Returns the code of `compile_source`, from the kernel cache if it is there. Raises OSError if the cache
    cannot be used."""
    key = f"{architecture} {_compiler_version()}\n{source}".encode()
    return cached_code("baton-cuda", key, lambda: compile_source(source, architecture))


def _compiler_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    call(_compiler(), "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def tensor_map(tensor: Tensor, rows: int, box: tuple[int, int]) -> ctypes.Array[ctypes.c_char]:
    """A CUtensorMap by which the TMA unit loads boxes of (rows, columns) from a contiguous 2-D tensor, from
    its first `rows` rows; it reads zeros beyond them. A row must be a multiple of 16 bytes, a box's row
    128."""
    raw = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    at = -(-ctypes.addressof(raw) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    columns = tensor.shape[1]
    call(
        cuda_driver(), "cuTensorMapEncodeTiled",
        ctypes.c_void_p(at), _MAP_KINDS[tensor.dtype], 2, ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * tensor.element_size()),
        (ctypes.c_uint32 * 2)(box[1], box[0]), (ctypes.c_uint32 * 2)(1, 1),
        0, _SWIZZLE_128, _FETCH_256, 0,
    )  # fmt: skip
    return (ctypes.c_char * _MAP_BYTES).from_buffer_copy(raw, at - ctypes.addressof(raw))


class CudaFunction:
    """One kernel of compiled code, loaded into the current device's context and never unloaded."""

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        torch.cuda.current_stream()  # creates the context
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        driver = cuda_driver()
        call(driver, "cuModuleLoadData", ctypes.byref(self._module), code)
        call(driver, "cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        call(driver, "cuFuncSetAttribute", self._function, _SHARED_BYTES, shared_bytes)

    def launch(self, blocks: int, threads: int, arguments: Sequence[Argument]) -> None:
        """Enqueues it on torch's current stream; it is captured if the stream is. Tensors are passed by
        address, ints as int32, structures by value.

        It is launched with programmatic dependent launch: it may start before the previous kernel has
        finished, and must wait for it itself.
        """
        held = [_value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        attribute = _Attribute(_EARLY, value=1)
        config = _Config(
            (blocks, 1, 1), (threads, 1, 1), self._shared_bytes,
            torch.cuda.current_stream().cuda_stream, ctypes.pointer(attribute), 1,
        )  # fmt: skip
        call(cuda_driver(), "cuLaunchKernelEx", ctypes.byref(config), self._function, places, None)


class _Attribute(ctypes.Structure):
    """The struct CUlaunchAttribute of the driver."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class _Config(ctypes.Structure):
    """The struct CUlaunchConfig of the driver."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _value(
    argument: Argument,
) -> ctypes.c_void_p | ctypes.c_int | ctypes.Array[ctypes.c_char] | ctypes.Structure:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else argument
