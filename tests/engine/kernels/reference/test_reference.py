from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.reference.cache_write import cache_write, token_rows
from baton.engine.kernels.reference.linear import linear
from baton.engine.kernels.reference.paged_attention import (
    paged_attention,
    plan_attention,
    softmax_in_lanes,
    tiled_softmax,
)
from baton.engine.kernels.reference.row_ops import gated, rms_norm
from baton.engine.memory.kv_cache import KVCache
from baton.model_spec.layout import CacheGroup, Layout, Plane

TOLERANCE = {torch.float64: 3e-7, torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (17, 96), (33, 3, 80)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], seed=1, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_is_silu_times_up_wherever_a_row_stands(dtype: torch.dtype) -> None:
    x = noise(37, 2 * 51, dtype=dtype) * 4
    result = gated(x, Epilogue.SWIGLU)
    gate, up = x.double().chunk(2, dim=-1)
    close(result, torch.nn.functional.silu(gate) * up)
    for start, end in ((0, 1), (5, 6), (3, 20), (36, 37)):
        assert torch.equal(gated(x[start:end].clone(), Epilogue.SWIGLU), result[start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(13, 3), (64, 48), (80, 320), (131, 7), (192, 513)])
def test_linear_rows_do_not_depend_on_count_or_place(inner: int, outer: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        noise(53, inner, dtype=dtype),
        noise(outer, inner, seed=1, dtype=dtype),
        noise(outer, seed=2),
    )
    for with_bias in (None, bias.to(dtype)):
        result = linear(x, weight, with_bias)
        exact = x.double() @ weight.double().t() + (0 if with_bias is None else with_bias.double())
        torch.testing.assert_close(
            result.double(), exact, atol=0.2 if dtype is torch.bfloat16 else 1e-4, rtol=1e-2
        )
        order = torch.randperm(53, generator=torch.Generator().manual_seed(4))
        assert torch.equal(linear(x[order], weight, with_bias), result[order])
        for start, end in ((0, 1), (7, 8), (11, 30), (52, 53)):
            assert torch.equal(linear(x[start:end], weight, with_bias), result[start:end])
        broken = x.clone()
        broken[20] = torch.nan
        others = torch.arange(53) != 20
        assert torch.equal(linear(broken, weight, with_bias)[others], result[others])


@pytest.mark.parametrize("softmax", [tiled_softmax, softmax_in_lanes])
def test_masked_tiles_change_no_bit_of_a_softmax(softmax: object) -> None:
    assert callable(softmax)
    for seed in range(40):
        tiles = 1 + seed % 9
        scores = noise(6, tiles * 64, seed=seed) * 4
        scores[:, 64 * tiles - seed :] = -torch.inf
        result = softmax(scores.clone())
        close(result, scores.double().softmax(-1))
        for before, after in itertools.product((0, 1, 3), (0, 2, 17)):
            padded = torch.nn.functional.pad(scores, (64 * before, 64 * after), value=-torch.inf)
            inner = softmax(padded)[:, 64 * before : 64 * (before + tiles)]
            assert torch.equal(inner, result)
        assert torch.equal(softmax(scores[2:3].clone()), result[2:3])


class Paged:
    """A cache of one group with random contents for two sequences, and the same contents unpaged."""

    def __init__(
        self, heads: int, dim: int, block_tokens: int, window: int | None, dtype: torch.dtype
    ) -> None:
        planes = tuple(Plane(name, str(dtype).removeprefix("torch."), heads, dim) for name in "kv")
        layout = Layout((CacheGroup((0, 1), planes, block_tokens, window),))
        self.length, self.window = 200, window
        blocks = -(-self.length // block_tokens)
        self.group = KVCache(layout, 1 + 2 * blocks, "cpu").groups[0]
        self.tables = 1 + torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(1)).view(
            2, blocks
        )
        self.keys, self.values = (noise(2, self.length, heads, dim, seed=s, dtype=dtype) for s in (2, 3))
        for sequence in range(2):
            rows = token_rows(self.group, self.tables[sequence], torch.arange(self.length))
            cache_write(self.group, 1, self.keys[sequence], self.values[sequence], rows)

    def naive(self, query: Tensor, sequence: int, position: int, scale: float) -> Tensor:
        first = 0 if self.window is None else max(0, position - self.window + 1)
        repeat = query.shape[0] // self.keys.shape[2]
        keys, values = (
            part[sequence, first : position + 1].double().repeat_interleave(repeat, dim=1)
            for part in (self.keys, self.values)
        )
        weights = (torch.einsum("hd,thd->ht", query.double(), keys) * scale).softmax(-1)
        return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "dim", "window"), [(2, 32, None), (3, 10, None), (1, 6, 40), (2, 80, 16), (2, 16, 70)]
)
def test_paged_attention_rows_do_not_depend_on_place_or_company(
    kv_heads: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    heads, paged = 3 * kv_heads, Paged(kv_heads, dim, 16, window, dtype)
    positions = torch.arange(100, 190)
    query = noise(90, heads, dim, dtype=dtype)

    def attend(start: int, end: int) -> Tensor:
        plan = plan_attention([0, end - start], positions[start:end], paged.tables[:1], paged.group, window)
        return paged_attention(query[start:end], paged.group, 1, plan, dim**-0.5)

    whole = attend(0, 90)
    for start, end in ((0, 1), (1, 2), (2, 3), (3, 4), (57, 58), (1, 90), (30, 33), (63, 70)):
        assert torch.equal(attend(start, end), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_tokens", "window"),
    [(4, 2, 32, 16, None), (3, 3, 80, 7, None), (6, 3, 16, 64, 16), (8, 1, 24, 128, 1), (2, 2, 10, 5, 100)],
)
def test_paged_attention_equals_naive(
    heads: int, kv_heads: int, dim: int, block_tokens: int, window: int | None, dtype: torch.dtype
) -> None:
    paged = Paged(kv_heads, dim, block_tokens, window, dtype)
    # Sequence 1 a chunk, then nothing, then sequence 0 a single step.
    positions = torch.cat((torch.arange(120, 131), torch.tensor([199])))
    starts, tables = [0, 11, 11, 12], paged.tables[[1, 0, 0]]
    query = noise(12, heads, dim, seed=5, dtype=dtype)
    plan = plan_attention(starts, positions, tables, paged.group, window)
    result = paged_attention(query, paged.group, 1, plan, dim**-0.5)
    for row, position in enumerate(positions.tolist()):
        close(result[row], paged.naive(query[row], int(row < 11), position, dim**-0.5))


def test_many_tiles_are_computed_in_bounded_batches() -> None:
    paged = Paged(1, 8, 16, None, torch.float64)
    count = 190
    positions = torch.arange(count).repeat(12)
    starts = [count * i for i in range(13)]
    plan = plan_attention(starts, positions, paged.tables[[0] * 12], paged.group, None)
    assert len(plan) > 1
    assert all(batch.visible.shape[0] * batch.visible.shape[1] <= 512 for batch in plan)
    query = noise(count, 1, 8, dtype=torch.float64)
    result = paged_attention(query.repeat(12, 1, 1), paged.group, 1, plan, 1.0)
    assert torch.equal(result, result[:count].repeat(12, 1, 1))
    close(result[77], paged.naive(query[77], 0, 77, 1.0))


def test_cache_write_fills_the_block_as_laid_out() -> None:
    paged = Paged(3, 8, 16, None, torch.float32)
    block = paged.group[paged.tables[1, 2]]
    assert torch.equal(block[1, 0], paged.keys[1, 32:48].transpose(0, 1))
    assert torch.equal(block[1, 1], paged.values[1, 32:48].transpose(0, 1))
    assert not block[0].any()
    assert not paged.group[0].any()


def test_block_bytes_view_is_the_block() -> None:
    layout = Layout((CacheGroup((0,), (Plane("k", "bfloat16", 2, 4), Plane("v", "bfloat16", 2, 4)), 8),))
    cache = KVCache(layout, 3, "cpu")
    view = cache.block(0, 2)
    assert view.shape == (layout.groups[0].block_bytes,)
    view.fill_(0x3F)
    assert cache.groups[0][2].all()
    assert not cache.groups[0][:2].any()
