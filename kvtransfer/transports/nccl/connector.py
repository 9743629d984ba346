"""Opens nccl links; the whole of it is drawn in `nccl_links`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from baton.addresses import split_address
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.link.frame_queue import CONTROL_FRAMES
from kvtransfer.link.interfaces import OutOfReachError
from kvtransfer.protocol.addresses import NCCL_SCHEME
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.connector import GrpcConnector, GrpcSenderWire
from kvtransfer.transports.nccl.endpoint import SENDER_RANK, TRANSPORT, NcclLinks
from kvtransfer.transports.nccl.frame_acceptor import bring
from kvtransfer.transports.nccl.frame_socket import FrameSocket
from kvtransfer.transports.nccl.sender_wire import NcclSenderWire

_LOOK_S = 0.002


class NcclConnector:
    """Opens links between GPUs."""

    transport = TRANSPORT

    def __init__(
        self,
        wake: Callable[[], None],
        links: NcclLinks,
        blocks: DeviceBlocks,
        auth: LinkAuth | None = None,
    ) -> None:
        """`blocks`: on the device of `links`."""
        self._wake = wake
        self._links = links
        self._blocks = blocks
        self._auth = auth or LinkAuth()
        self._lifelines = GrpcConnector(wake, self._auth)

    def takes(self, address: str) -> bool:
        return address.startswith(NCCL_SCHEME)

    def open(
        self, address: str, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, NcclSenderWire]:
        if self._links.hung:
            raise OutOfReachError(f"no link to {address}: NCCL did not end one of this process in time")
        deadline = time.monotonic() + timeout_s
        listener = address.removeprefix(NCCL_SCHEME)
        response, lifeline = self._lifelines.open(listener, request, timeout_s)
        with ExitStack() as undo:
            undo.callback(lifeline.close)
            try:
                host, _ = split_address(listener)
                wire = self._open(host, response, lifeline, deadline, undo)
            except (OSError, RuntimeError, ValueError, OutOfReachError) as error:
                raise OutOfReachError(f"no link to {address}: {error}") from error
            undo.pop_all()
        return response, wire

    def _open(
        self,
        host: str,
        response: OpenLinkResponse,
        lifeline: GrpcSenderWire,
        deadline: float,
        undo: ExitStack,
    ) -> NcclSenderWire:
        """`undo` has what is to be called should a later step fail."""
        pieces, left_s = response.window_pieces, max(0.001, deadline - time.monotonic())
        sock = bring(host, response.frames_port, self._auth.frames_secret(response.nccl_id), left_s)
        frames = FrameSocket(sock, pieces + CONTROL_FRAMES, self._wake, "receiver")
        undo.callback(frames.close)
        channel = self._links.channel(response.nccl_id, SENDER_RANK, self._wake)
        undo.callback(lambda: self._links.end(channel, "no link came of it"))
        staging = self._links.staging(pieces, response.piece_bytes)
        undo.callback(lambda: self._links.end(channel, "no link came of it", staging.free))
        until = min(deadline, time.monotonic() + self._links.connect_s)
        while not channel.connected:
            if channel.failure is not None or lifeline.broken() is not None or time.monotonic() > until:
                raise OutOfReachError(channel.failure or "the two ends did not meet in time")
            time.sleep(_LOOK_S)
        return NcclSenderWire(self._links, channel, staging, lifeline, frames, response, self._blocks)
