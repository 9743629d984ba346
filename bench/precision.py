"""What a model's numbers are kept in. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.kernels.weight_format import FORMATS
from baton.model_spec.layout import FP8

_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Precision:
    """As a worker's options of the same names say it. `dtype`: as torch spells it, or bf16, fp16, fp32 or
    fp64. Raises ValueError where the head is to be quantised and nothing says how."""

    dtype: str
    quantization: str | None = None
    quantize_head: bool = False
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.quantize_head and self.quantization is None:
            raise ValueError("--quantize-head needs --quantization: it says how")

    @property
    def torch_dtype(self) -> str:
        """The dtype as torch spells it."""
        return _SPELLINGS.get(self.dtype, self.dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that is not in fewer bits."""
        return _BYTES[self.torch_dtype]

    @property
    def cache_dtype(self) -> str:
        """The KV cache's dtype as layouts name it."""
        return FP8 if self.kv_dtype == "fp8" else self.torch_dtype

    def weight_bytes(self, n: int, k: int, *, head: bool = False) -> int:
        """Bytes of a layer's matrix of n rows of k elements, or of the head's."""
        if self.quantization is None or (head and not self.quantize_head):
            return n * k * self.element_bytes
        return FORMATS[self.quantization].nbytes(n, k)
