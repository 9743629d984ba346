"""Measures where a step's time goes: each part alone, as a graph over all layers, so that weights are not in
the cache.

products      with their norms and epilogues, all layers; `head` once
attention     all layers, over the batch's own contexts
experts       of a mixture, all layers: router, tiles, products and sum, of the rows of the last step
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

from bench.case import DecodeCase
from bench.decode.engine import DecodeEngine

if TYPE_CHECKING:
    from baton.engine.decode.graph_step import GraphStep

Launch = Callable[[], None]
# Parts of a step that are no products.
_OTHERS = ("attention", "front")


def launches(engine: DecodeEngine, case: DecodeCase) -> dict[str, Launch]:
    """Each part of a step that can be repeated without side effects, over the rows of the last step that ran.

    For a loop that has drained and whose slots are still active. They write to buffers of the pass, and to
    the KV of a token that its own step writes again.
    """
    from baton.engine.forward.layers.experts import run_experts
    from baton.engine.model.layers.experts import ExpertsMlp
    from baton.engine.plan.decode_rows import batches_up_to
    from baton.engine.plan.decode_state import SIMPLE

    step: GraphStep = engine.loop.step_state  # type: ignore[attr-defined]
    rows = min(bucket for bucket in batches_up_to(engine.size.slots) if bucket >= case.batch)
    pass_, model = step.pass_, engine.decoder

    def product(name: str) -> Launch:
        mine = [product for product in model.products() if product.name == name]

        def launch() -> None:
            for product in mine:
                pass_.gemm(product, *pass_.workspace.operands(name, rows))

        return launch

    def head() -> None:
        pass_.head(rows, pass_.workspace)

    def attention() -> None:
        for layer in model.layers:
            pass_.attend(layer.attention, rows, pass_.workspace)

    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsMlp)]

    def experts() -> None:
        space = pass_.workspace.experts
        assert space is not None
        for mixture in mixtures:
            run_experts(space, mixture, pass_.workspace.hidden[:rows])

    def front() -> None:
        step.begin(rows, SIMPLE)
        step.plan(rows)
        pass_.embed(rows, pass_.workspace)

    of_layers = dict.fromkeys(product.name for layer in model.layers for product in layer.products())
    return {
        **{name: product(name) for name in of_layers},
        model.head.name: head,
        "attention": attention,
        **({"experts": experts} if mixtures else {}),
        "front": front,
    }


def measure(
    engine: DecodeEngine, case: DecodeCase, microseconds: Callable[[Launch], float]
) -> dict[str, float]:
    """Microseconds of each part; `microseconds` times one part, as `graph_us` does."""
    return {name: microseconds(launch) for name, launch in launches(engine, case).items()}


def budget(parts: dict[str, float], tpot_us: float, tail_us: float | None) -> dict[str, float]:
    """The table of one batch, in microseconds; `boundaries` is the rest of a step."""
    each = {name: us for name, us in parts.items() if name not in _OTHERS}
    products = sum(each.values())
    rest = parts["front"] + (tail_us or 0.0)
    table = {
        **each,
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
