"""What NCCL alone does with as many bytes, for `bench.transfer --transport nccl`: one send of all
of them to a receive that waits for it, by a communicator beside the link's that takes as many
multiprocessors."""

from __future__ import annotations

import torch

from baton.device.cuda_nccl import MAX_CTAS
from baton.device.nccl import Nccl
from bench.cluster.json_lines_process import JsonLinesProcess

_SENDER, _RECEIVER = 0, 1


class RawEnd:
    """One of two ends, which are made at the same time."""

    def __init__(self, unique_id: bytes, size: int, device: str, *, sends: bool) -> None:
        torch.cuda.set_device(torch.device(device))
        self._bytes = torch.full((size,), 7, dtype=torch.uint8, device=device)
        self._where = self._bytes.data_ptr(), size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._peer = _RECEIVER if sends else _SENDER
        self._communicator = Nccl().communicator(
            unique_id, 1 - self._peer, 2, max_ctas=MAX_CTAS, blocking=True
        )
        # The first call of a pair connects the two ends and blocks for the other's: it is made during set-up.
        if sends:
            self.send()
        else:
            self.receive()

    def receive(self) -> None:
        """Enqueues a receive; returns at once."""
        self._communicator.receive(*self._where, self._peer, int(self._stream.cuda_stream))

    def send(self) -> float:
        """The device time in s."""
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record(self._stream)
        self._communicator.send(*self._where, self._peer, int(self._stream.cuda_stream))
        ended.record(self._stream)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    def close(self) -> None:
        self._communicator.abort()


class RawNccl:
    """The sender's end, which asks the receiver's process for the other."""

    def __init__(self, receiver: JsonLinesProcess, size: int, device: str) -> None:
        self._receiver = receiver
        unique_id = Nccl().unique_id()
        receiver.send_command({"raw_id": unique_id.hex(), "size": size})
        self._end = RawEnd(unique_id, size, device, sends=True)
        receiver.receive()

    def seconds(self) -> float:
        self._receiver.call({"raw_receive": True})
        return self._end.send()

    def close(self) -> None:
        self._end.close()
