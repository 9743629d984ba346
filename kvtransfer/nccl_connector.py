"""Opens nccl links; the whole of it is drawn in `nccl_links`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from baton.device.nccl_line import Job, NcclLine, Way
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.grpc_connector import GrpcConnector, GrpcSenderWire
from kvtransfer.nccl_gather import NcclDeviceWire
from kvtransfer.nccl_links import GREETING_BYTES, SENDER_RANK, TRANSPORT, NcclLinks, Place, greeting
from kvtransfer.nccl_sender import NcclSenderWire
from kvtransfer.routes import NCCL_SCHEME
from kvtransfer.transport import OutOfReachError


class NcclConnector:
    """Opens links between GPUs."""

    transport = TRANSPORT

    def __init__(
        self, wake: Callable[[], None], links: NcclLinks, blocks: DeviceBlocks | None = None
    ) -> None:
        """`blocks`: on the device of `links`, where it has one."""
        self._wake = wake
        self._links = links
        self._blocks = blocks
        self._control = GrpcConnector(wake)

    def takes(self, address: str) -> bool:
        return address.startswith(NCCL_SCHEME)

    def open(
        self, address: str, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, NcclSenderWire]:
        if self._links.hung:
            raise OutOfReachError(f"no link to {address}: NCCL did not end one of this process in time")
        deadline = time.monotonic() + timeout_s
        response, control = self._control.open(address.removeprefix(NCCL_SCHEME), request, timeout_s)
        try:
            place = self._links.place(response.window_pieces * response.piece_bytes)
            line = self._links.line(response.nccl_id, SENDER_RANK, self._wake)
        except (OSError, ValueError, OutOfReachError) as error:
            control.close()
            raise OutOfReachError(f"no link to {address}: {error}") from error
        within_s = min(self._links.connect_s, deadline - time.monotonic())
        if not _greet(line, place, greeting(response.link_id), control, within_s):
            why = line.broken or "the two ends did not meet in time"
            control.close()
            self._links.end(line, place, why, free=True)
            raise OutOfReachError(f"no link to {address}: {why}")
        ends = self._links, line, place, control, response, self._wake
        if self._blocks is None:
            return response, NcclSenderWire(*ends)
        try:
            return response, NcclDeviceWire(*ends, self._blocks)
        except (OSError, RuntimeError) as error:
            control.close()
            self._links.end(line, place, str(error), free=True)
            raise OutOfReachError(f"no link to {address}: {error}") from error


def _greet(line: NcclLine, place: Place, words: bytes, control: GrpcSenderWire, within_s: float) -> bool:
    """Whether the first bytes have gone over to the receiver."""
    place.write(0, words)
    gone = threading.Event()
    line.add(Job(Way.OUT, place.address, GREETING_BYTES, ended=gone.set))
    deadline = time.monotonic() + within_s
    while not gone.wait(0.005):
        if line.broken is not None or control.broken() is not None or time.monotonic() > deadline:
            return False
    return True
