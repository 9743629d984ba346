"""Reads a checkpoint's bytes to where its tensors belong, by a few threads at once.

    file ─ pread ─▶ a thread's buffer (pinned) ─ copy engine ─▶ the tensor's place, cast there

Each thread owns one buffer and takes the next piece of the files whenever it is free, so that reading and
copying overlap, and the host holds no more of a checkpoint than the buffers. The threads end with the call.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.device.upload import UploadBuffer
from baton.engine.model.safetensors_file import StoredTensor

PIECE_BYTES = 16 * 2**20
_MOST_READERS = 8
_PROGRESS_S = 0.1

# Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements first:first + count of a stored tensor."""

    stored: StoredTensor
    first: int
    count: int


class _Pieces:
    """The pieces of all tensors in the files' order, for several readers to take one by one. Thread-safe."""

    def __init__(self, tensors: Sequence[StoredTensor], piece_bytes: int) -> None:
        self._rest = self._all(tensors, piece_bytes)
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> _Piece | None:
        with self._lock:
            return None if self._stopped else next(self._rest, None)

    def stop(self) -> None:
        """Makes `take` return None from now on."""
        with self._lock:
            self._stopped = True

    @staticmethod
    def _all(tensors: Sequence[StoredTensor], piece_bytes: int) -> Iterator[_Piece]:
        for stored in tensors:
            step = piece_bytes // stored.dtype.itemsize
            for first in range(0, stored.elements, step):
                yield _Piece(stored, first, min(step, stored.elements - first))


class _Reader:
    """Reads pieces in a thread of its own. `done`: bytes that it has uploaded."""

    def __init__(
        self,
        pieces: _Pieces,
        files: Mapping[Path, int],
        places: Mapping[str, Tensor],
        buffer: UploadBuffer,
    ) -> None:
        self._pieces = pieces
        self._files = files
        self._places = places
        self._buffer = buffer
        self.done = 0

    def run(self) -> None:
        while (piece := self._pieces.take()) is not None:
            stored, itemsize = piece.stored, piece.stored.dtype.itemsize
            length = piece.count * itemsize
            self._fill(stored, stored.offset + piece.first * itemsize, length)
            place = self._places[stored.name].view(-1)[piece.first : piece.first + piece.count]
            self._buffer.put(place, stored.dtype)
            self.done += length

    def _fill(self, stored: StoredTensor, offset: int, length: int) -> None:
        filled = 0
        while filled < length:
            rest = self._buffer.bytes[filled:length]
            try:
                count = os.preadv(self._files[stored.path], [rest], offset + filled)
            except OSError as error:
                raise stored.error(f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise stored.error("is cut off: the file has become shorter")
            filled += count


def read_tensors(
    tensors: Sequence[StoredTensor],
    places: Mapping[str, Tensor],
    device: torch.device,
    progress: Progress,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Fills the place of each tensor: a contiguous one of its shape, on `device`, of any dtype.

    `progress` is called from this thread. Raises BatonError(INVALID) naming file and tensor that cannot be
    read.
    """
    pieces = _Pieces(tensors, piece_bytes)
    count = min(_MOST_READERS, len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for stored in tensors:
            if stored.path not in files:
                files[stored.path] = _open(stored)
                stack.callback(os.close, files[stored.path])
        readers = [_Reader(pieces, files, places, UploadBuffer(piece_bytes, device)) for _ in range(count)]
        executor = stack.enter_context(ThreadPoolExecutor(count, "weights"))
        stack.callback(pieces.stop)  # before the executor waits for its threads
        futures = [executor.submit(reader.run) for reader in readers]
        _wait(futures, readers, sum(stored.nbytes for stored in tensors), progress)


def _wait(futures: list[Future[None]], readers: list[_Reader], total: int, progress: Progress) -> None:
    """Waits until all have ended; raises the error of the first that fails."""
    while True:
        ended, running = wait(futures, _PROGRESS_S, FIRST_EXCEPTION)
        for future in ended:
            future.result()
        progress(sum(reader.done for reader in readers), total)
        if not running:
            return


def _open(stored: StoredTensor) -> int:
    try:
        return os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise stored.error(f"cannot be read: {error.strerror}") from error
