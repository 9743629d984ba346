"""Triton and CUDA kernels with the functions that launch them. Imported by the passes of `forward`, `prefill`
and `decode`, only where a GPU (or in tests Triton's interpreter) runs; a CPU worker never imports it.
"""
