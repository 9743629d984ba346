"""Blocks as they travel: what is read of one cache and written to another, whole or cut into pieces."""

from __future__ import annotations

import pytest
import torch

from baton.base.errors import BatonError, ErrorKind
from baton.engine.memory.kv_cache import KVCache
from baton.model_spec.layout import CacheGroup, Layout, Plane
from kvtransfer.device.quantise import EightBit, quantise, restore
from kvtransfer.protocol.piece_geometry import PieceGeometry
from services.common.config.transfer import KVWire, TransferConfig
from services.worker.engine.startup.kv_wire_format import WireBlocks, wire_blocks

FINGERPRINT = b"f" * 32
BLOCKS = 3
KINDS: dict[KVWire, EightBit] = {"fp8": EightBit.E4M3, "int8": EightBit.INT8}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cache(dtype: str, seed: int | None = None, dims: tuple[int, ...] = (24,)) -> KVCache:
    """A cache of noise, or of zeros, with a cache group for each dimension."""
    groups = tuple(
        CacheGroup((0, 1), (Plane("k", dtype, 2, dim), Plane("v", dtype, 2, dim)), 4) for dim in dims
    )
    made = KVCache(Layout(groups), BLOCKS, "cpu")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for pool in made.groups:
            pool.copy_(torch.randn(pool.shape, generator=generator, dtype=torch.float32))
    return made


def send(there: WireBlocks, here: WireBlocks, group: int, block: int, most: int) -> int:
    """A block to the next one, piece by piece, the last first; how many pieces."""
    size = there.block_bytes[group]
    assert here.block_bytes == there.block_bytes
    geometry = PieceGeometry.of(there.block_bytes, there.piece_bytes(most))
    offsets = range(0, size, geometry.piece_bytes)
    for offset in reversed(offsets):
        length = geometry.piece_length(group, offset)
        piece = there.read(group, block, offset, length)
        assert piece.nbytes == length
        assert geometry.is_piece(group, offset, length)
        here.write(group, block + 1, offset, memoryview(bytes(piece)))
    return len(offsets)


@pytest.mark.parametrize("most", [10_000, 200, 57])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_arrives_as_quantisation_leaves_it(kind: KVWire, dtype: str, most: int) -> None:
    source, target = cache(dtype, 1), cache(dtype)
    pieces = send(wire_blocks(source, FINGERPRINT, kind), wire_blocks(target, FINGERPRINT, kind), 0, 1, most)
    assert (pieces > 1) == (most < 10_000)
    rows = source.groups[0][1].view(-1, 24)
    expected = restore(*quantise(rows, KINDS[kind]), KINDS[kind], DTYPES[dtype])
    assert torch.equal(target.groups[0][2].view(-1, 24), expected)
    assert not torch.equal(expected, rows)
    assert not target.groups[0][:2].any()


def test_native_blocks_are_unchanged() -> None:
    source, target = cache("float32", 2), cache("float32")
    there, here = (wire_blocks(one, FINGERPRINT, "native") for one in (source, target))
    assert there.block_bytes == (source.groups[0][0].nbytes,)
    assert there.fingerprint == FINGERPRINT
    assert send(there, here, 0, 1, 100) > 1
    assert torch.equal(target.groups[0][2], source.groups[0][1])


def test_a_row_is_its_codes_and_a_scale() -> None:
    source = cache("bfloat16", 3, dims=(24, 8))
    wire = wire_blocks(source, FINGERPRINT, "int8")
    rows = 2 * 2 * 2 * 4  # layers, planes, heads, tokens
    assert wire.block_bytes == (rows * 28, rows * 12)
    assert wire.piece_bytes(200) == 2 * 84  # whole rows of both groups
    with pytest.raises(ValueError, match="split rows"):
        wire.read(0, 1, 0, 30)


def test_different_formats_have_different_fingerprints() -> None:
    kinds: list[KVWire] = ["native", "fp8", "int8"]
    assert len({wire_blocks(cache("float32"), FINGERPRINT, kind).fingerprint for kind in kinds}) == 3


def test_unsupported_dtypes_and_piece_sizes_are_refused() -> None:
    with pytest.raises(BatonError, match="float64") as refused:
        wire_blocks(cache("float64"), FINGERPRINT, "int8")
    assert refused.value.kind is ErrorKind.INVALID
    with pytest.raises(BatonError, match="28 at least"):
        wire_blocks(cache("float32"), FINGERPRINT, "int8").piece_bytes(27)
    with pytest.raises(ValueError, match="through the host"):
        TransferConfig(transport="nccl", kv_wire="fp8")
