"""Structures that cuBLASLt fills are laid out as its header has them; its algorithms are timed on a GPU."""

from __future__ import annotations

import ctypes

from bench.library_algorithms import Algorithm, Found


def test_results_are_laid_out_as_in_the_header() -> None:
    """cublasLtMatmulHeuristicResult_t: algorithm, workspace, status, waves, four reserved integers."""
    assert ctypes.sizeof(Algorithm) == 64
    assert (Found.workspace.offset, Found.state.offset, Found.waves.offset) == (64, 72, 76)
    assert ctypes.sizeof(Found) == 96
