"""The layer program: the launches of a forward pass, for prefill and decode alike.

    embed ─▶ ( norm ─ qkv ─ attend ─ output + residual
               norm ─ gate, up ─ activation ─ down + residual ) a layer

Attention and the kernels of products differ between prefill and decode, and are passed in.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from baton.engine.forward.layers.attention import Attend, run_attention
from baton.engine.forward.layers.experts import run_experts
from baton.engine.forward.layers.linear import Gemm
from baton.engine.forward.layers.mlp import run_dense_mlp
from baton.engine.forward.workspace import Workspace
from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.gpu.step.row_ops import embed, rotary_rows
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.model.layers.mlp import DenseMlp
from baton.engine.model.modules import Model


def embed_rows(model: Model, workspace: Workspace, rows: int, token: Tensor, position: Tensor) -> None:
    """Looks up a step's tokens: token, position [rows] int32 → the workspace's `hidden` and rotary tables; a
    token of -1 is a row of zeros."""
    first, *others = model.ropes
    embed(
        workspace.hidden[:rows], workspace.rotary(rows, 0), token, position,
        model.embedding, first.frequencies, first.scale, model.embedding_scale,
    )  # fmt: skip
    for number, rope in enumerate(others, 1):
        rotary_rows(workspace.rotary(rows, number), position, rope.frequencies, rope.scale)


def run_layers(model: Model, workspace: Workspace, rows: int, attend: Attend, gemm: Gemm) -> None:
    """Launches all layers over the first `rows` rows of the workspace's `hidden`, in place. Which of them
    hold a token stands in `workspace.experts`, where the model has any."""
    for _ in layer_launches(model, workspace, rows, attend, gemm):
        pass


def layer_launches(
    model: Model, workspace: Workspace, rows: int, attend: Attend, gemm: Gemm
) -> Iterator[None]:
    """Launches what `run_layers` does, each layer's attention, then its MLP, as it is advanced: behind both
    the ranks of a model that is divided add up what they have."""
    hidden, qkv, inner = workspace.hidden[:rows], workspace.qkv[:rows], workspace.inner[:rows]
    behind = [*(layer.attention.qkv for layer in model.layers[1:]), model.head]
    for layer, following in zip(model.layers, behind, strict=True):
        mlp_first = next(iter(layer.mlp.products()), None)
        run_attention(gemm, layer.attention, hidden, qkv, attend, mlp_first)
        yield
        match layer.mlp:
            case DenseMlp():
                run_dense_mlp(gemm, layer.mlp, hidden, inner, following)
            case ExpertsMlp():
                assert workspace.experts is not None
                run_experts(workspace.experts, layer.mlp, hidden)
        yield


def attention_heads(model: Model) -> list[Heads]:
    """The shape of attention for each cache group."""
    config = model.config
    return [
        Heads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.rms_norm_eps,
            group.window,
        )
        for group in model.layout.groups
    ]
