"""Times the algorithms that cuBLASLt offers for a product, of which torch takes the first."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Of cublasLt.h and library_types.h.
_SUCCESS, _COMPUTE_FLOAT32, _FLOAT32, _BFLOAT16, _TRANSPOSED = 0, 68, 0, 14, 1
_TRANSPOSE_A, _WORKSPACE_BYTES = 3, 1
_CONFIG = {"algorithm": 0, "tile": 1, "splits": 2, "reduction": 3, "stages": 6, "cluster": 8}
# What torch gives it on Hopper.
_WORKSPACE = 32 << 20
_MOST = 32


class Algorithm(ctypes.Structure):
    """A cublasLtMatmulAlgo_t: an algorithm with its options."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Found(ctypes.Structure):
    """A cublasLtMatmulHeuristicResult_t: an algorithm that the library offers for a product."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def library_algorithms(rows: int, n: int, k: int, copies: int, replays: int = 12) -> Iterator[dict[str, Any]]:
    """A line for each algorithm for x [rows, k] · W [n, k]ᵀ in bfloat16, in the library's order, with the
    microseconds of a product among `copies` weights in turn. RuntimeError where the library refuses."""
    import torch

    from baton.engine.tuning.measurement import graph_us

    library = ctypes.CDLL("libcublasLt.so.13")
    handle, description, preference = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(library.cublasLtCreate(ctypes.byref(handle)))
    _check(library.cublasLtMatmulDescCreate(ctypes.byref(description), _COMPUTE_FLOAT32, _FLOAT32))
    transposed, most = ctypes.c_int(_TRANSPOSED), ctypes.c_size_t(_WORKSPACE)
    _check(library.cublasLtMatmulDescSetAttribute(description, _TRANSPOSE_A, ctypes.byref(transposed), 4))
    _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE_BYTES, ctypes.byref(most), 8))
    # Column by column, as the library has it: outᵀ [n, rows] = (Wᵀ [k, n])ᵀ · xᵀ [k, rows].
    weights, inputs, outputs = (_layout(library, *size) for size in ((k, n), (k, rows), (n, rows)))
    found, count = (Found * _MOST)(), ctypes.c_int()
    _check(
        library.cublasLtMatmulAlgoGetHeuristic(
            handle, description, weights, inputs, outputs, outputs, preference, _MOST, found,
            ctypes.byref(count),
        )
    )  # fmt: skip
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, out = torch.randn(rows, k, **options), torch.empty(rows, n, **options)
    rotated = [torch.randn(n, k, **options).mul_(0.02) for _ in range(copies)]
    space = torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    expected = x.float() @ rotated[-1].float().T

    for place, algorithm in enumerate(found[: count.value]):

        def launch(algorithm: Found = algorithm) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            for weight in rotated:
                _check(
                    library.cublasLtMatmul(
                        handle, description, ctypes.byref(one), _at(weight), weights, _at(x), inputs,
                        ctypes.byref(zero), _at(out), outputs, _at(out), outputs,
                        ctypes.byref(algorithm.algorithm), _at(space), ctypes.c_size_t(_WORKSPACE), stream,
                    )
                )  # fmt: skip

        us = graph_us(launch, replays) / copies
        error = float((out.float() - expected).norm() / expected.norm())
        line = {"rows": rows, "n": n, "k": k, "place": place, "us": round(us, 2), "error": round(error, 5)}
        yield line | {"waves": round(algorithm.waves, 2)} | _config(library, algorithm.algorithm)


def _layout(library: ctypes.CDLL, rows: int, columns: int) -> ctypes.c_void_p:
    """A matrix whose columns lie one behind the other."""
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _check(library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), _BFLOAT16, *sizes))
    return layout


def _config(library: ctypes.CDLL, algorithm: Algorithm) -> dict[str, int]:
    values = {}
    for name, number in _CONFIG.items():
        value, written = ctypes.c_int(), ctypes.c_size_t()
        status = library.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(algorithm), number, ctypes.byref(value), 4, ctypes.byref(written)
        )
        if status == _SUCCESS:
            values[name] = value.value
    return values


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _check(status: int) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"cuBLASLt says {status}")
