"""The rules by which the result of attention or MLP joins the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.reference.row_ops import rms_norm
from baton.engine.model.layers.linear import Tensors


@dataclass(frozen=True, slots=True)
class Residual:
    """hidden += result, or with `post_norm` hidden += norm(result). `divided`: the result is the sum of the
    results of several ranks, each of which yields its own."""

    post_norm: Norm | None = None
    divided: bool = False

    @classmethod
    def build(cls, tensors: Tensors, post_norm: str | None) -> Residual:
        """Builds the rule of a layer. `post_norm`: the norm's name within the layer, or None."""
        divided = tensors.config.split.count > 1
        return cls(None if post_norm is None else tensors.norm(post_norm), divided)

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue of the product that yields the result: its kernel adds it where nothing comes
        between."""
        return Epilogue.PLAIN if self.divided or self.post_norm is not None else Epilogue.RESIDUAL


def reference_add(residual: Residual, hidden: Tensor, result: Tensor) -> Tensor:
    """Returns `hidden` with the result added to it, in plain torch."""
    post = residual.post_norm
    return hidden + (result if post is None else rms_norm(result, post.gain, post.eps))
