"""Which of the vendor's two libraries torch multiplies matrices by.

torch asks the older one unless told, and reads that when it is imported: a process is told before it starts.
Measured on an H100 (bf16, W [4096, 14336]): 45.6 µs instead of 53.4 at 128 rows, 49.3 instead of 60.9 at
192; nowhere slower. The product tables are measured with it.
"""

from __future__ import annotations

ENVIRONMENT = {"TORCH_BLAS_PREFER_CUBLASLT": "1"}
