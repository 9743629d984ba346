"""Blocks behind the device: what comes back is what went out, and what is lost is reported."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from baton.engine.memory.kv_cache import KVCache
from baton.engine.prefix_cache.disk_store import DiskBlockStore
from baton.engine.prefix_cache.host_store import HostBlockStore
from baton.model_spec.layout import CacheGroup, Layout, Plane

# Two groups of unlike blocks: 2 * 4 * 8 and 3 * 4 * 8 floats.
LAYOUT = Layout(
    (
        CacheGroup((0,), (Plane("k", "float32", 2, 8), Plane("v", "float32", 2, 8)), 4),
        CacheGroup((1, 2, 3), (Plane("k", "float32", 1, 8),), 4, window=8),
    )
)
BLOCK_BYTES = sum(group.block_bytes for group in LAYOUT.groups)
BLOCKS = 12


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Case:
    """A device full of random blocks, number i named i, and what is behind it."""

    def __init__(self, room: int, disk: Path | None = None, disk_room: int = 100) -> None:
        self.cache = KVCache(LAYOUT, BLOCKS, "cpu")
        draw = torch.Generator().manual_seed(3)
        for group in self.cache.groups:
            group.copy_(torch.rand(group.shape, generator=draw))
        self.truth = [group.clone() for group in self.cache.groups]
        budget = disk_room * (BLOCK_BYTES + 40)
        self.behind = DiskBlockStore(disk, b"k" * 16, BLOCK_BYTES, budget, lambda: None) if disk else None
        self.store = HostBlockStore(self.cache, room * BLOCK_BYTES, self.behind)
        self._lost: list[int] = []

    @property
    def lost(self) -> list[int]:
        """All blocks that the store has lost so far."""
        self._lost += [int.from_bytes(one, "little") for one in self.store.take_lost()]
        return self._lost

    def put(self, *numbers: int) -> None:
        """The groups have it in blocks of their own."""
        self.store.put([(name(n), (n, BLOCKS - n)) for n in numbers])

    def wait_for_disk(self) -> None:
        """Waits until the disk has done all requested work."""
        assert self.behind is not None
        while self.store.poll() or self.behind.queued:
            time.sleep(0.001)
        time.sleep(0.02)  # what it took from the queue last
        self.store.poll()

    def comes_back(self, *numbers: int) -> bool:
        """Loads blocks to other places; whether they are bit for bit what they were."""
        names = [name(n) for n in numbers]
        assert self.store.ready(names)[0] == len(names)
        for group in self.cache.groups:
            group.zero_()
        places = tuple(range(1, 1 + len(numbers)))
        self.store.load(names, (places, places))
        first, second = (
            [torch.equal(self.cache.groups[g][place], self.truth[g][source]) for place, source in pairs]
            for g, pairs in enumerate(
                (
                    list(zip(places, numbers, strict=True)),
                    [(place, BLOCKS - n) for place, n in zip(places, numbers, strict=True)],
                )
            )
        )
        return all(first) and all(second)


def test_what_went_out_comes_back_bit_for_bit() -> None:
    case = Case(room=4)
    case.put(1, 2, 3)
    assert case.comes_back(3, 1, 2)
    assert case.lost == []


def test_a_full_memory_evicts_the_oldest_and_reports_it() -> None:
    case = Case(room=3)
    case.put(1, 2, 3)
    case.put(1)  # it was used again: nothing is copied, and it is the youngest
    case.put(4)
    assert case.lost == [2]
    assert case.store.hashes() == {name(n) for n in (1, 3, 4)}
    case.put(5, 6, 7, 8)  # more than there is room for: the last ones stay
    assert case.store.hashes() == {name(n) for n in (6, 7, 8)}
    assert sorted(case.lost) == [1, 2, 3, 4]  # 5 too was not kept, as its caller can see


def test_without_room_nothing_is_kept() -> None:
    case = Case(room=0)
    case.put(1, 2)
    assert case.store.hashes() == set()
    assert case.store.ready([name(1)]) == (0, False)


def test_the_oldest_are_on_the_disk_before_their_place_is_wanted(tmp_path: Path) -> None:
    case = Case(room=4, disk=tmp_path)
    case.put(1, 2, 3, 4)
    case.wait_for_disk()
    assert len(list(tmp_path.glob("*.kv"))) == 4
    case.put(5, 6, 7)
    assert case.lost == []
    assert case.store.ready([name(1), name(2)]) == (0, True)
    case.wait_for_disk()
    assert case.store.ready([name(1), name(2)])[0] == 2
    assert case.comes_back(1, 2)
    case.store.close()


def test_a_corrupt_file_is_a_loss_and_is_reported(tmp_path: Path) -> None:
    case = Case(room=2, disk=tmp_path)
    case.put(1, 2)
    case.wait_for_disk()
    case.put(3, 4)
    spoilt = tmp_path / f"{name(1).hex()}.kv"
    whole = bytearray(spoilt.read_bytes())
    whole[60] ^= 255
    spoilt.write_bytes(whole)
    assert case.store.ready([name(1)]) == (0, True)
    case.wait_for_disk()
    assert case.store.ready([name(1)]) == (0, False)
    assert case.lost == [1]
    assert case.store.stored.disk_corrupt == 1
    case.store.close()


def test_a_small_disk_is_not_written_for_ever(tmp_path: Path) -> None:
    case = Case(room=8, disk=tmp_path, disk_room=2)
    case.put(1, 2, 3, 4, 5, 6, 7, 8)
    turns = 0
    while case.store.poll():
        turns += 1
        assert turns < 10
    case.store.close()
    assert len(list(tmp_path.glob("*.kv"))) <= 2
