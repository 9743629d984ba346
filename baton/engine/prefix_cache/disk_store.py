"""Cached blocks on a disk: one file a block, named by its hash, checked by a keyed digest when it is read.

One thread writes and reads. Its jobs go through a bounded queue and results come from `poll`, so the engine's
loop never waits for a disk: blocks that the queue has no room for are dropped. A corrupt file is a miss, and
is deleted. A disk that fails (it is full, read-only or gone) is not written to until a try after a growing
pause succeeds (`Outage`); what can still be read of it is. Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.engine.prefix_cache.outage import Outage
from baton.model_spec.block_hash import HASH_BYTES

_MAGIC = b"BATONKV1"
_OWNER = "owner"
_DIGEST_BYTES = 32
# Jobs that may be queued, and the host memory that their blocks may take, approximately.
MOST_QUEUED = 64
_QUEUE_BYTES = 128 * 10**6
_CLOSE_S = 2.0
# Errors of a disk, rather than of the folder's name or rights.
_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
# The weight of the last read in the moving average.
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class _Job:
    """Writes `data`, or where that is None reads or deletes the file."""

    block_hash: bytes
    data: bytes | None = None
    delete: bool = False


@dataclass(frozen=True, slots=True)
class FinishedRead:
    """A finished read. `data`: None where the file was corrupt or missing, or could not be read or
    written."""

    block_hash: bytes
    data: bytes | None


@dataclass(frozen=True, slots=True)
class _Failed:
    """A job that the disk has failed. `gone`: with all files; `missing`: of a read, the file alone."""

    job: _Job
    reason: str
    gone: bool
    missing: bool


@dataclass(frozen=True, slots=True)
class _Written:
    """A block that was written while the disk was not in use."""


class DiskBlockStore:
    """Stores at most `budget` bytes of blocks in a folder of its own; all calls come from the engine's
    loop."""

    def __init__(
        self,
        folder: Path,
        key: bytes,
        block_bytes: int,
        budget: int,
        wake: Callable[[], None],
        on_outage: Callable[[str | None], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key`: of the digests; files of an owner with another key are deleted. `wake` is called from the
        thread when a result is ready; `on_outage`, from the loop, with the reason when the disk fails, and
        with None when it works again. `clock`: monotonic seconds, for the pauses between tries.

        Raises OSError where the folder cannot be used, other than for a disk that is full or read-only or has
        an error."""
        self._folder = folder
        self._key = key
        self._mark = hashlib.blake2b(key, digest_size=HASH_BYTES).hexdigest()
        self._block_bytes = block_bytes
        # The most blocks that fit.
        self.room = budget // (block_bytes + len(_MAGIC) + _DIGEST_BYTES)
        self._wake = wake
        # Least recently used first; includes blocks that are being written.
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self._reading: set[bytes] = set()
        self._most_jobs = max(4, min(MOST_QUEUED, _QUEUE_BYTES // block_bytes))
        self._jobs: queue.Queue[_Job | None] = queue.Queue(self._most_jobs)
        self._done: deque[FinishedRead | _Failed | _Written] = deque()
        self._outage = Outage(clock)
        self._on_outage = on_outage
        # Read by the thread: whether the next write is a try whose success is to be reported.
        self._trying = False
        # When the thread has begun the read that it is at, by `time.perf_counter`; None at any other time.
        self._reading_since: float | None = None
        self.dropped = 0
        self.corrupt = 0
        self.failed = 0
        # Moving average of the seconds to read and check a block; written by the thread.
        self._seconds_each = 0.0
        try:
            self._adopt_files()
        except OSError as error:
            if error.errno not in _FAULTS:
                raise
            self._hashes.clear()
            self._fail(error.strerror or "")
        self._thread = threading.Thread(target=self._work, name="disk-blocks", daemon=True)
        self._thread.start()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def hashes(self) -> set[bytes]:
        """The hashes of all blocks that are here or being written."""
        return set(self._hashes)

    @property
    def seconds_each(self) -> float:
        """Recent average seconds to read a block, and at least those that the current read has taken; 0
        before one was read."""
        since = self._reading_since
        return self._seconds_each if since is None else max(self._seconds_each, time.perf_counter() - since)

    @property
    def outage(self) -> str | None:
        """The reason for which the disk is not in use; None while it is."""
        return self._outage.reason

    @property
    def queued(self) -> int:
        """Reads, writes and deletions that the thread has not begun."""
        return self._jobs.qsize()

    @property
    def accepts(self) -> bool:
        """True if a block would be written now."""
        return self.room > 0 and self.queued <= self._most_jobs - 2 and self._outage.may_try

    def write(self, block_hash: bytes, data: bytes) -> list[bytes]:
        """Queues a block to be written if `accepts`; returns the hashes of blocks lost: those evicted for it,
        or its own where it is not written."""
        if block_hash in self._hashes:
            self._hashes.move_to_end(block_hash)
            return []
        if not self.accepts:
            self.dropped += 1
            return [block_hash]
        gone = []
        if len(self._hashes) >= self.room:
            oldest, _ = self._hashes.popitem(last=False)
            self._jobs.put_nowait(_Job(oldest, delete=True))
            gone.append(oldest)
        self._hashes[block_hash] = None
        self._outage.tries()
        self._trying = self.outage is not None
        self._jobs.put_nowait(_Job(block_hash, data))
        return gone

    def request(self, block_hash: bytes) -> bool:
        """Queues a block to be read; False where it is not here, or the queue is full."""
        if block_hash in self._reading:
            return True
        if block_hash not in self._hashes or self._jobs.full():
            return False
        self._hashes.move_to_end(block_hash)
        self._reading.add(block_hash)
        self._jobs.put_nowait(_Job(block_hash))
        return True

    def poll(self) -> list[FinishedRead]:
        """Reads that finished since the last call, and blocks that could not be written. A block without data
        is lost."""
        came = []
        while self._done:
            match self._done.popleft():
                case FinishedRead(block_hash, data) as one:
                    self._reading.discard(block_hash)
                    if data is None and self._forget(block_hash):
                        self.corrupt += 1
                    came.append(one)
                case _Failed() as failed:
                    came += self._handle_failure(failed)
                case _Written():
                    self._outage.worked()
                    self._trying = False
                    self._on_outage(None)
        return came

    def _handle_failure(self, failed: _Failed) -> list[FinishedRead]:
        """Takes the disk out of use; the blocks that are lost."""
        block_hash = failed.job.block_hash
        self._reading.discard(block_hash)
        lost = [] if failed.job.delete else [block_hash]
        known = self._forget(block_hash)
        if failed.missing and not failed.gone:
            self.corrupt += known
        else:
            self.failed += 1
            self._fail(failed.reason)
        if failed.gone:
            lost += self._hashes
            self._hashes.clear()
        return [FinishedRead(one, None) for one in lost]

    def _fail(self, reason: str) -> None:
        worked = self.outage is None
        self._outage.failed(reason)
        if worked:
            self._on_outage(reason)

    def _forget(self, block_hash: bytes) -> bool:
        """Removes a block from the index; False where it was not there."""
        return self._hashes.pop(block_hash, block_hash) is None

    def close(self) -> None:
        """Stops the thread; waits a few seconds for queued writes."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _adopt_files(self) -> None:
        """Indexes files of an earlier owner with the same key, the newest as far as there is room."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = self._folder / _OWNER
        mine = owner.is_file() and owner.read_text(encoding="ascii", errors="replace") == self._mark
        size = len(_MAGIC) + _DIGEST_BYTES + self._block_bytes
        whole = []
        for file in self._folder.glob("*.kv*"):
            if mine and file.suffix == ".kv" and file.stat().st_size == size:
                whole.append((file.stat().st_mtime_ns, file))
            else:
                file.unlink()
        if not mine:
            owner.write_text(self._mark, encoding="ascii")
        for place, (_, file) in enumerate(sorted(whole, reverse=True)):
            block_hash = _hash_of(file)
            if block_hash is None or place >= self.room:
                file.unlink()
            else:
                self._hashes[block_hash] = None
                self._hashes.move_to_end(block_hash, last=False)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.delete:
                    self._path(job.block_hash).unlink(missing_ok=True)
                elif job.data is not None:
                    self._write(job.block_hash, job.data)
                else:
                    self._finish(FinishedRead(job.block_hash, self._timed_read(job.block_hash)))
            except OSError as error:
                missing = isinstance(error, FileNotFoundError) and job.data is None
                self._finish(_Failed(job, error.strerror or "", not self._folder.is_dir(), missing))

    def _write(self, block_hash: bytes, data: bytes) -> None:
        trying = self._trying
        if trying:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self._folder / _OWNER).write_text(self._mark, encoding="ascii")
        self._write_file(block_hash, data)
        if trying:
            self._finish(_Written())

    def _timed_read(self, block_hash: bytes) -> bytes | None:
        begun = self._reading_since = time.perf_counter()
        try:
            data = self._read(block_hash)
        finally:
            self._reading_since = None
        took = time.perf_counter() - begun
        self._seconds_each += _WEIGHT * (took - self._seconds_each) if self._seconds_each else took
        return data

    def _finish(self, came: FinishedRead | _Failed | _Written) -> None:
        self._done.append(came)
        self._wake()

    def _write_file(self, block_hash: bytes, data: bytes) -> None:
        """A file appears whole or not at all."""
        path = self._path(block_hash)
        part = path.with_suffix(".kvpart")
        try:
            with part.open("wb") as file:
                file.write(_MAGIC)
                file.write(self._digest(block_hash, data))
                file.write(data)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _read(self, block_hash: bytes) -> bytes | None:
        path = self._path(block_hash)
        whole = path.read_bytes()
        start = len(_MAGIC) + _DIGEST_BYTES
        data = whole[start:]
        if whole[:start] == _MAGIC + self._digest(block_hash, data) and len(data) == self._block_bytes:
            return data
        path.unlink(missing_ok=True)
        return None

    def _digest(self, block_hash: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=self._key, person=block_hash).digest()

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / f"{block_hash.hex()}.kv"


def _hash_of(file: Path) -> bytes | None:
    try:
        block_hash = bytes.fromhex(file.stem)
    except ValueError:
        return None
    return block_hash if len(block_hash) == HASH_BYTES else None
