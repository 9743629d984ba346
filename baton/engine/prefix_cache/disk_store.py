"""Cached blocks on a disk: one file a block, named by its hash, checked by a keyed digest when it is read.

One thread writes and reads. Its jobs go through a bounded queue and results come from `poll`, so the engine's
loop never waits for a disk: blocks that the queue has no room for are dropped. A corrupt file is a miss, and
is deleted. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.block_hash import HASH_BYTES

_MAGIC = b"BATONKV1"
_OWNER = "owner"
_DIGEST_BYTES = 32
# Jobs that may be queued, and the host memory that their blocks may take, approximately.
_QUEUE = 64
_QUEUE_BYTES = 128 * 10**6
_CLOSE_S = 2.0
# The weight of the last read in the moving average.
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class _Job:
    """Writes `data`, or where that is None reads or deletes the file."""

    name: bytes
    data: bytes | None = None
    delete: bool = False


@dataclass(frozen=True, slots=True)
class FinishedRead:
    """A finished read. `data`: None where the file was corrupt, or had not been written."""

    name: bytes
    data: bytes | None


class DiskBlockStore:
    """At most `budget` bytes of blocks in a folder of its own; all calls from the engine's loop."""

    def __init__(
        self, folder: Path, key: bytes, block_bytes: int, budget: int, wake: Callable[[], None]
    ) -> None:
        """`key`: of the digests; files of an owner with another key are deleted. `wake` is called from the
        thread when a result is ready. Raises OSError."""
        self._folder = folder
        self._key = key
        self._block_bytes = block_bytes
        # The most blocks that fit.
        self.room = budget // (block_bytes + len(_MAGIC) + _DIGEST_BYTES)
        self._wake = wake
        # Least recently used first; includes blocks that are being written.
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self._reading: set[bytes] = set()
        self._most_jobs = max(4, min(_QUEUE, _QUEUE_BYTES // block_bytes))
        self._jobs: queue.Queue[_Job | None] = queue.Queue(self._most_jobs)
        self._done: deque[FinishedRead] = deque()
        self.dropped = 0
        self.corrupt = 0
        # Moving average of the seconds to read and check a block; written by the thread.
        self.seconds_each = 0.0
        self._adopt_files()
        self._thread = threading.Thread(target=self._work, name="disk-blocks", daemon=True)
        self._thread.start()

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def hashes(self) -> set[bytes]:
        """The hashes of all blocks that are here or being written."""
        return set(self._names)

    @property
    def accepts(self) -> bool:
        """Whether a block would be written now."""
        return self.room > 0 and self._jobs.qsize() <= self._most_jobs - 2

    def write(self, name: bytes, data: bytes) -> list[bytes]:
        """Queues a block to be written if `accepts`; returns the hashes of blocks lost: those evicted for it,
        or its own where it is not written."""
        if name in self._names:
            self._names.move_to_end(name)
            return []
        if not self.accepts:
            self.dropped += 1
            return [name]
        gone = []
        if len(self._names) >= self.room:
            oldest, _ = self._names.popitem(last=False)
            self._jobs.put_nowait(_Job(oldest, delete=True))
            gone.append(oldest)
        self._names[name] = None
        self._jobs.put_nowait(_Job(name, data))
        return gone

    def request(self, name: bytes) -> bool:
        """Queues a block to be read; False where it is not here, or the queue is full."""
        if name in self._reading:
            return True
        if name not in self._names or self._jobs.full():
            return False
        self._names.move_to_end(name)
        self._reading.add(name)
        self._jobs.put_nowait(_Job(name))
        return True

    def poll(self) -> list[FinishedRead]:
        """Reads that finished since the last call. A block without data is lost."""
        came = []
        while self._done:
            one = self._done.popleft()
            self._reading.discard(one.name)
            if one.data is None and self._names.pop(one.name, one) is None:
                self.corrupt += 1
            came.append(one)
        return came

    def close(self) -> None:
        """Stops the thread; waits a few seconds for queued writes."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _adopt_files(self) -> None:
        """Indexes files of an earlier owner with the same key, the newest as far as there is room."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner, mark = self._folder / _OWNER, hashlib.blake2b(self._key, digest_size=HASH_BYTES).hexdigest()
        mine = owner.is_file() and owner.read_text(encoding="ascii", errors="replace") == mark
        size = len(_MAGIC) + _DIGEST_BYTES + self._block_bytes
        whole = []
        for file in self._folder.glob("*.kv*"):
            if mine and file.suffix == ".kv" and file.stat().st_size == size:
                whole.append((file.stat().st_mtime_ns, file))
            else:
                file.unlink()
        owner.write_text(mark, encoding="ascii")
        for place, (_, file) in enumerate(sorted(whole, reverse=True)):
            name = _name_of(file)
            if name is None or place >= self.room:
                file.unlink()
            else:
                self._names[name] = None
                self._names.move_to_end(name, last=False)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.delete:
                    self._path(job.name).unlink(missing_ok=True)
                elif job.data is not None:
                    self._write_file(job.name, job.data)
                else:
                    begun = time.perf_counter()
                    came = FinishedRead(job.name, self._read(job.name))
                    took = time.perf_counter() - begun
                    self.seconds_each += _WEIGHT * (took - self.seconds_each) if self.seconds_each else took
                    self._finish(came)
            except OSError:  # a disk that is full, or gone: the block is not there
                self._finish(FinishedRead(job.name, None))

    def _finish(self, came: FinishedRead) -> None:
        self._done.append(came)
        self._wake()

    def _write_file(self, name: bytes, data: bytes) -> None:
        """A file appears whole or not at all."""
        path = self._path(name)
        part = path.with_suffix(".kvpart")
        with part.open("wb") as file:
            file.write(_MAGIC)
            file.write(self._digest(name, data))
            file.write(data)
        os.replace(part, path)

    def _read(self, name: bytes) -> bytes | None:
        path = self._path(name)
        whole = path.read_bytes()
        start = len(_MAGIC) + _DIGEST_BYTES
        data = whole[start:]
        if whole[:start] == _MAGIC + self._digest(name, data) and len(data) == self._block_bytes:
            return data
        path.unlink(missing_ok=True)
        return None

    def _digest(self, name: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=self._key, person=name).digest()

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}.kv"


def _name_of(file: Path) -> bytes | None:
    try:
        name = bytes.fromhex(file.stem)
    except ValueError:
        return None
    return name if len(name) == HASH_BYTES else None
