"""Ranks of different number exchange slices of one cache: every head of every token where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.engine.memory.kv_cache import KVCache
from baton.model_spec.layout import FP8, CacheGroup, Layout, Plane, key_value_planes
from baton.model_spec.split import Split
from kvtransfer.device.reference import Run
from kvtransfer.device.resplit import Common
from kvtransfer.protocol.checksum import PieceChecksum
from tests.kvtransfer.device.test_reference import moved
from tests.kvtransfer.support.kernels import KERNEL
from tests.kvtransfer.support.runs import Place, piece_checksums

HEADS, DIM, TOKENS, LAYERS, BLOCKS = 8, 6, 4, 3, 5
PLANES = tuple(Plane(name, "float16", HEADS, DIM) for name in ("k", "v"))
GROUP = CacheGroup(layers=tuple(range(LAYERS)), planes=PLANES, block_tokens=TOKENS)
# No multiple of a line's words, so pieces end within lines.
PIECE_WORDS = 50


def whole_cache(seed: int) -> Tensor:
    """[block, layer, plane, head, token, dim], as one rank would hold it."""
    shape = (BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def sliced(cache: Tensor, split: Split) -> Tensor:
    heads = split.heads(HEADS)
    return cache[:, :, :, heads.start : heads.stop].contiguous()


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
def test_every_head_arrives(senders: int, receivers: int) -> None:
    check_every_head_arrives("reference", senders, receivers)


@pytest.mark.parametrize("how", [KERNEL])
@pytest.mark.parametrize(
    ("senders", "receivers"),
    [(1, 2), (2, 1), *(pytest.param(*ranks, marks=pytest.mark.slow) for ranks in ((2, 4), (4, 2), (2, 2)))],
)
def test_every_head_arrives_by_kernels(how: str, senders: int, receivers: int) -> None:
    check_every_head_arrives(how, senders, receivers)


def check_every_head_arrives(how: str, senders: int, receivers: int) -> None:
    cache, old = whole_cache(1), whole_cache(2)
    blocks = [(4, 1), (0, 2)]  # sender's and receiver's
    for rank in range(receivers):
        receiver = Split(rank, receivers)
        landed = sliced(old, receiver)
        for other in range(senders):
            sender = Split(other, senders)
            common = Common(GROUP, sender, receiver)
            if common.heads:
                _send(how, common, sliced(cache, sender), landed, blocks)
        expected = sliced(old, receiver)
        for ours, theirs in blocks:
            expected[theirs] = sliced(cache, receiver)[ours]
        assert torch.equal(landed, expected)


def _send(how: str, common: Common, source: Tensor, target: Tensor, blocks: list[tuple[int, int]]) -> None:
    """Gathers into staging and scatters from it; what is summed is the pieces' bytes, on both sides."""
    pieces = -(-common.words // PIECE_WORDS)
    staging = torch.zeros(len(blocks) * common.words * 4, dtype=torch.uint8)
    gathered: list[Run] = []
    scattered: list[Run] = []
    for number, (ours, theirs) in enumerate(blocks):
        at = number * common.words, PIECE_WORDS, number * pieces
        gathered += common.gather(ours, *at)
        scattered += common.scatter(theirs, *at)
    sums = moved(how, source, staging, gathered)
    assert torch.equal(moved(how, staging, target, scattered), sums)

    checksum, places, expected = PieceChecksum(4 * PIECE_WORDS), [], []
    for number in range(len(blocks)):
        packed = staging[number * common.words * 4 :][: common.words * 4].numpy()
        for offset in range(0, common.words * 4, 4 * PIECE_WORDS):
            data = packed[offset : offset + 4 * PIECE_WORDS].data
            places.append(Place(3, 0, number, offset, data.nbytes))
            expected.append(checksum.of(data, 3, 0, number, offset))
    assert piece_checksums(sums, places) == expected


QUANTISED = replace(GROUP, planes=key_value_planes(FP8, HEADS, DIM))


def quantised_cache(seed: int, split: Split) -> KVCache:
    """What `split` holds of a cache of random codes and scales."""
    heads = split.heads(HEADS)
    planes = key_value_planes(FP8, len(heads), DIM)
    cache = KVCache(Layout((replace(GROUP, planes=planes),)), BLOCKS, "cpu")
    generator, here = torch.Generator().manual_seed(seed), slice(heads.start, heads.stop)
    codes = torch.randint(0, 127, (BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM), generator=generator)
    cache.groups[0].view(torch.uint8).copy_(codes[:, :, :, here])
    scales = cache.scales[0]
    assert scales is not None
    scales.copy_(torch.randn(BLOCKS, LAYERS, HEADS, TOKENS, 2, generator=generator)[:, :, here])
    return cache


@pytest.mark.parametrize("how", ["reference", KERNEL])
@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_scales_travel_with_their_heads(how: str, senders: int, receivers: int) -> None:
    blocks = [(4, 1), (0, 2)]
    for rank in range(receivers):
        receiver = Split(rank, receivers)
        landed, expected = (quantised_cache(2, receiver).storage[0] for _ in range(2))
        theirs_whole = quantised_cache(1, receiver).storage[0]
        for other in range(senders):
            common = Common(QUANTISED, Split(other, senders), receiver)
            if common.heads:
                _send(how, common, quantised_cache(1, common.sender).storage[0], landed, blocks)
        for ours, theirs in blocks:
            expected[theirs] = theirs_whole[ours]
        assert torch.equal(landed, expected)


def test_ranks_that_share_no_head_have_nothing_to_send() -> None:
    common = Common(GROUP, Split(0, 2), Split(3, 4))
    assert not common.heads
    assert common.words == 0
    assert common.gather(0, 0, PIECE_WORDS, 0) == []


def test_heads_that_cannot_be_split_evenly() -> None:
    for rank, count in ((0, 3), (2, 2), (-1, 2), (0, 16)):
        with pytest.raises(ValueError, match="cannot have an equal part of 8 heads"):
            Split(rank, count).heads(HEADS)
