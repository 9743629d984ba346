"""Products of a mixture of experts: `torch._grouped_mm` beside a Triton kernel, and how fast experts stream.

    python -m bench.probes.grouped_products [--shape qwen3-30b-a3b]

Three questions, for bf16 weights [experts, out, in] and rows that are sorted by expert:

    capture   whether `torch._grouped_mm` runs in a CUDA graph with offsets on the device, some experts
              without rows, and replays follow offsets that have changed
    prefill   TFLOP/s of 512, 2,048 and 8,192 tokens, each by its top-k experts, drawn uniformly
    decode    TB/s of weights where so many experts have 1, 4 or 16 rows each: a tile of 16 rows streams an
              expert's weights once, by the matrix units; a row alone also without them

One JSON line a case. Without a GPU: only the comparison with float32, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP


@dataclass(frozen=True)
class Shape:
    """A layer's experts: width of the residual, inner width of an expert, experts, experts a token."""

    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "small": Shape(64, 32, 8, 2),
}


@triton.jit
def _grouped(
    a, b, out, tiles, tile_count, starts, ends, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = a [rows, k] · b[expert] [n, k] transposed; tile i is (expert, first row)."""
    program = tl.program_id(0)
    columns = tl.cdiv(n, BN)
    band = program // (BAND * columns)
    first = band * BAND
    in_band = tl.minimum(tl.load(tile_count) - first, BAND)
    if in_band <= 0:
        return
    within = program % (BAND * columns)
    tile = first + within % in_band
    column = within // in_band
    if column >= columns:
        return
    expert = tl.load(tiles + tile * 2).to(tl.int64)
    row = tl.load(tiles + tile * 2 + 1) + tl.arange(0, BM)
    there = row < tl.load(ends + expert)
    col = column * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    a_places = a + row.to(tl.int64)[:, None] * k + kk[None, :]
    b_places = b + expert * n * k + col.to(tl.int64)[:, None] * k + kk[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        x = tl.load(a_places + start, mask=there[:, None], other=0.0)
        w = tl.load(b_places + start, mask=(col < n)[:, None], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    places = out + row.to(tl.int64)[:, None] * n + col[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=there[:, None] & (col < n)[None, :])


@triton.jit
def _one_row(a, b, out, experts, n, k, BN: tl.constexpr, BK: tl.constexpr):
    """out [rows, n]: row i by expert experts[i], without the matrix units."""
    row = tl.program_id(0)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    expert = tl.load(experts + row).to(tl.int64)
    kk = tl.arange(0, BK)
    total = tl.zeros((BN, BK), tl.float32)
    for start in range(0, k, BK):
        x = tl.load(a + row * k + start + kk).to(tl.float32)
        w = tl.load(
            b + expert * n * k + col.to(tl.int64)[:, None] * k + start + kk[None, :],
            mask=(col < n)[:, None], other=0.0,
        )  # fmt: skip
        total += x[None, :] * w.to(tl.float32)
    tl.store(out + row * n + col, tl.sum(total, 1).to(out.dtype.element_ty), mask=col < n)


class Groups:
    """Rows sorted by expert: `counts` rows of each, with the offsets and tiles that kernels take."""

    def __init__(self, counts: Tensor, tile_rows: int, device: str) -> None:
        self.counts = counts.tolist()
        ends = counts.cumsum(0)
        self.rows = int(ends[-1])
        self.ends = ends.int().to(device)
        self.starts = (ends - counts).int().to(device)
        tiles = [
            (expert, int(ends[expert]) - count + begin)
            for expert, count in enumerate(self.counts)
            for begin in range(0, count, tile_rows)
        ]
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.tile_count = torch.tensor([len(tiles)], dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Cut:
    """How the Triton kernel is cut: its tile, the tiles of rows that share columns, warps and stages."""

    bm: int
    bn: int
    bk: int
    band: int
    warps: int
    stages: int


def grouped(out: Tensor, a: Tensor, b: Tensor, groups: Groups, cut: Cut) -> None:
    n, k = b.shape[1:]
    bands = -(-len(groups.tiles) // cut.band) * cut.band
    _grouped[(bands * triton.cdiv(n, cut.bn),)](
        a, b, out, groups.tiles, groups.tile_count, groups.starts, groups.ends, n, k,
        BM=cut.bm, BN=cut.bn, BK=cut.bk, BAND=cut.band, UPCAST=not ON_CHIP.value,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def one_row(out: Tensor, a: Tensor, b: Tensor, experts: Tensor, bn: int, bk: int, warps: int) -> None:
    n, k = b.shape[1:]
    _one_row[(len(experts), triton.cdiv(n, bn))](a, b, out, experts, n, k, BN=bn, BK=bk, num_warps=warps)


def expected(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """The product in float32, an expert at a time."""
    parts = a.float().split(groups.counts)
    return torch.cat([part @ b[expert].float().T for expert, part in enumerate(parts)])


def microseconds(launches: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """The median time of one launch, over replays of a graph of them all."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return float(statistics.median(times))


def routed(tokens: int, shape: Shape) -> Tensor:
    """Rows of each expert, where each token draws its top-k uniformly."""
    chosen = torch.rand(tokens, shape.experts).topk(shape.top_k, 1).indices
    return torch.bincount(chosen.flatten(), minlength=shape.experts)


def library(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    return torch._grouped_mm(a, b.transpose(-2, -1), offs=groups.ends)


def check(device: str, dtype: torch.dtype) -> float:
    """The Triton kernels' largest relative error against float32; raises if one is wrong."""
    shape, worst = SHAPES["small"], 0.0
    counts = torch.tensor([5, 0, 33, 1, 0, 17, 16, 0])
    for n, k in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
        b = torch.randn(shape.experts, n, k, dtype=dtype, device=device)
        groups = Groups(counts, 16, device)
        a = torch.randn(groups.rows, k, dtype=dtype, device=device)
        out = torch.full((groups.rows, n), float("nan"), dtype=dtype, device=device)
        grouped(out, a, b, groups, Cut(16, 32, 32, 4, 4, 2))
        wanted = expected(a, b, groups)
        worst = max(worst, float((out.float() - wanted).norm() / wanted.norm()))
        ones = torch.arange(8, dtype=torch.int32, device=device)
        out = torch.full((8, n), float("nan"), dtype=dtype, device=device)
        one_row(out, a, b, ones, 16, 32, 4)
        wanted = torch.einsum("ek,enk->en", a[:8].float(), b.float())
        worst = max(worst, float((out.float() - wanted).norm() / wanted.norm()))
    if not worst < (1e-2 if dtype == torch.bfloat16 else 1e-5):
        raise SystemExit(f"wrong: relative error {worst}")
    return worst


def capture(shape: Shape) -> dict[str, Any]:
    """Whether the library's product follows offsets that change between replays of one graph."""
    b = torch.randn(shape.experts, 2 * shape.inner, shape.hidden, dtype=torch.bfloat16, device="cuda")
    first = torch.zeros(shape.experts, dtype=torch.long)
    first[3], first[7] = 100, 28
    second = torch.zeros(shape.experts, dtype=torch.long)
    second[0], second[5] = 1, 127
    groups = Groups(first, 16, "cuda")
    a = torch.randn(groups.rows, shape.hidden, dtype=torch.bfloat16, device="cuda")
    errors = []
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            library(a, b, groups)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = library(a, b, groups)
            for counts in (first, second):
                groups.ends.copy_(counts.cumsum(0).int())
                graph.replay()
                stream.synchronize()
                wanted = expected(a, b, Groups(counts, 16, "cuda"))
                errors.append(float((out.float() - wanted).norm() / wanted.norm()))
    except Exception as error:
        return {"capture": f"{type(error).__name__}: {error}"[:200]}
    return {"capture": "right" if max(errors) < 1e-2 else "wrong", "errors": [round(e, 5) for e in errors]}


_PREFILL_CUTS = [
    Cut(bm, bn, 64, 8, warps, stages)
    for bm, bn, warps, stages in (
        (64, 128, 4, 4), (128, 128, 4, 4), (128, 128, 8, 4), (128, 256, 8, 3), (64, 256, 4, 4),
        (256, 128, 8, 3),
    )
]  # fmt: skip


def prefill(shape: Shape, tokens: int) -> list[dict[str, Any]]:
    counts = routed(tokens, shape)
    lines = []
    for part, n, k in (("up", 2 * shape.inner, shape.hidden), ("down", shape.hidden, shape.inner)):
        b = torch.randn(shape.experts, n, k, dtype=torch.bfloat16, device="cuda")
        rows = tokens * shape.top_k
        a = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        groups = Groups(counts, 16, "cuda")
        found: dict[str, Any] = {"tokens": tokens, "rows": rows, "product": part}

        def tflops(us: float, n: int = n, k: int = k, rows: int = rows) -> float:
            return round(2 * rows * n * k / us / 1e6, 1)

        us = microseconds([partial(library, a, b, groups)] * 4)
        found["library_us"], found["library_tflops"] = round(us, 1), tflops(us)
        best: tuple[float, Cut] | None = None
        for cut in _PREFILL_CUTS:
            tiled = Groups(counts, cut.bm, "cuda")
            try:
                us = microseconds(
                    [partial(grouped, out, a, b, tiled, cut)] * 4
                )  # fmt: skip
            except Exception:  # more shared memory than this GPU has, say
                continue
            if best is None or us < best[0]:
                best = us, cut
        if best is not None:
            found["triton_us"], found["triton_tflops"] = round(best[0], 1), tflops(best[0])
            found["cut"] = str(best[1])
        lines.append(found)
    return lines


def decode(shape: Shape, active: int, rows_each: int) -> list[dict[str, Any]]:
    """Streams the weights of `active` experts with `rows_each` rows each; copies defeat the cache."""
    lines = []
    for part, n, k in (("up", 2 * shape.inner, shape.hidden), ("down", shape.hidden, shape.inner)):
        weight_bytes = active * n * k * 2
        copies = max(2, -(-(256 << 20) // weight_bytes))
        experts = min(shape.experts * 16, copies * active)
        b = torch.randn(experts, n, k, dtype=torch.bfloat16, device="cuda")
        a = torch.randn(active * rows_each, k, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(active * rows_each, n, dtype=torch.bfloat16, device="cuda")
        sets: list[Groups] = []
        launches: list[Callable[[], object]]
        order = torch.randperm(experts)
        for copy in range(experts // active):
            counts = torch.zeros(experts, dtype=torch.long)
            counts[order[copy * active : (copy + 1) * active]] = rows_each
            sets.append(Groups(counts, 16, "cuda"))
        found: dict[str, Any] = {"active": active, "rows_each": rows_each, "product": part}

        def note(
            name: str, us: float, cut: object, weight_bytes: int = weight_bytes, found: Any = found
        ) -> None:
            if f"{name}_us" not in found or us < found[f"{name}_us"]:
                found[f"{name}_us"] = round(us, 2)
                found[f"{name}_tb_s"] = round(weight_bytes / us / 1e6, 3)
                found[f"{name}_cut"] = str(cut)

        for bn, bk, stages, warps in product((16, 32, 64, 128), (128, 256), (3, 5), (4, 8)):
            if k % bk or bn * bk * 2 * stages > 200 << 10:
                continue
            cut = Cut(16, bn, bk, 1, warps, stages)
            launches = [partial(grouped, out, a, b, groups, cut) for groups in sets]
            try:
                note("tile", microseconds(launches, 10), cut)
            except Exception:  # more shared memory than this GPU has, say
                continue
        if rows_each == 1:
            for bn, bk, warps in product((4, 8, 16), (256, 512, 1024), (4, 8)):
                if k % bk:
                    continue
                chosen = [groups.tiles[:, 0].contiguous() for groups in sets]
                launches = [partial(one_row, out, a, b, ids, bn, bk, warps) for ids in chosen]
                note("row", microseconds(launches, 10), (bn, bk, warps))
        try:
            launches = [partial(library, a, b, groups) for groups in sets]
            note("library", microseconds(launches, 10), None)
        except Exception as error:
            found["library"] = str(error)[:80]
        lines.append(found)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    arguments = parser.parse_args()
    torch.manual_seed(7)
    if not torch.cuda.is_available():
        print("interpreted, float32: worst relative error", check("cpu", torch.float32))
        return
    shape = SHAPES[arguments.shape]
    print(torch.cuda.get_device_name(), "worst relative error", check("cuda", torch.bfloat16), flush=True)
    print(json.dumps(capture(shape)), flush=True)
    for tokens in (512, 2048, 8192):
        for line in prefill(shape, tokens):
            print(json.dumps(line), flush=True)
    for active in (8, 32, 128):
        for rows_each in (1, 4, 16):
            for line in decode(shape, min(active, shape.experts), rows_each):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
