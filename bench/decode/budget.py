"""Where a step's time goes: each part alone, as a graph over all layers, so that weights are not in the
cache.

products      with their norms and epilogues, all layers; `head` once
attention     all layers, over the batch's own contexts
front         begin, plan and the embedding
tail          sampling and finishing, by the step's own clock
step          the last steps of the window, at whose contexts the parts are then measured
boundaries    the rest of a step: gaps between kernels and the gap to the next step

The parts are repeated in graphs of their own, so overlap between similar kernels is included; where different
kernels of a step overlap better or worse, the difference is in `boundaries`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.decode.case import Case
from bench.decode.engine import DecodeEngine

if TYPE_CHECKING:
    from baton.engine.decode.graph_step import GraphStep
    from baton.engine.model.reference import Layer

Launch = Callable[[], None]
PRODUCTS = ("qkv", "output", "gate_up", "down", "head")


def launches(engine: DecodeEngine, case: Case) -> dict[str, Launch]:
    """Each part of a step that can be repeated, over the rows of the last step.

    For a loop that has drained and whose slots are still active. They write to buffers of the pass, and to
    the KV of a token that its own step writes again.
    """
    from baton.engine.decode.gpu_pass import buckets_up_to
    from baton.engine.decode.graph_step import PICKED
    from baton.engine.kernels.gpu.gemm.gemv import Norm
    from baton.engine.kernels.gpu.step.row_ops import embed
    from baton.engine.model.reference import Linear

    step: GraphStep = engine.loop.step_state  # type: ignore[attr-defined]
    rows = min(bucket for bucket in buckets_up_to(engine.room.slots) if bucket >= case.batch)
    pass_, decoder, inputs = step.pass_, engine.decoder, step.pass_.inputs
    hidden, qkv, inner = pass_._hidden[:rows], pass_._qkv[:rows], pass_._inner[:rows]
    attended, rotary = pass_._attended[:rows], (pass_._rotary[0][:rows], pass_._rotary[1][:rows])
    eps = decoder.config.rms_norm_eps

    def each(run: Callable[[Layer], None]) -> Launch:
        def launch() -> None:
            for layer in decoder.layers:
                run(layer)

        return launch

    def front() -> None:
        step._begin(rows, PICKED)
        step._plan()
        embed(
            hidden, rotary, inputs.token, inputs.position,
            decoder.embedding, decoder.rope.frequencies, decoder.rope.scale,
        )  # fmt: skip

    product, head = pass_._product, Linear(decoder.head, None)
    return {
        "qkv": each(lambda layer: product("qkv", qkv, hidden, layer.qkv, Norm(layer.attention_norm, eps))),
        "output": each(lambda layer: product("output", hidden, attended, layer.output)),
        "gate_up": each(
            lambda layer: product("gate_up", inner, hidden, layer.gate_up, Norm(layer.mlp_norm, eps))
        ),
        "down": each(lambda layer: product("down", hidden, inner, layer.down)),
        "head": lambda: product("head", pass_.logits[:rows], hidden, head, Norm(decoder.norm, eps)),
        "attention": each(lambda layer: pass_._attention(layer, rows, rotary)),
        "front": front,
    }


def measure(engine: DecodeEngine, case: Case, microseconds: Callable[[Launch], float]) -> dict[str, float]:
    """Microseconds of each part; `microseconds` times one part, as `graph_us` does."""
    return {name: microseconds(launch) for name, launch in launches(engine, case).items()}


def budget(parts: dict[str, float], tpot_us: float, tail_us: float | None) -> dict[str, float]:
    """The table of one batch, in microseconds; `boundaries` is the rest of a step."""
    products = sum(parts[name] for name in PRODUCTS)
    rest = parts["front"] + (tail_us or 0.0)
    table = {
        **{name: parts[name] for name in PRODUCTS},
        "products": products,
        "attention": parts["attention"],
        "rest": rest,
        "boundaries": tpot_us - products - parts["attention"] - rest,
        "step": tpot_us,
    }
    return {name: round(value, 1) for name, value in table.items()}


def show(results: list[dict[str, Any]]) -> None:
    """Prints the tables side by side on stderr, one column per batch."""
    from rich.console import Console
    from rich.table import Table

    table = Table("µs a step", *(f"batch {result['batch']}" for result in results))
    for name in results[0]["budget_us"]:
        table.add_row(name, *(f"{result['budget_us'][name]:,.0f}" for result in results))
    Console(stderr=True).print(table)
