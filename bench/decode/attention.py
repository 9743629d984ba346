"""One layer's decode attention alone: by every tuning, or of several rows a sequence beside that of one.

    python -m bench.decode attention [--shapes llama-3.1-8b] [--dtype bf16] [--kv-dtype auto,fp8]
        [--runs 1x1024,8x1024,64x1024,256x1024,32x8192] [--programs 1,2,4 [--shortest 64,128]]
        [--warps 2,4] [--stages 2,3] [--tiles 32,64] [--json]
    python -m bench.decode attention --rows 1,2,4,8 [--exact] [--tunings] [--shapes llama-3.1-8b,qwen2.5-7b]
        [--runs 1x1024,8x1024,...] [--programs ...] [--warps ...] [--json]

A run is sequences x context. By every tuning (what `AttentionTuning.of` should choose): `programs`: rows are
cut so that each multiprocessor gets about this number of programs at least, of no fewer tokens than the
`shortest`; without it, as a worker cuts them. `tb_s`: bytes of keys, values and scales, over the time;
`chosen`: what a worker uses. --warps, --stages and --tiles (tokens) leave out all other tunings.

With --rows, what drafts cost in attention: a sequence's last tokens are the rows. `plain`: one row a
sequence. `rows`: each sequence's keys and values are read once for all its rows; --exact adds `single`, where
they are written, then read once a row, as in mode `exact`. As a worker tunes them; with --tunings also
with each tuning, and with items of 2, 4 and 8 rows. `of_plain`: the time, of the run's plain one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from baton.model_spec.layout import CacheGroup, Layout, key_value_planes
from bench.options import numbers, program_parser, show
from bench.shapes import SHAPES, Precision, Shape

if TYPE_CHECKING:
    from baton.engine.decode.gpu_pass import DecodePass
    from baton.engine.kernels.gpu.attention.items import AttentionTuning, Heads, Items, SplitPolicy

_RUNS = "1x1024,8x1024,64x1024,256x1024,32x8192"
_ROWS_RUNS = "1x1024,8x1024,32x1024,64x1024,1x8192,8x8192,32x8192,64x8192"
_BLOCK_TOKENS = 64
# Layers, so many that keys and values of all of them are several times what the GPU's cache holds, as a step
# finds them: it has read the weights meanwhile. Some more do not change what a layer takes.
_LEAST_LAYERS, _MOST_LAYERS, _READ_BYTES = 8, 64, 2e8
# Of a GPU that is not there.
_MULTIPROCESSORS = 4


def main() -> None:
    arguments = _parser().parse_args()
    for shape in arguments.shapes.split(","):
        for kv_dtype in arguments.kv_dtype.split(","):
            precision = Precision(arguments.dtype, kv_dtype=kv_dtype)
            for text in (arguments.runs or (_ROWS_RUNS if arguments.rows else _RUNS)).split(","):
                sequences, context = map(int, text.split("x"))
                for found in _measured(arguments, shape, precision, sequences, context):
                    show(found, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("decode", __doc__, "attention")
    parser.add_argument("--shapes", default="llama-3.1-8b", metavar="NAME,NAME", help="of bench/shapes.py")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--kv-dtype", default="auto,fp8", help="of auto, fp8")
    parser.add_argument("--runs", metavar="NxT,NxT", help="sequences x tokens of context")
    parser.add_argument("--programs", type=numbers, help="programs for each multiprocessor, such as 1,2,4")
    for name in ("warps", "stages", "tiles"):
        parser.add_argument(f"--{name}", type=numbers, help=f"only tunings of these {name}")
    parser.add_argument(
        "--shortest", type=numbers, default=[128], help="tokens of a program, at least (default 128)"
    )
    parser.add_argument("--rows", type=numbers, help="instead: rows a sequence, 1 to 8")
    parser.add_argument("--exact", action="store_true", help="with --rows: also an item for each row")
    parser.add_argument("--tunings", action="store_true", help="with --rows: also every tuning")
    parser.add_argument("--json", action="store_true", help="one object a line")
    return parser


def _measured(
    arguments: argparse.Namespace, shape: str, precision: Precision, sequences: int, context: int
) -> Iterator[dict[str, Any]]:
    """The lines of one run."""
    wanted = tunings(arguments.warps, arguments.stages, arguments.tiles)
    cuts = product(arguments.programs, arguments.shortest) if arguments.programs else [None]
    for cut in cuts:
        if arguments.rows:
            run = RowsRun(shape, precision, sequences, context, "cuda", cut)
            mine = wanted if arguments.tunings else ()
            yield from run.measure(arguments.rows, exact=arguments.exact, tunings=mine)
        else:
            yield from PlainRun(shape, precision, sequences, context, "cuda", cut).measure(wanted)


def tunings(
    warps: list[int] | None = None, stages: list[int] | None = None, tiles: list[int] | None = None
) -> list[AttentionTuning]:
    """The tunings that are measured, of these warps, stages and tokens of a tile; None: of all."""
    from baton.engine.kernels.gpu.attention.items import TILE, AttentionTuning

    found = [
        *(AttentionTuning(count, depth) for count in (1, 2, 4, 8) for depth in (2, 3, 4)),
        *(AttentionTuning(4, depth, registers) for depth in (2, 3) for registers in (128, 168)),
        *(AttentionTuning(count, depth, tile=TILE // 2) for count in (1, 2, 4) for depth in (3, 4, 5)),
    ]
    return [
        one
        for one in found
        if one.warps in (warps or [one.warps])
        and one.stages in (stages or [one.stages])
        and one.tile in (tiles or [one.tile])
    ]


def _layers(shape: str, precision: Precision, tokens: int) -> int:
    """The number of layers over which a run of so many tokens of context is measured."""
    one = Shape({**SHAPES[shape].config, "num_hidden_layers": 1})
    layer_bytes = tokens * one.kv_elements() * one.kv_element_bytes(precision)
    return min(_MOST_LAYERS, max(_LEAST_LAYERS, math.ceil(_READ_BYTES / layer_bytes)))


class PlainRun:
    """One run's tensors, of random numbers; blocks dealt out shuffled."""

    def __init__(
        self,
        shape: str,
        precision: Precision,
        rows: int,
        context: int,
        device: str,
        cut: tuple[int, int] | None = None,
        layers: int | None = None,
    ) -> None:
        """`cut`: as many programs for each multiprocessor, and tokens of each, at least; None: as a worker
        cuts rows. `layers`: None: as many as are measured."""
        import torch

        from baton.engine.decode.gpu_pass import PassOptions
        from baton.engine.kernels.gpu.attention.items import SplitPolicy
        from baton.engine.memory.kv_cache import KVCache
        from bench.engine_driver import random_model, randomize

        layers = layers or _layers(shape, precision, rows * context)
        small = {"num_hidden_layers": layers, "vocab_size": 512, "intermediate_size": 256, "eos_token_id": 0}
        reduced = Shape({**SHAPES[shape].config, **small})
        model = random_model(reduced, precision, context, _BLOCK_TOKENS, device)
        self.run = {"shape": shape, "kv_dtype": precision.kv_dtype, "rows": rows, "context": context}
        if cut is not None:
            self.run |= {"programs": cut[0], "shortest": cut[1]}
        width = -(-context // _BLOCK_TOKENS)
        cache = KVCache(model.layout, 1 + rows * width, device)
        randomize(cache)
        table = (1 + torch.randperm(rows * width)).view(rows, width).int().to(device)
        options = PassOptions.of(model, exact=False)
        if cut is not None:
            programs, shortest = cut
            wanted = options.multiprocessors * programs // model.config.num_kv_heads
            options = replace(options, policy=SplitPolicy(max(1, wanted), shortest))
        self._tables = tuple(table for _ in model.layout.groups)
        self._model, self._cache, self._options, self._device = model, cache, options, device
        self._rows, self._context = rows, context
        self._attention = [layer.attention for layer in model.layers]
        self._bytes = rows * reduced.kv_elements_read(context) * reduced.kv_element_bytes(precision)

    def _pass_of(self, tuning: AttentionTuning | None) -> DecodePass:
        """A pass with room for as many items as this tuning makes, its items planned; None: a worker's."""
        import torch

        from baton.engine.decode.gpu_pass import DecodePass

        rows, context = self._rows, self._context
        options = replace(self._options, attention=tuning)
        count = torch.tensor([rows], device=self._device)
        made = DecodePass(self._model, self._cache, self._tables, rows, options, row_count=count)
        made.workspace.qkv[:rows].normal_()
        made.inputs.slot.copy_(torch.arange(rows))
        made.inputs.position.fill_(context - 1)
        made.embed(rows, made.workspace)
        self._plan(made)
        return made

    def measure(self, tunings: Sequence[AttentionTuning]) -> list[dict[str, Any]]:
        """A line for each tuning, the chosen one first."""
        from bench.decode.timing import microseconds

        found = []
        for tuning in (None, *tunings):
            try:
                us = microseconds(partial(self._launch, self._pass_of(tuning)), self._device)
            except Exception:  # more shared memory than this GPU has, say
                continue
            by = {"chosen": True} if tuning is None else asdict(tuning)
            layer_us = us / len(self._attention)
            found.append(self.run | by | {"us": round(layer_us, 1), "tb_s": round(self._bytes / us / 1e6, 3)})
        return found

    def _launch(self, made: DecodePass) -> None:
        for attention in self._attention:
            made.attend(attention, self._rows, made.workspace)

    def _plan(self, made: DecodePass) -> None:
        """The lists of items, as a step plans them."""
        import torch
        import triton

        from baton.engine.kernels.gpu.attention.items import TILE
        from baton.engine.kernels.gpu.step.plan_items import plan_items
        from baton.engine.kernels.gpu.step.step_kernels import CONTROL_WORDS, ROWS

        control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=self._device)
        control[ROWS.value] = self._rows
        inputs, policy = made.inputs, made.policy(self._rows)
        for items, heads in zip(inputs.items, made.heads, strict=True):
            plan_items[(1,)](
                control, inputs.slot, inputs.position, inputs.position, items.count, items.items, heads.seen,
                policy.wanted, policy.shortest, policy.wave,
                ROWS_POWER=triton.next_power_of_2(self._rows), TILE=TILE, FIXED=0, PER_ITEM=1,
            )  # fmt: skip


class RowsRun:
    """One run's caches, of random numbers; blocks dealt out shuffled."""

    def __init__(
        self,
        shape: str,
        precision: Precision,
        sequences: int,
        context: int,
        device: str,
        cut: tuple[int, int] | None = None,
        layers: int | None = None,
    ) -> None:
        """`cut`, `layers`: as for `PlainRun`."""
        import torch

        from baton.engine.memory.kv_cache import KVCache
        from bench.engine_driver import randomize

        self.cut = cut
        layers = layers or _layers(shape, precision, sequences * context)
        config = SHAPES[shape].config
        kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
        self.heads = _heads(config["num_attention_heads"], kv_heads, dim)
        self.case = {
            "shape": shape, "kv_dtype": precision.kv_dtype, "sequences": sequences, "context": context
        }  # fmt: skip
        if cut is not None:
            self.case |= {"programs": cut[0], "shortest": cut[1]}
        self.sequences, self.context, self.device, self.layers = sequences, context, device, layers
        self.dtype = getattr(torch, precision.torch_dtype)
        width = -(-context // _BLOCK_TOKENS)
        planes = key_value_planes(precision.cache_dtype, kv_heads, dim)
        layout = Layout((CacheGroup(tuple(range(layers)), planes, _BLOCK_TOKENS),))
        cache = KVCache(layout, 1 + sequences * width, torch.device(device))
        randomize(cache)
        self.cache, self.scales = cache.groups[0], cache.scales[0]
        self.table = (1 + torch.randperm(sequences * width)).view(sequences, width).int().to(device)
        self.multiprocessors = (
            torch.cuda.get_device_properties(0).multi_processor_count
            if device == "cuda"
            else _MULTIPROCESSORS
        )

    def measure(
        self, several: list[int], *, exact: bool = False, tunings: Sequence[AttentionTuning] = ()
    ) -> Iterator[dict[str, Any]]:
        """A line for each kernel, number of rows and tuning, the plain one first."""
        from triton.runtime.errors import OutOfResources

        plain = 0.0
        for rows, kernel, per_item, tuning in self._launches(several, exact, tunings):
            try:
                us = self._microseconds(rows, kernel, per_item, tuning)
            except OutOfResources:  # more shared memory or registers than this GPU has
                continue
            plain = plain or us
            by = {} if tuning is None else asdict(tuning)
            yield self.case | {
                "kernel": kernel, "rows": rows, "per_item": per_item, **by, "us": round(us, 2),
                "of_plain": round(us / plain, 3),
            }  # fmt: skip

    def _launches(
        self, several: list[int], exact: bool, tunings: Sequence[AttentionTuning]
    ) -> Iterator[tuple[int, str, int, AttentionTuning | None]]:
        """(rows a sequence, kernel, rows an item, tuning; None: the worker's) of each line."""
        from baton.engine.kernels.gpu.attention.items import rows_per_item

        yield 1, "plain", 1, None
        for rows in several:
            yield rows, "rows", rows_per_item(self.heads, rows), None
            if exact:
                yield rows, "single", 1, None
            for per_item in (2, 4, 8) if rows > 1 else ():
                yield from ((rows, "rows", per_item, tuning) for tuning in tunings)

    def _microseconds(self, rows: int, kernel: str, per_item: int, tuning: AttentionTuning | None) -> float:
        """Duration of a layer."""
        from baton.engine.kernels.gpu.attention.items import AttentionTuning, SplitPolicy
        from bench.decode.timing import microseconds

        quantised, slots, count = self.scales is not None, self.sequences, self.multiprocessors
        if tuning is None and kernel == "rows":
            tuning = AttentionTuning.of_slots(self.heads, slots, per_item, count, quantised)
        elif tuning is None:
            tuning = AttentionTuning.of(self.heads, slots * rows, count, quantised)
        entries = slots * rows if kernel == "single" else slots
        policy = SplitPolicy.filling(count, self.heads.kv_heads, entries, tuning.resident, quantised)
        if self.cut is not None:
            policy = replace(
                policy, wanted=max(1, self.cut[0] * count // self.heads.kv_heads), shortest=self.cut[1]
            )
        inputs = RowInputs(self, rows)
        items = inputs.plan(policy, per_item)
        launch = partial(inputs.launch, items, tuning, writes=kernel == "single")
        return microseconds(launch, self.device) / self.layers


class RowInputs:
    """The rows of a run's step, `rows` of each sequence, and its launches."""

    def __init__(self, run: RowsRun, rows: int) -> None:
        import torch

        heads, device = run.heads, run.device
        depth = torch.arange(rows, dtype=torch.int32).repeat(run.sequences)
        self.run, self.count = run, len(depth)
        self.depth = depth.to(device)
        self.position = (run.context - rows + depth).to(device)
        self.slot = torch.arange(run.sequences, dtype=torch.int32).repeat_interleave(rows).to(device)
        self.total = torch.tensor([self.count], device=device)
        self.wanted = 0
        width = (heads.heads + 2 * heads.kv_heads) * heads.dim
        self.qkv = torch.randn(self.count, width, dtype=run.dtype, device=device)
        self.out = torch.empty(self.count, heads.heads * heads.dim, dtype=run.dtype, device=device)
        angles = torch.rand(self.count, heads.dim // 2, device=device) * 6
        self.rotary = angles.cos(), angles.sin()

    def plan(self, policy: SplitPolicy, per_item: int) -> Items:
        """The list of items, as a step plans it."""
        import torch
        import triton

        from baton.engine.kernels.gpu.attention.items import TILE, Items
        from baton.engine.kernels.gpu.step.plan_items import plan_items
        from baton.engine.kernels.gpu.step.step_kernels import CONTROL_WORDS, ROWS

        heads, device = self.run.heads, torch.device(self.run.device)
        self.wanted = policy.wanted
        most = policy.most_items(self.count, 0)
        items = Items(self.count, most, heads.heads, heads.kv_heads, heads.dim, device, per_item)
        control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=device)
        control[ROWS.value] = self.count
        plan_items[(1,)](
            control, self.slot, self.position, self.depth, items.count, items.items, heads.seen,
            policy.wanted, policy.shortest, policy.wave,
            ROWS_POWER=triton.next_power_of_2(self.count), TILE=TILE, FIXED=0, PER_ITEM=per_item,
        )  # fmt: skip
        return items

    def launch(self, items: Items, tuning: AttentionTuning, *, writes: bool) -> None:
        """All layers' attention; `writes`: after a kernel that writes keys and values."""
        from baton.engine.kernels.gpu.attention.slot_attention import slot_attention
        from baton.engine.kernels.gpu.attention.split_attention import split_attention
        from baton.engine.kernels.gpu.attention.write_kv import write_kv

        run = self.run
        attend = split_attention
        if items.rows_per_item > 1:
            attend = partial(slot_attention, programs=run.sequences + self.wanted)
        for layer in range(run.layers):
            if writes:
                write_kv(
                    self.qkv, run.cache, layer, run.table, self.rotary, self.total, self.slot, self.position,
                    run.heads, tuning=tuning, kv_scales=run.scales,
                )  # fmt: skip
            attend(
                self.out, self.qkv, run.cache, layer, run.table, self.rotary, items, run.heads,
                tuning=tuning, kv_scales=run.scales,
            )  # fmt: skip


def _heads(heads: int, kv_heads: int, dim: int) -> Heads:
    from baton.engine.kernels.gpu.attention.items import Heads

    return Heads(heads, kv_heads, dim, dim**-0.5, 1e-5)
