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
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
# A stored tensor, the first of its elements, and how many.
_Piece = tuple[StoredTensor, int, int]


class _Reading:
    """What the threads of one call share: the pieces that are left, and the bytes that are in place."""

    def __init__(
        self, tensors: Sequence[StoredTensor], places: Mapping[str, Tensor], piece_bytes: int
    ) -> None:
        self._rest = _pieces(tensors, piece_bytes)
        self._places = places
        self._lock = threading.Lock()
        self.done = 0

    def run(self, files: Mapping[Path, int], buffer: UploadBuffer) -> None:
        """Reads pieces by the calling thread until none is left; `buffer` is its own."""
        while (piece := self._take()) is not None:
            stored, first, count = piece
            length = count * stored.dtype.itemsize
            offset = stored.offset + first * stored.dtype.itemsize
            _fill(buffer.bytes[:length], stored, files[stored.path], offset)
            buffer.put(self._places[stored.name].view(-1)[first : first + count], stored.dtype)
            with self._lock:
                self.done += length

    def stop(self) -> None:
        """No thread takes another piece."""
        with self._lock:
            self._rest = iter(())

    def _take(self) -> _Piece | None:
        with self._lock:
            return next(self._rest, None)


def _pieces(tensors: Sequence[StoredTensor], piece_bytes: int) -> Iterator[_Piece]:
    """All of the tensors, in the files' order."""
    for stored in tensors:
        step = piece_bytes // stored.dtype.itemsize
        for first in range(0, stored.elements, step):
            yield stored, first, min(step, stored.elements - first)


def _fill(buffer: memoryview, stored: StoredTensor, file: int, offset: int) -> None:
    filled = 0
    while filled < len(buffer):
        try:
            count = os.preadv(file, [buffer[filled:]], offset + filled)
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
    reading = _Reading(tensors, places, piece_bytes)
    count = min(_MOST_READERS, len(os.sched_getaffinity(0)))
    total = sum(stored.nbytes for stored in tensors)
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for stored in tensors:
            if stored.path not in files:
                files[stored.path] = _open(stored)
                stack.callback(os.close, files[stored.path])
        buffers = [UploadBuffer(piece_bytes, device) for _ in range(count)]
        executor = stack.enter_context(ThreadPoolExecutor(count, "weights"))
        stack.callback(reading.stop)  # before the executor waits for its threads
        running = {executor.submit(reading.run, files, buffer) for buffer in buffers}
        while running:
            ended, running = wait(running, _PROGRESS_S, FIRST_EXCEPTION)
            for future in ended:
                future.result()
            progress(reading.done, total)


def _open(stored: StoredTensor) -> int:
    try:
        return os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise stored.error(f"cannot be read: {error.strerror}") from error
