"""Slots that decode behind one shared prefix: full blocks that all of them read, and blocks of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.device.host_memory import HostMemory
from baton.device.shared_memory import SharedMemory
from baton.engine.decode.gpu_pass import PassOptions
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import Grant, SlotPool
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.executor.reference_decode_loop import ReferenceDecodeLoop
from baton.engine.gemm_dispatch.table import ProductTable
from baton.engine.kernels.gpu.attention.items import SplitPolicy
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel
from baton.engine.model.weights import random_weights
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.output_ring import Finish
from bench.engine_driver import admit, decode_step
from tests.engine.local_engine import CONFIG

BLOCK = 64


@dataclass(frozen=True)
class Shape:
    """`slots` share `shared` full blocks, and each has `own` more. `fixed`: tokens of an attention item."""

    slots: int
    shared: int
    own: int = 1
    fixed: int = 64
    settings: tuple[tuple[str, Any], ...] = ()
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """The number of tokens that a slot's blocks hold."""
        return (self.shared + self.own) * BLOCK


class SharedPrefix:
    """One engine of either kind. What the blocks hold is random, and the same for every engine of a shape."""

    def __init__(self, folder: Path, shape: Shape, *, graph: bool) -> None:
        settings = {**CONFIG, "max_position_embeddings": 2 * shape.tokens, **dict(shape.settings)}
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(settings))
        config = load_config(folder)
        device, dtype = torch.device(shape.device), getattr(torch, shape.dtype)
        layout = config.layout(BLOCK, shape.dtype)
        model = Model(config, random_weights(config, 7, device, dtype), layout, device, Precision.of(dtype))
        cache = KVCache(layout, 1 + shape.shared + shape.slots * shape.own, device)
        generator = torch.Generator().manual_seed(3)
        for group in cache.groups:
            group.copy_(torch.randn(group.shape, generator=generator))
        self._shape, self._vocab = shape, config.vocab_size
        rings = SharedRings(shape.slots)
        self.memory = SharedMemory.create("shared-prefix", rings.size)
        self.reader = rings.reader(self.memory)
        self._slots = SlotPool(shape.slots)
        widths = tuple(group.blocks_for(shape.tokens) for group in layout.groups)
        state = SlotState(shape.slots, widths, config.vocab_size, device)
        self.loop: DecodeLoop
        if graph:
            options = PassOptions(ProductTable.for_gpu("cpu", exact=True), SplitPolicy(fixed=shape.fixed))
            host = HostMemory(self.memory, device)
            self.loop = GraphDecodeLoop(model, cache, state, rings, host, options)
        else:
            box, ring = rings.mailbox(self.memory), rings.writer(self.memory)
            progress = rings.progress(self.memory)
            self.loop = ReferenceDecodeLoop(ReferenceModel(model), cache, state, box, ring, progress)
        self.output: list[list[int]] = [[] for _ in range(shape.slots)]
        self.ended: set[int] = set()

    def admit_all(self, tokens: int) -> None:
        """Admits a sequence to every slot, each to decode `tokens` tokens."""
        for number in range(self._shape.slots):
            self.admit(number, tokens)

    def admit(self, number: int, tokens: int) -> None:
        """The slot decodes `tokens` tokens, from some tokens behind the prefix on, each slot from another."""
        shape = self._shape
        first = 1 + shape.shared + number * shape.own
        blocks = (*range(1, 1 + shape.shared), *range(first, first + shape.own))
        length = shape.shared * BLOCK + 1 + number % 13
        slot, generation = self._slots.grant()
        assert slot == number
        tables = (blocks,) * len(self.loop.state.block_tables)
        admit(
            self.loop,
            Grant(slot, generation, tables, shape.tokens),
            token_ids=[5] * length,
            prompt_length=length,
            last_token=(7 + number) % self._vocab,
            end=length + tokens,
            sampling=SamplingParams(),
            limits=Limits(tokens, (), 0),
        )

    def step(self) -> None:
        """Runs one step to its end."""
        decode_step(self.loop)
        if self._shape.device == "cuda":
            torch.cuda.synchronize()
        for record in self.reader.read():
            self.output[record.slot].append(record.token)
            if record.finish is not Finish.NONE:
                self.ended.add(record.slot)

    @property
    def meeting_places(self) -> list[int]:
        """Counts of attention items that have arrived, for each cache group, all rows together."""
        assert isinstance(self.loop, GraphDecodeLoop)
        return [int(items.arrived.abs().sum()) for items in self.loop.step_state.pass_.inputs.items]
