"""The expected result of one layer's decode attention, from the plain-torch kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels.gpu.attention.items import ITEM_DEPTH, TILE, Heads, Items, SplitPolicy
from baton.engine.kernels.reference.cache_write import cache_write, token_rows
from baton.engine.kernels.reference.kv_codes import quantise
from baton.engine.kernels.reference.paged_attention import paged_attention, plan_attention
from baton.engine.kernels.reference.row_ops import apply_rope, rms_norm
from baton.engine.memory.kv_cache import KVCache
from baton.model_spec.layout import FP8, CacheGroup, Layout, key_value_planes


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One layer's input: rows at `positions` whose slots have block tables in `cache`."""

    heads: Heads
    qkv: Tensor
    cache: Tensor
    table: Tensor
    slots: Tensor
    positions: Tensor
    rotary: tuple[Tensor, Tensor]
    norms: tuple[Tensor, Tensor] | None
    kv_scales: Tensor | None = None

    @classmethod
    def random(
        cls,
        heads: Heads,
        positions: list[int],
        *,
        block_tokens: int = 16,
        layers: int = 2,
        norms: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> AttentionCase:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        width = max(positions) // block_tokens + 1
        rows, slots = len(positions), len(positions) + 2
        order = 1 + torch.randperm(slots * width, generator=generator, device=device)
        angles = torch.rand(rows, heads.dim // 2, generator=generator, device=device) * 6
        return cls(
            heads=heads,
            qkv=normal(rows, (heads.heads + 2 * heads.kv_heads) * heads.dim),
            cache=normal(1 + slots * width, layers, 2, heads.kv_heads, block_tokens, heads.dim),
            table=order.view(slots, width).int(),
            slots=torch.randperm(slots, generator=generator, device=device)[:rows].int(),
            positions=torch.tensor(positions, device=device).int(),
            rotary=(angles.cos(), angles.sin()),
            norms=(normal(heads.dim), normal(heads.dim)) if norms else None,
        )

    @classmethod
    def of_slots(
        cls, heads: Heads, slots: list[tuple[int, int]], *, block_tokens: int = 64, **more: Any
    ) -> AttentionCase:
        """Rows of slots side by side: (position of the first, rows) of each."""
        positions = [position + row for position, rows in slots for row in range(rows)]
        case = cls.random(heads, positions, block_tokens=block_tokens, **more)
        counts = torch.tensor([rows for _, rows in slots], device=case.slots.device)
        return replace(case, slots=case.slots[: len(slots)].repeat_interleave(counts))

    def quantised(self) -> AttentionCase:
        """The same with a cache of codes, and without rotation, so that all kernels round the same keys."""
        cache, scales = quantised_cache(self.cache)
        still = tuple(torch.full_like(table, value) for table, value in zip(self.rotary, (1, 0), strict=True))
        return replace(self, cache=cache, kv_scales=scales, rotary=(still[0], still[1]))

    def expected(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """→ attention's output [rows, heads · dim], and the cache with the rows' keys and values, and its
        scales."""
        heads, rows = self.heads, self.qkv.shape[0]
        joined = self.qkv.view(rows, -1, heads.dim)
        query, key = joined[:, : heads.heads], joined[:, heads.heads : heads.heads + heads.kv_heads]
        value = joined[:, heads.heads + heads.kv_heads :]
        if self.norms is not None:
            query = rms_norm(query, self.norms[0], heads.norm_eps)
            key = rms_norm(key, self.norms[1], heads.norm_eps)
        query, key = apply_rope(query, *self.rotary), apply_rope(key, *self.rotary)
        cache, scales = copied(self.cache, self.kv_scales)
        table = self.table[self.slots.long()].long()
        positions = self.positions.long()
        places = token_rows(cache, table, positions[:, None])[:, 0]
        cache_write(cache, layer, key, value, places, scales)
        plan = plan_attention(list(range(rows + 1)), positions, table, cache, heads.window)
        out = paged_attention(query, cache, layer, plan, heads.scale, scales)
        return out.view(rows, -1), cache, scales


def quantised_cache(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values` [blocks, layers, 2, kv heads, block tokens, dim] as codes and scales of a `KVCache`."""
    blocks, layers, _, heads, tokens, dim = values.shape
    group = CacheGroup(tuple(range(layers)), key_value_planes(FP8, heads, dim), tokens)
    cache = KVCache(Layout((group,)), blocks, values.device)
    codes, scales = quantise(values)
    places = cache.scales[0]
    assert places is not None
    cache.groups[0].copy_(codes)
    places.copy_(scales.movedim(2, -1))
    return cache.groups[0], places


def copied(cache: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A cache group's tensor and scales in memory of their own, laid out alike."""
    if scales is None:
        return cache.clone(), None
    codes, others = quantised_cache(torch.zeros(cache.shape, device=cache.device))
    codes.copy_(cache)
    others.copy_(scales)
    return codes, others


@dataclass(frozen=True, slots=True)
class Item:
    """Tokens begin:end of `rows` rows of a slot, of which `row` is the first."""

    row: int
    begin: int
    end: int
    rows: int = 1


def split_items(
    positions: Sequence[int], window: int | None, policy: SplitPolicy, rows: Sequence[int] | None = None
) -> list[list[Item]]:
    """The items of each row, of which each row's token stands at its position (from 0), or of each run of
    `rows` rows of a slot, of which the first one's does."""
    rows = rows or [1] * len(positions)
    firsts = list(accumulate(rows, initial=0))
    starts = [0 if window is None else max(0, p - window + 1) // TILE * TILE for p in positions]
    spans = [p + count - start for p, count, start in zip(positions, rows, starts, strict=True)]
    if policy.fixed is not None:
        parts = [policy.fixed] * len(spans)
    else:
        about = max(policy.shortest, -(-sum(spans) // policy.wanted))
        rest = len(spans) % policy.wave if len(spans) > policy.wave else 0
        parts = []
        for entry, span in enumerate(spans):
            pieces = -(-span // about)
            if entry >= len(spans) - rest:
                pieces = max(pieces, min(policy.wave // rest, -(-span // policy.shortest)))
            parts.append(_whole_tiles(-(-span // pieces)))
    return [
        [
            Item(row, begin, min(begin + part, start + span), count)
            for begin in range(start, start + span, part)
        ]
        for row, start, span, part, count in zip(firsts, starts, spans, parts, rows, strict=False)
    ]


def _whole_tiles(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


def fill_items(items: Items, planned: list[list[Item]], slots: Tensor, positions: Tensor) -> None:
    """Writes the list of items from the host; in a step its first kernel does. slots, positions: of rows."""
    lines, first = [], 0
    for mine in planned:
        row = mine[0].row
        place = int(slots[row]), int(positions[row])
        of_slot = slots[: row + 1] == slots[row]
        depth = ITEM_DEPTH.value * (int(of_slot.sum()) - 1)
        lines += [[row, *place, item.begin, item.end, first, len(mine), item.rows + depth] for item in mine]
        first += len(mine)
    items.count[0] = len(lines)
    items.items[: len(lines)] = torch.tensor(lines, dtype=torch.int32)
