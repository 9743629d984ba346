"""Decode attention of several rows a sequence: what rows cost, by the tile and by where K and V are written.

    python -m bench.probes.attention_rows [--runs 1x1024,8x1024,...] [--rows 1,2,4,8] [--json]

A run is sequences x context. For each number of rows a sequence: microseconds of one layer of the 8B shape
(32 query heads, 8 KV heads of 128, bf16, blocks of 64 tokens), medians of graphs of several layers, each with
a cache of its own.

    plain    the engine's kernel, one row a sequence
    single   the engine's kernel, an item for each row: a sequence's KV is read once a row
    written  a kernel writes the rows' rotated K and V, then one reads a sequence's KV once for all its rows
    fused    one kernel: the item with the new tokens takes them from the product and writes them

`written` and `fused` have a tile of 4 query heads x 4 or x 8 rows, each with its best warps and stages. Both
are first compared with attention in float32; without a GPU that is all, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.gpu.attention.items import AttentionTuning, Heads, Items, SplitPolicy
from baton.engine.kernels.gpu.attention.split_attention import split_attention
from bench.probes.attention_rows_kernels import attend_rows, write_keys

_RUNS = "1x1024,8x1024,32x1024,64x1024,1x8192,8x8192,32x8192,64x8192"
_HEADS, _KV_HEADS, _DIM, _BLOCK = 32, 8, 128, 64
_GROUP = _HEADS // _KV_HEADS
_TILE = 64
_SCALE = _DIM**-0.5
_LOG2_SCALE = _SCALE * 1.4426950408889634


@dataclass(frozen=True)
class Run:
    """Sequences that each have `context` tokens, of which the last `rows` are this step's."""

    sequences: int
    context: int
    rows: int

    @property
    def positions(self) -> list[int]:
        """The position of each row, a sequence's rows side by side."""
        return [self.context - self.rows + r for _ in range(self.sequences) for r in range(self.rows)]

    @property
    def slots(self) -> list[int]:
        return [slot for slot in range(self.sequences) for _ in range(self.rows)]


class Case:
    """Tensors of one run: caches of several layers, a shuffled block table, the products' output."""

    def __init__(self, run: Run, layers: int, device: str, dtype: torch.dtype) -> None:
        self.run, self.layers, self.device = run, layers, device
        width = -(-run.context // _BLOCK)
        blocks = 1 + run.sequences * width
        self.cache = torch.empty(
            blocks, layers, 2, _KV_HEADS, _BLOCK, _DIM, dtype=dtype, device=device
        ).normal_()
        self.table = (1 + torch.randperm(run.sequences * width)).view(run.sequences, width).int().to(device)
        rows = run.sequences * run.rows
        self.qkv = torch.randn(rows, (_HEADS + 2 * _KV_HEADS) * _DIM, dtype=dtype, device=device)
        self.out = torch.empty(rows, _HEADS * _DIM, dtype=dtype, device=device)
        self.positions = torch.tensor(run.positions, dtype=torch.int32, device=device)
        self.slots = torch.tensor(run.slots, dtype=torch.int32, device=device)
        angles = self.positions.float()[:, None] * (
            10_000 ** (-torch.arange(0, _DIM, 2, device=device).float() / _DIM)
        )
        self.rotary = (angles.cos(), angles.sin())
        self.policy = (
            SplitPolicy.filling(
                torch.cuda.get_device_properties(0).multi_processor_count, _KV_HEADS, run.sequences, 3
            )
            if device == "cuda"
            else SplitPolicy(4, 64)
        )

    def expected(self, layer: int) -> Tensor:
        """Attention in float32 over the layer's cache with this step's rows in it."""
        run, width = self.run, self.table.shape[1]
        qkv = self.qkv.float().view(-1, _HEADS + 2 * _KV_HEADS, _DIM)
        cos, sin = (torch.cat((x, x), 1)[:, None] for x in self.rotary)
        turned = qkv * cos + torch.cat((-qkv[..., _DIM // 2 :], qkv[..., : _DIM // 2]), -1) * sin
        turned = turned.to(self.qkv.dtype).float()
        out = []
        for s in range(run.sequences):
            tokens = self.cache[self.table[s].long(), layer].float()  # [blocks, 2, kv heads, block, dim]
            k, v = tokens.permute(1, 2, 0, 3, 4).reshape(2, _KV_HEADS, width * _BLOCK, _DIM).unbind()
            mine = slice(s * run.rows, (s + 1) * run.rows)
            base = run.context - run.rows
            k[:, base : run.context] = turned[mine, _HEADS : _HEADS + _KV_HEADS].transpose(0, 1)
            v[:, base : run.context] = qkv[mine, _HEADS + _KV_HEADS :].transpose(0, 1)
            q = turned[mine, :_HEADS].transpose(0, 1).reshape(_KV_HEADS, _GROUP, run.rows, _DIM)
            scores = q @ k[:, None].transpose(-1, -2) * _SCALE
            ages = torch.arange(width * _BLOCK, device=self.device)
            hidden = ages[None, :] > base + torch.arange(run.rows, device=self.device)[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
            result = scores.softmax(-1) @ v[:, None]  # [kv heads, group, rows, dim]
            out.append(result.permute(2, 0, 1, 3).reshape(run.rows, -1))
        return torch.cat(out)


def parts_of(contexts: list[int], policy: SplitPolicy) -> list[tuple[int, int, int]]:
    """(entry, begin, end) of each item, as `plan_items` cuts contexts."""
    about = max(policy.shortest, -(-sum(contexts) // policy.wanted))
    found = []
    for entry, context in enumerate(contexts):
        pieces = max(1, -(-context // about))
        rest = len(contexts) % policy.wave
        if len(contexts) > policy.wave and rest and entry >= len(contexts) - rest:
            pieces = max(pieces, min(policy.wave // rest, -(-context // policy.shortest)))
        part = max(_TILE, triton.cdiv(triton.cdiv(context, pieces), _TILE) * _TILE)
        found += [(entry, begin, min(begin + part, context)) for begin in range(0, context, part)]
    return found


class Single:
    """Today's kernel, an item list entry for each row."""

    def __init__(self, case: Case, tuning: AttentionTuning) -> None:
        self.case, self.tuning = case, tuning
        rows = len(case.run.positions)
        self.heads = Heads(_HEADS, _KV_HEADS, _DIM, _SCALE, 1e-5)
        planned = parts_of([p + 1 for p in case.run.positions], case.policy)
        self.items = Items(rows, len(planned), _HEADS, _KV_HEADS, _DIM, torch.device(case.device))
        counts = [sum(e == entry for e, _, _ in planned) for entry in range(rows)]
        firsts = [sum(counts[:entry]) for entry in range(rows)]
        lines = [
            (e, case.run.slots[e], case.run.positions[e], begin, end, firsts[e], counts[e], 0)
            for e, begin, end in planned
        ]
        self.items.items.copy_(torch.tensor(lines, dtype=torch.int32))
        self.items.count.fill_(len(lines))

    def launch(self, layer: int) -> None:
        case = self.case
        split_attention(
            case.out, case.qkv, case.cache, layer, case.table, case.rotary, self.items, self.heads,
            tuning=self.tuning,
        )  # fmt: skip


class Rows:
    """The kernel of several rows a sequence, with K and V written before it or by it."""

    def __init__(self, case: Case, rows: int, fused: bool, warps: int, stages: int) -> None:
        self.case, self.rows, self.fused, self.warps, self.stages = case, rows, fused, warps, stages
        self.queries = max(16, _GROUP * rows)
        run = case.run
        planned = parts_of([run.context] * run.sequences, case.policy)
        base = run.context - run.rows
        # The new tokens belong to one item: parts that begin behind the first of them join the part before.
        joined = [
            (e, begin, run.context if end > base else end) for e, begin, end in planned if begin <= base
        ]
        counts = [sum(e == entry for e, _, _ in joined) for entry in range(run.sequences)]
        firsts = [sum(counts[:entry]) for entry in range(run.sequences)]
        lines = [
            (e, e * run.rows, run.rows, base, begin, end, firsts[e], counts[e]) for e, begin, end in joined
        ]
        self.items = torch.tensor(lines, dtype=torch.int32, device=case.device)
        self.sums = torch.empty(len(lines) * _KV_HEADS * self.queries, _DIM, device=case.device)
        self.scales = torch.empty(len(lines) * _KV_HEADS * self.queries, 2, device=case.device)
        self.arrived = torch.zeros(run.sequences * _KV_HEADS, dtype=torch.int32, device=case.device)

    def launch(self, layer: int) -> None:
        case = self.case
        strides = (
            case.table.stride(0),
            layer * case.cache.stride(1),
            case.cache.stride(0),
            case.cache.stride(2),
        )
        if not self.fused:
            write_keys[(len(case.run.positions), _KV_HEADS)](
                case.qkv, case.cache, case.table, *case.rotary, case.slots, case.positions, *strides,
                HEADS=_HEADS, KV_HEADS=_KV_HEADS, DIM=_DIM, BLOCK=_BLOCK, num_warps=1,
            )  # fmt: skip
        attend_rows[(_KV_HEADS, len(self.items))](
            case.qkv, case.cache, case.table, *case.rotary, self.items, self.sums, self.scales, self.arrived,
            case.out, *strides, _LOG2_SCALE,
            HEADS=_HEADS, KV_HEADS=_KV_HEADS, DIM=_DIM, GROUP=_GROUP, ROWS=self.rows, QUERIES=self.queries,
            BLOCK=_BLOCK, TILE=_TILE, UPCAST=case.qkv.dtype == torch.float32 or not ON_CHIP.value,
            FUSED=self.fused, NEW=16, STAGES=self.stages, num_warps=self.warps,
        )  # fmt: skip


def microseconds(launch: Callable[[int], None], layers: int) -> float:
    """The median time of one layer, over 30 replays of a graph of all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(layers):
                launch(layer)
        for _ in range(5):
            graph.replay()
        times = []
        for _ in range(30):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / layers)
    return float(statistics.median(times))


def check(device: str, dtype: torch.dtype) -> float:
    """The largest relative error (root of squares) of all kernels against float32; raises if one is wrong."""
    worst = 0.0
    runs = [Run(2, 140, 4), Run(1, 130, 8), Run(1, 66, 8), Run(3, 65, 2)] if device == "cuda" else [
        Run(1, 70, 8), Run(2, 65, 4),
    ]  # fmt: skip
    for run in runs:
        for fused in (False, True):
            case = Case(run, 2, device, dtype)
            expected = case.expected(1)
            case.out.fill_(float("nan"))
            Rows(case, 4 if run.rows <= 4 else 8, fused, 4, 2).launch(1)
            error = float((case.out.float() - expected).norm() / expected.norm())
            if not error < (1e-2 if dtype == torch.bfloat16 else 1e-5):
                raise SystemExit(f"{run} fused={fused}: relative error {error}")
            worst = max(worst, error)
    return worst


def measure(sequences: int, context: int, several: list[int], layers: int) -> list[dict[str, Any]]:
    """A line for each kernel and number of rows of one run."""
    lines: list[dict[str, Any]] = []

    def add(kernel: str, rows: int, us: float, **more: int) -> None:
        lines.append(
            {
                "sequences": sequences,
                "context": context,
                "rows": rows,
                "kernel": kernel,
                "us": round(us, 2),
                **more,
            }
        )

    def single(case: Case) -> float:
        return min(
            microseconds(Single(case, AttentionTuning(4, stages)).launch, case.layers) for stages in (2, 3)
        )

    add("plain", 1, single(Case(Run(sequences, context, 1), layers, "cuda", torch.bfloat16)))
    for rows in several:
        case = Case(Run(sequences, context, rows), layers, "cuda", torch.bfloat16)
        if rows > 1:
            add("single", rows, single(case))
        for tile in (4, 8):
            if rows > tile:
                continue
            for fused in (False, True):
                best = min(
                    (
                        microseconds(Rows(case, tile, fused, warps, stages).launch, layers),
                        warps,
                        stages,
                    )
                    for warps in (2, 4)
                    for stages in (2, 3)
                )
                name = "fused" if fused else "written"
                add(name, rows, best[0], tile=tile, warps=best[1], stages=best[2])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default=_RUNS)
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(5)
    if not torch.cuda.is_available():
        print("interpreted, float32: worst relative error", check("cpu", torch.float32))
        return
    print(torch.cuda.get_device_name(), "worst relative error", check("cuda", torch.bfloat16), flush=True)
    several = [int(n) for n in arguments.rows.split(",")]
    for text in arguments.runs.split(","):
        sequences, context = map(int, text.split("x"))
        lines = measure(sequences, context, several, arguments.layers)
        plain = lines[0]["us"]
        for line in lines:
            if arguments.json:
                print(json.dumps(line), flush=True)
            else:
                more = " ".join(f"{k} {line[k]}" for k in ("tile", "warps", "stages") if k in line)
                print(
                    f"{sequences:3} x {context:5} rows {line['rows']} {line['kernel']:8} {line['us']:8.2f} us"
                    f" {line['us'] / plain:5.2f} of plain  {more}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
