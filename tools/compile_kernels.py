"""Compiles the kernels of decode steps for a GPU that this machine lacks, and says what they take.

    PYTHONPATH=. python tools/compile_kernels.py [--capability 90] [--shapes 8B,wide,...]
        [--attention | --experts | --steps] [--json]

Triton and ptxas need no GPU. A step of one layer is launched on a CPU, with each launch compiled in place of
run: with drafts and without, both samplers, in bfloat16 and with a cache in fp8; and attention of several
rows in each tuning that a worker of 132 multiprocessors chooses; and the mixture of a layer in each format,
with the tiles of decode steps and of prompts. One line a kernel: registers, bytes of spilled registers and of
shared memory. Exit status 1 where one does not compile, or takes more shared memory than a multiprocessor
has. With `--attention` attention alone, which takes a few seconds a kernel, with `--experts` the mixture
alone, half a minute, with `--steps` the steps alone; all together take some minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.slot_state import SlotState
from baton.engine.executor.decode_factory import decode_loop
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.forward.layers.experts import ExpertsSpace, run_experts
from baton.engine.kernels.gpu.attention.items import AttentionTuning, Heads, Items, rows_per_item
from baton.engine.kernels.gpu.attention.slot_attention import slot_attention
from baton.engine.kernels.gpu.attention.split_attention import split_attention
from baton.engine.kernels.gpu.attention.write_kv import write_kv
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.model.modules import Model, Precision
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weight_places import weight_places
from baton.engine.model.weights import random_weights
from baton.engine.shared_memory.layout import SharedRings

# Shared memory that a program may have on Hopper.
_MOST_SHARED = 227 << 10
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_SLOTS = (4, 32, 128)
_MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled."""

    name: str
    of: str
    registers: int
    spilled: int
    shared: int
    warps: int


class Compiler:
    """Makes launches compile for a GPU of this capability, and keeps what they take."""

    def __init__(self, capability: int) -> None:
        self.of = ""
        self.found: dict[tuple[str, str], Compiled] = {}
        target = GPUTarget("cuda", capability, 32)
        driver = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
        triton.runtime.driver.set_active(driver)
        compile_ = JITFunction.run

        def run(
            kernel: JITFunction, *args: object, grid: object, warmup: bool = False, **options: object
        ) -> CompiledKernel:
            compiled: CompiledKernel = compile_(kernel, *args, grid=grid, warmup=True, **options)
            key = kernel.fn.__name__, compiled.hash
            if key not in self.found:
                self.found[key] = self._usage(kernel.fn.__name__, compiled)
            return compiled

        JITFunction.run = run

    def _usage(self, name: str, compiled: CompiledKernel) -> Compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            said = subprocess.run(
                [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
        metadata = compiled.metadata
        spilled = numbers["STACK"] + numbers["LOCAL"]
        return Compiled(name, self.of, numbers["REG"], spilled, metadata.shared, metadata.num_warps)


def attention_heads() -> dict[str, Heads]:
    """Shapes of heads that models have."""

    return {
        "8B": Heads(32, 8, 128, 128**-0.5, 1e-5),
        "28 and 4": Heads(28, 4, 128, 128**-0.5, 1e-6),
        "16 a group": Heads(32, 2, 64, 0.125, 1e-6),
        "no groups": Heads(8, 8, 96, 0.1, 1e-6),
        "wide": Heads(8, 4, 256, 1 / 16, 1e-6),
        "window": Heads(32, 8, 128, 0.1, 1e-5, 1024),
    }


def compile_attention(compiler: Compiler, names: list[str]) -> None:
    """Compiles attention of one row and of several, over values of both widths and codes, as it is tuned for
    few slots and for many."""

    for name in names:
        heads = attention_heads()[name]
        for cache in ("bf16", "codes", "fp32"):
            codes = cache == "codes"
            for most in (1, 2, 4, 8):
                per_item = 1 if most == 1 else rows_per_item(heads, most)
                for slots in _SLOTS:
                    if most == 1:
                        tuning = AttentionTuning.of(heads, slots, _MULTIPROCESSORS, codes)
                    else:
                        tuning = AttentionTuning.of_slots(heads, slots, per_item, _MULTIPROCESSORS, codes)
                    compiler.of = f"{name}, {cache}, items of {per_item}, {slots} slots"
                    dtype = torch.float32 if cache == "fp32" else torch.bfloat16
                    _attend(heads, per_item, tuning, dtype, codes=codes)


def _attend(
    heads: Heads, per_item: int, tuning: AttentionTuning, activations: torch.dtype, *, codes: bool
) -> None:
    rows, block = 16, 64
    items = Items(rows, 64, heads.heads, heads.kv_heads, heads.dim, torch.device("cpu"), per_item)
    qkv = torch.zeros(rows, (heads.heads + 2 * heads.kv_heads) * heads.dim, dtype=activations)
    out = torch.zeros(rows, heads.heads * heads.dim, dtype=activations)
    dtype = torch.float8_e4m3fn if codes else activations
    cache = torch.zeros(4, 2, 2, heads.kv_heads, block, heads.dim, dtype=torch.int8 if codes else activations)
    scales = torch.zeros(4, 2, heads.kv_heads, block, 2, dtype=torch.bfloat16) if codes else None
    table, rotary = torch.zeros(8, 64, dtype=torch.int32), (torch.zeros(rows, heads.dim // 2),) * 2
    arguments = qkv, cache.view(dtype), 1, table, rotary
    if per_item == 1:
        split_attention(out, *arguments, items, heads, None, tuning, kv_scales=scales)
        return
    line = torch.zeros(rows, dtype=torch.int32)
    write_kv(*arguments, items.count, line, line, heads, kv_scales=scales)
    slot_attention(out, *arguments, items, heads, None, tuning, kv_scales=scales)


def compile_steps(compiler: Compiler, cache_dtype: str) -> None:
    """Compiles all kernels of steps of one layer of an 8B model's heads, with drafts that are looked up."""

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        config = load_config(Path(folder))
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    layout = config.layout(64, cache_dtype)
    precision = Precision.of(bf16, getattr(torch, cache_dtype))
    model = Model(config, random_weights(config, 1, cpu, bf16), layout, "cpu", precision)
    state = SlotState(8, (16,), config.vocab_size, cpu, 8, 512)
    rings = SharedRings(8, rows_per_slot=8)
    memory = SharedMemory.create("compile", rings.size)
    cache = KVCache(layout, 16, "cpu")
    loop = decode_loop((model,), cache, state, rings, memory, exact=False, interpreted=True)
    assert isinstance(loop, GraphDecodeLoop)
    compiler.of = f"a step, {cache_dtype}"
    for graphs in (*loop.graphs.values(), *loop.draft_graphs.values()):
        graphs.simple()
        graphs.samples()


def compile_experts(compiler: Compiler) -> None:
    """Compiles a mixture of Qwen3-30B-A3B's widths and of Mixtral's, with fewer experts, in each format that
    experts have and in float32, for decode steps and for prompts."""
    cpu, formats = torch.device("cpu"), [None, FORMATS["fp8"], WeightFormat("fp8", 128, 128), FORMATS["int4"]]
    for name, sizes in _MIXTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({**_CONFIG, **sizes}))
            config = load_config(Path(folder))
        for dtype, form in [(torch.float32, None), *((torch.bfloat16, form) for form in formats)]:
            keys = weight_formats(config, "fp8") if form is not None else {}
            mine = {key: form for key in keys if ".experts." in key and form is not None}
            layout = config.layout(64, str(dtype).removeprefix("torch."))
            weights = weight_places(config, cpu, dtype, mine)
            model = Model(config, weights, layout, "cpu", Precision.of(dtype))
            mixture = model.layers[0].mlp
            assert isinstance(mixture, ExpertsMlp)
            for rows in (1, 8, 64, 512):
                space = ExpertsSpace.of(model, rows)
                assert space is not None
                compiler.of = f"{name}, {dtype if form is None else form.name}, passes of {rows} rows"
                run_experts(space, mixture, torch.zeros(rows, config.hidden_size, dtype=dtype))


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MIXTURES = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 8,
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 1792, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def too_large(found: Iterable[Compiled]) -> list[str]:
    """Lists kernels that take more shared memory than there is."""
    return [f"{one.name} ({one.of}): {one.shared} bytes" for one in found if one.shared > _MOST_SHARED]


def main() -> int:
    """1 where a kernel takes more than there is."""
    parser = argparse.ArgumentParser(description="Compiles kernels without a GPU.")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU (default 90: Hopper)")
    parser.add_argument("--shapes", default=",".join(attention_heads()), help="of heads (default: all)")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--attention", action="store_true", help="attention alone")
    alone.add_argument("--experts", action="store_true", help="a mixture of experts alone")
    alone.add_argument("--steps", action="store_true", help="steps alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    compiler = Compiler(arguments.capability)
    everything = not (arguments.attention or arguments.experts or arguments.steps)
    if arguments.attention or everything:
        compile_attention(compiler, arguments.shapes.split(","))
    if arguments.experts or everything:
        compile_experts(compiler)
    if arguments.steps or everything:
        for dtype in ("bfloat16", "float8_e4m3fn"):
            compile_steps(compiler, dtype)
    for one in compiler.found.values():
        if arguments.json:
            print(json.dumps(dataclasses.asdict(one)))
        else:
            took = f"{one.registers:4} registers {one.spilled:5} spilled {one.shared:7} shared"
            print(f"{one.name:24} {took}  {one.of}")
    for problem in (found := too_large(compiler.found.values())):
        print(f"too much shared memory: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
