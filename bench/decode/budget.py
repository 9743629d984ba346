"""Measures where a step's time goes: each part alone, as a graph over all layers, so that weights are not in
the cache.

products      with their norms and epilogues, all layers; `head` once
attention     all layers, over the batch's own contexts
experts       of a mixture, all layers: router, tiles, products and sum, of the rows of the last step
front         begin, plan and the embedding
tail          sampling and finishing, by the step's own clock
step          the last steps of the window, at whose contexts the parts are then measured
exchange      of several devices, the sums of a step with nothing between them; all other parts are those of
              the first device alone, which waits for none
boundaries    the rest of a step: gaps between kernels and the gap to the next step

The parts are repeated in graphs of their own, so overlap between similar kernels is included; where different
kernels of a step overlap better or worse, the difference is in `boundaries`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.case import DecodeCase
from bench.decode.engine import DecodeEngine

if TYPE_CHECKING:
    from baton.engine.decode.graph_step import GraphStep
    from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
    from baton.engine.model.modules import Model
    from baton.engine.parallel.rank_exchange import RankExchange

Launch = Callable[[], None]
# Parts of a step that are no products.
_OTHERS = ("attention", "front", "exchange")


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
        if len(engine.model.ranks) > 1:  # their inputs are normed by the exchange
            mine = [replace(product, norm=None) for product in mine]

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
    """Microseconds of each part; `microseconds` times one part, as `graph_us` does. For a loop as `launches`
    needs it."""
    loop: GraphDecodeLoop = engine.loop  # type: ignore[assignment]
    with loop.solo():
        parts = {name: microseconds(launch) for name, launch in launches(engine, case).items()}
    return parts | ({"exchange": exchange_us(engine, case.batch)} if loop.group else {})


def exchange_us(engine: DecodeEngine, rows: int) -> float:
    """Microseconds that all sums of a step of `rows` rows take among several idle devices, with residual and
    norm, one behind the other."""
    loop: GraphDecodeLoop = engine.loop  # type: ignore[assignment]
    group = loop.group
    assert group is not None
    queues = [loop.queue, *(follower.queue for follower in loop.followers)]
    sums = [
        _sums(rank, nodes, rows) for rank, nodes in zip(engine.model.ranks, group.ranks, strict=True)
    ]  # whose tensors live as long as the graphs
    with loop.solo():
        steps = [queue.capture(launch) for queue, launch in zip(queues, sums, strict=True)]
        engine.drain()
    return loop.seconds_of(partial(group.launch, steps)) * 1e6


def _sums(rank: Model, nodes: RankExchange, rows: int) -> Launch:
    """A rank's part of a step that has nothing but its sums."""
    config, dtype = rank.config, rank.precision.activations
    norm = next(product.norm for product in rank.products() if product.norm is not None)
    hidden = norm.gain.new_zeros(rows, config.hidden_size, dtype=dtype)
    normed, no_logits = hidden.clone(), hidden.new_zeros(0, len(config.head_rows))

    def launch() -> None:
        nodes.begin(None)
        for _ in range(2 * config.num_layers):
            nodes.reduce(hidden, None, (norm, normed))
        nodes.end(no_logits, config.head_rows.start)

    return launch


def split_cost(
    engine: DecodeEngine, case: DecodeCase, microseconds: Callable[[Launch], float], joined: int = 16
) -> dict[str, float]:
    """The cost of dividing the model, in milliseconds; without sequences in the loop.

    all_devices_ms    a step without attention on all devices
    alone_ms          on the first alone, which waits for no other
    attention_ms      the first device's attention, over the case's context and `joined` tokens more on
                      average, by which the whole batch has joined
    exchange_ms       see `exchange_us`
    """
    loop: GraphDecodeLoop = engine.loop  # type: ignore[assignment]
    engine.decode(case, 4 * joined, joined)
    engine.drain()
    with loop.solo():
        attention_us = microseconds(launches(engine, case)["attention"])
    found = {"attention_ms": attention_us / 1e3, "exchange_ms": exchange_us(engine, case.batch) / 1e3}
    engine.empty()  # these steps have no sequences
    for name, seconds in (("all_devices_ms", loop.bucket_seconds()), ("alone_ms", loop.alone_seconds())):
        bucket = min(rows for rows in seconds if rows >= case.batch)
        found[name] = seconds[bucket] * 1e3
    return {name: round(ms, 4) for name, ms in found.items()}


def budget(parts: Mapping[str, float], tpot_us: float, tail_us: float | None) -> dict[str, float]:
    """The table of one batch, in microseconds; `boundaries` is the rest of a step."""
    each = {name: us for name, us in parts.items() if name not in _OTHERS}
    products = sum(each.values())
    rest, exchange = parts["front"] + (tail_us or 0.0), parts.get("exchange", 0.0)
    table = {
        **each,
        "products": products,
        "attention": parts["attention"],
        **({"exchange": exchange} if exchange else {}),
        "rest": rest,
        "boundaries": tpot_us - products - parts["attention"] - exchange - rest,
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
