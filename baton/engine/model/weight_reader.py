"""Reads a checkpoint's bytes to where its tensors belong, by a few threads at once.

    file ─ pread ─▶ a thread's buffer (pinned) ─ copy engine ─▶ the tensor's places, cast there

Each thread owns one buffer and takes the next piece of the files whenever it is free, so that reading and
copying overlap, and the host holds no more of a checkpoint than the buffers. The threads end with the call.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.device.streams.upload import UploadBuffer
from baton.engine.model.layers.tensor_spec import TensorPart
from baton.engine.model.safetensors_file import StoredTensor

PIECE_BYTES = 16 * 2**20
_MOST_READERS = 8
_PROGRESS_S = 0.1

# Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]
# A stored tensor, the first of its rows, and how many.
_Piece = tuple[StoredTensor, int, int]


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that takes a part of a stored one, whose rows are single elements where it has one
    dimension."""

    tensor: Tensor
    part: TensorPart

    @classmethod
    def whole(cls, tensor: Tensor) -> Target:
        """Returns a target that takes all of a stored tensor."""
        return cls(tensor, TensorPart((range(tensor.shape[0] if tensor.ndim else 1),)))

    def take(self, piece: Tensor, first: int, copy: Callable[[Tensor, Tensor], None]) -> None:
        """Copies what it takes of `piece` [R, width], the stored rows from `first` on, to its places."""
        columns = self.part.columns or range(piece.shape[1])
        mine, source = self.tensor.view(-1, len(columns)), piece[:, columns.start : columns.stop]
        place = 0
        for run in self.part.rows:
            begin, end = max(run.start, first), min(run.stop, first + len(piece))
            if begin < end:
                there = place + begin - run.start
                copy(source[begin - first : end - first], mine[there : there + end - begin])
            place += len(run)


Targets = Mapping[str, Sequence[Target]]
"""The places that each stored tensor is read to, by its name."""


class _Reading:
    """State that the threads of one call share: the pieces that are left, and the bytes that are in place."""

    def __init__(self, tensors: Sequence[StoredTensor], targets: Targets, piece_bytes: int) -> None:
        self._rest = _pieces(tensors, piece_bytes)
        self._targets = targets
        self._lock = threading.Lock()
        self.done = 0

    def run(self, files: Mapping[Path, int], buffer: UploadBuffer) -> None:
        """Reads pieces by the calling thread until none is left; `buffer` is its own."""
        while (piece := self._take()) is not None:
            stored, first, count = piece
            width = _width(stored)
            length = count * width * stored.dtype.itemsize
            offset = stored.offset + first * width * stored.dtype.itemsize
            _fill(buffer.bytes[:length], stored, files[stored.path], offset)
            read = buffer.view(stored.dtype, count, width)
            for target in self._targets[stored.name]:
                target.take(read, first, buffer.copy)
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
        step = max(1, piece_bytes // _row_bytes(stored))
        rows = stored.nbytes // _row_bytes(stored)
        for first in range(0, rows, step):
            yield stored, first, min(step, rows - first)


def _width(stored: StoredTensor) -> int:
    """Number of elements of a row."""
    return math.prod(stored.shape[1:])


def _row_bytes(stored: StoredTensor) -> int:
    return _width(stored) * stored.dtype.itemsize


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
    targets: Targets,
    device: torch.device,
    progress: Progress,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Reads each tensor once, into all of its targets: contiguous ones, of any dtype, on devices such as
    `device`.

    `progress` is called from this thread. Raises BatonError(INVALID) naming file and tensor that cannot be
    read.
    """
    reading = _Reading(tensors, targets, piece_bytes)
    count = min(_MOST_READERS, len(os.sched_getaffinity(0)))
    total = sum(stored.nbytes for stored in tensors)
    size = max([piece_bytes, *map(_row_bytes, tensors)])
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for stored in tensors:
            if stored.path not in files:
                files[stored.path] = _open(stored)
                stack.callback(os.close, files[stored.path])
        buffers = [UploadBuffer(size, device) for _ in range(count)]
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
