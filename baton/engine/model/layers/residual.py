"""The rules by which the result of attention or MLP joins the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.model.layers.linear import Tensors


@dataclass(frozen=True, slots=True)
class Residual:
    """hidden += result, or with `post_norm` hidden += norm(result)."""

    post_norm: Norm | None = None

    @classmethod
    def build(cls, tensors: Tensors, post_norm: str | None) -> Residual:
        """Builds the rule of a layer. `post_norm`: the norm's name within the layer, or None."""
        return cls(None if post_norm is None else tensors.norm(post_norm))

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue of the product that yields the result: its kernel adds it where nothing comes
        between."""
        return Epilogue.RESIDUAL if self.post_norm is None else Epilogue.PLAIN


def reference_add(residual: Residual, hidden: Tensor, result: Tensor) -> Tensor:
    """Returns `hidden` with the result added to it, in plain torch."""
    post = residual.post_norm
    return hidden + (result if post is None else rms_norm(result, post.gain, post.eps))
