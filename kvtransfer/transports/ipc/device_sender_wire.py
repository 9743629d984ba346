"""The sender's end of an ipc link between devices: the host announces pieces, the device counts those whose
bytes are there."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence

from baton.device.stream import Event
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.protocol.frames import Piece, encode_piece_header
from kvtransfer.transports.ipc.device_gather import DeviceGather
from kvtransfer.transports.ipc.memory import LinkMemory
from kvtransfer.transports.ipc.sender_wire import IpcSenderWire


class IpcDeviceWire(IpcSenderWire):
    """A `GatheringWire`."""

    def __init__(
        self,
        sock: socket.socket,
        memory: LinkMemory,
        response: OpenLinkResponse,
        wake: Callable[[], None],
        gather: DeviceGather,
    ) -> None:
        super().__init__(sock, memory, response, wake, between_devices=True)
        self._gather = gather
        self._put: deque[tuple[Piece, Sequence[int], Event | None]] = deque()

    @property
    def gathers(self) -> bool:
        return True

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are put by their numbers")

    def put_blocks(self, piece: Piece, blocks: Sequence[int], after: Event | None = None) -> None:
        if self._closed:
            return
        self._add(self.header(piece))  # the other end makes ready while we speak to the device
        self._put.append((piece, blocks, after))

    def gather(self) -> None:
        while self._put:
            piece, blocks, after = self._put.popleft()
            try:
                self._gather.gather(piece, blocks, after)
            except RuntimeError as error:  # CUDA's, torch's
                self._break(BatonError(ErrorKind.UNAVAILABLE, f"the device refuses: {error}"))

    def header(self, piece: Piece) -> bytes:
        """What announces a piece."""
        return encode_piece_header(piece)

    def keep_awake(self) -> None:
        if self._closed:
            return
        try:
            self._gather.keep_awake()
        except RuntimeError as error:  # CUDA's
            self._break(BatonError(ErrorKind.UNAVAILABLE, f"the device refuses: {error}"))

    def restless(self) -> bool:
        return self._gather.busy or super().restless()

    def gathered(self) -> int:
        return self._gather.gathered()

    def _let_go(self) -> None:
        self._gather.close()
