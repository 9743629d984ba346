"""The expected result of a layer's prompt attention, computed a row at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.reference.kv_codes import restore
from baton.engine.prefill.attention_plan import Span
from tests.engine.split_reference import quantised_cache


@dataclass(frozen=True, slots=True)
class PromptCase:
    """Packed chunks (first position, rows) of as many sequences, whose keys and values are in `cache`."""

    heads: Heads
    chunks: list[tuple[int, int]]
    qkv: Tensor
    cache: Tensor
    tables: Tensor
    rotary: tuple[Tensor, Tensor]
    row_sequence: Tensor
    row_position: Tensor
    kv_scales: Tensor | None = None

    @classmethod
    def random(
        cls,
        heads: Heads,
        chunks: list[tuple[int, int]],
        *,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> PromptCase:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        width = max(first + rows for first, rows in chunks) // block_tokens + 1
        rows = sum(rows for _, rows in chunks)
        order = 1 + torch.randperm(len(chunks) * width, generator=generator, device=device)
        angles = torch.rand(rows, heads.dim // 2, generator=generator, device=device) * 6
        return cls(
            heads=heads,
            chunks=chunks,
            qkv=normal(rows, (heads.heads + 2 * heads.kv_heads) * heads.dim),
            cache=normal(1 + len(chunks) * width, 2, 2, heads.kv_heads, block_tokens, heads.dim),
            tables=order.view(len(chunks), width).int(),
            rotary=(angles.cos(), angles.sin()),
            row_sequence=ints([s for s, (_, rows) in enumerate(chunks) for _ in range(rows)]),
            row_position=ints([p for first, rows in chunks for p in range(first, first + rows)]),
        )

    def quantised(self) -> PromptCase:
        """The same with a cache of codes, and without rotation, so that all kernels round the same keys."""
        cache, scales = quantised_cache(self.cache)
        still = tuple(torch.full_like(table, value) for table, value in zip(self.rotary, (1, 0), strict=True))
        return replace(self, cache=cache, kv_scales=scales, rotary=(still[0], still[1]))

    def spans(self) -> list[Span]:
        """Each chunk with all keys up to its end."""
        found, row = [], 0
        for table, (first, rows) in enumerate(self.chunks):
            found.append(Span(row, rows, first, 0, first + rows, table))
            row += rows
        return found

    def cached(self, layer: int, table: int, tokens: int) -> Tensor:
        """[2, kv heads, tokens, dim] of a sequence's first tokens."""
        block_tokens = self.cache.shape[4]
        blocks = self.tables[table, : -(-tokens // block_tokens)].long()
        if self.kv_scales is None:
            found = self.cache[blocks, layer]
        else:
            codes = self.cache.view(torch.uint8)[blocks, layer].view(torch.float8_e4m3fn)
            found = restore(codes, self.kv_scales[blocks, layer].movedim(-1, 1), torch.float32)
        run = found.permute(1, 2, 0, 3, 4)  # planes, heads, blocks, tokens, dim
        return run.reshape(2, self.heads.kv_heads, -1, self.heads.dim)[:, :, :tokens]

    def expected(self, layer: int, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """→ out [N, heads · dim] and lse [heads, N] float64; rows of no span are nan."""
        heads, dim = self.heads.heads, self.heads.dim
        out = torch.full((self.qkv.shape[0], heads, dim), math.nan, dtype=torch.float64)
        lse = torch.full((heads, self.qkv.shape[0]), math.nan, dtype=torch.float64)
        group = heads // self.heads.kv_heads
        for span in spans:
            run = self.cached(layer, span.table, span.end).double().cpu()
            keys, values = (plane.repeat_interleave(group, 0) for plane in run)
            for row in range(span.rows):
                at = span.position + row
                first = max(span.begin, at + 1 - (self.heads.window or at + 1))
                last = min(span.end, at + 1)
                query = self.qkv[span.row + row].view(-1, dim)[:heads].double().cpu()
                scores = torch.einsum("hd,htd->ht", query, keys[:, first:last]) * self.heads.scale
                lse[:, span.row + row] = scores.logsumexp(-1)
                out[span.row + row] = torch.einsum("ht,htd->hd", scores.softmax(-1), values[:, first:last])
        return out.view(-1, heads * dim), lse
