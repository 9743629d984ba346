"""The sender's end of an ipc link between devices: the host announces pieces, and the device counts those
whose bytes are in the window."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from baton.device.stream import Event
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.protocol.frames import Piece, encode_piece_header
from kvtransfer.transports.ipc.device_gather import DeviceGather
from kvtransfer.transports.ipc.memory import LinkMemory
from kvtransfer.transports.ipc.sender_wire import IpcSenderWire


class IpcDeviceSenderWire(IpcSenderWire):
    """A `DeviceSenderWire`."""

    on_device = True

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

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are put by `put_blocks`")

    def put_blocks(self, piece: Piece, blocks: Sequence[int], after: Event | None = None) -> None:
        if self._closed:
            return
        self._add(encode_piece_header(piece))  # first, so that the receiver prepares meanwhile
        self._gather.reads.put(piece, blocks, after)

    def gather(self) -> None:
        self._gather.reads.enqueue(self._device_failed)

    def keep_warm(self) -> None:
        if self._closed:
            return
        try:
            self._gather.keep_warm()
        except RuntimeError as error:
            self._device_failed(error)

    def _device_failed(self, error: RuntimeError) -> None:
        self._break(BatonError(ErrorKind.UNAVAILABLE, f"the device failed: {error}"))

    def busy_poll(self) -> bool:
        return self._gather.reads.busy or super().busy_poll()

    def gathered_count(self) -> int:
        return self._gather.reads.count()

    def _release_device(self) -> None:
        self._gather.close()
