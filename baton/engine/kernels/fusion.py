"""The operations that the kernel of a matrix product fuses: an RMSNorm of its input, and an epilogue on its
output. Imports no Triton, so that a model can be described where no kernel runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Epilogue(IntEnum):
    """The function from a product's sums to its output; kernels take the value as a constant."""

    PLAIN = 0
    RESIDUAL = 1  # added to what the output holds
    SWIGLU = 2  # silu of the first half of the weight's rows, times the second half
    GEGLU = 3  # gelu, by its approximation with tanh, of the first half, times the second half

    @property
    def gated(self) -> bool:
        """True if the output is half as wide as the weight has rows."""
        return self in (Epilogue.SWIGLU, Epilogue.GEGLU)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (Zhang and Sennrich 2019): x · gain / sqrt(mean(x²) + eps); `gain` [K].

    A row is rounded to its dtype before it is multiplied by a gain of that dtype, and only
    afterwards where the gain is of another one, which is float32.
    """

    gain: Tensor
    eps: float
