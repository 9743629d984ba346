"""Which of NVIDIA's two libraries torch uses for matrix products: cuBLASLt in place of cuBLAS.

torch reads the choice when it is imported, so it is set in the environment of a process before it starts.
Measured on an H100 (bf16, W [4096, 14336]): 45.6 µs instead of 53.4 at 128 rows, 49.3 instead of 60.9 at
192; nowhere slower. The product tables are measured with it.
"""

from __future__ import annotations

ENVIRONMENT = {"TORCH_BLAS_PREFER_CUBLASLT": "1"}
