"""The prefix cache's store of evicted blocks: host memory, and behind that a disk.

    evicted from the device ─▶ host ──least recently used──▶ disk, if there is one with room
    taken by a prompt ◀─────── host ◀──read on demand─────── disk

Blocks that are promoted also stay in the lower tier, so that evicting them again copies nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from baton.engine.memory.blocks import BlockTables
from baton.engine.memory.cached_blocks import Entry
from baton.engine.memory.host_blocks import HostBlocks, Saved
from baton.engine.memory.kv_cache import BlockMemory
from baton.engine.prefix_cache.cache import Stored
from baton.engine.prefix_cache.disk_store import DiskBlockStore

# How many of the oldest blocks are searched for one that is not on disk yet.
_AHEAD = 256
# Bytes that are queued for the disk in an iteration of the loop, or one block if it is larger.
_AHEAD_BYTES = 8 * 10**6


class HostBlockStore:
    """`prefix_cache.BlockStore`, in at most `budget` bytes; all calls from the engine's loop."""

    def __init__(self, cache: BlockMemory, budget: int, disk: DiskBlockStore | None = None) -> None:
        self._host = HostBlocks(cache, budget)
        self._disk = disk
        self._room = self._host.free
        block_bytes = sum(group.block_bytes for group in cache.layout.groups)
        self._ahead_a_turn = max(1, _AHEAD_BYTES // block_bytes)
        # Least recently used first.
        self._saved: OrderedDict[bytes, Saved] = OrderedDict()
        # Those of them that were read from disk and are not in use yet.
        self._from_disk: set[bytes] = set()
        self._lost: list[bytes] = []

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._saved or (self._disk is not None and block_hash in self._disk)

    def hashes(self) -> set[bytes]:
        """The hashes of all blocks that can be loaded."""
        return set(self._saved) | (self._disk.hashes() if self._disk is not None else set())

    @property
    def stored(self) -> Stored:
        """Counts of stored blocks for metrics."""
        if self._disk is None:
            return Stored(len(self._saved))
        disk = self._disk
        return Stored(
            len(self._saved), len(disk), disk.dropped, disk.corrupt, disk.failed, disk.outage is not None
        )

    def put(self, entries: list[Entry]) -> None:
        """Copies, in one batch, blocks that are not here yet; they may be overwritten when this returns."""
        for block_hash, _ in entries:
            if block_hash in self._saved:
                self._saved.move_to_end(block_hash)
        fresh = [entry for entry in entries if entry[0] not in self._saved]
        fresh = fresh[max(0, len(fresh) - self._room) :]
        if not fresh:
            return
        self._make_room(len(fresh))
        saved, copy = self._host.save(tuple(zip(*(blocks for _, blocks in fresh), strict=True)))
        copy.synchronize()
        for place, (block_hash, _) in enumerate(fresh):
            self._saved[block_hash] = Saved(tuple((places[place],) for places in saved))

    def ready(self, hashes: Sequence[bytes]) -> tuple[int, bool]:
        """Returns how many of the first `hashes` are in host memory, and whether those behind are being read
        from disk."""
        here = 0
        while here < len(hashes) and hashes[here] in self._saved:
            self._saved.move_to_end(hashes[here])
            here += 1
        if self._disk is None:
            return here, False
        coming = False
        for block_hash in hashes[here : self._room]:
            if block_hash not in self._saved and not self._disk.request(block_hash):
                break
            coming = True
        return here, coming

    @property
    def seconds_each(self) -> float:
        return 0.0 if self._disk is None else self._disk.seconds_each

    def load(self, hashes: Sequence[bytes], tables: BlockTables) -> list[str]:
        """Copies blocks of `ready` hashes back, in one batch; the tier that each came from."""
        saved = [self._saved[block_hash] for block_hash in hashes]
        places = tuple(tuple(place for (place,) in group) for group in zip(*saved, strict=True))
        self._host.load(Saved(places), tables).synchronize()
        tiers = ["disk" if block_hash in self._from_disk else "host" for block_hash in hashes]
        self._from_disk.difference_update(hashes)
        for block_hash in hashes:
            self._saved.move_to_end(block_hash)
        return tiers

    def poll(self) -> bool:
        """Collects blocks that were read from disk; False where there were none."""
        if self._disk is None:
            return False
        came = self._disk.poll()
        for one in came:
            if one.data is None:
                if one.block_hash not in self:
                    self._lost.append(one.block_hash)
            elif one.block_hash in self._disk and one.block_hash not in self._saved and self._room:
                self._make_room(1)
                self._saved[one.block_hash] = self._host.save_bytes(one.data)
                self._from_disk.add(one.block_hash)
        return self._write_ahead(self._disk) or bool(came)

    def take_lost(self) -> list[bytes]:
        """The hashes of blocks that were in memory or on disk and are lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Lets the disk finish its queue."""
        if self._disk is not None:
            self._disk.close()

    def _make_room(self, count: int) -> None:
        victims = [self._saved.popitem(last=False) for _ in range(count - self._host.free)]
        # Should the disk not take all, then it takes the first blocks of prefixes.
        for block_hash, saved in reversed(victims):
            self._from_disk.discard(block_hash)
            if self._disk is None:
                self._lost.append(block_hash)
            else:
                self._to_disk(self._disk, block_hash, saved)
            self._host.release(saved)

    def _write_ahead(self, disk: DiskBlockStore) -> bool:
        """Writes some of the oldest blocks to disk each iteration once memory is nearly full, since evictions
        come in batches that are too large for a disk. False where none is due."""
        if len(self._saved) <= self._room * 3 // 4 or not disk.accepts:
            return False
        oldest = islice(self._saved.items(), min(_AHEAD, disk.room // 2))
        due = [entry for entry in oldest if entry[0] not in disk][: self._ahead_a_turn]
        written = 0
        while written < len(due) and disk.accepts:
            self._to_disk(disk, *due[written])
            written += 1
        return written > 0

    def _to_disk(self, disk: DiskBlockStore, block_hash: bytes, saved: Saved) -> None:
        """Queues a block for the disk. Blocks that are evicted for it, or itself where the disk refuses it,
        are lost if they are nowhere else."""
        copy = block_hash not in disk and disk.accepts
        for one in disk.write(block_hash, self._host.bytes_of(saved) if copy else b""):
            if one not in self:
                self._lost.append(one)
