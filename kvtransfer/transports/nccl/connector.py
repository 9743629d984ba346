"""Opens nccl links; `endpoint` describes the protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from baton.base.addresses import split_address
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.device.blocks import LinkBlocks
from kvtransfer.link.frame_queue import CONTROL_FRAMES
from kvtransfer.link.interfaces import UnreachableError
from kvtransfer.protocol.addresses import GRPC, NCCL, Endpoint
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.connector import GrpcConnector, GrpcSenderWire
from kvtransfer.transports.grpc.tls import LinkTls
from kvtransfer.transports.nccl.endpoint import SENDER_RANK, NcclEndpoint
from kvtransfer.transports.nccl.frame_acceptor import connect_frames
from kvtransfer.transports.nccl.frame_socket import FrameSocket
from kvtransfer.transports.nccl.sender_wire import NcclSenderWire

_POLL_S = 0.002


class NcclConnector:
    """Opens links between GPUs over NCCL."""

    transport = NCCL

    def __init__(
        self,
        wake: Callable[[], None],
        nccl: NcclEndpoint,
        blocks: LinkBlocks,
        auth: LinkAuth | None = None,
        tls: LinkTls | None = None,
    ) -> None:
        """`blocks`: on the device of `nccl`. `tls`: of the requests and keepalive streams."""
        self._wake = wake
        self._nccl = nccl
        self._blocks = blocks
        self._auth = auth or LinkAuth()
        self._keepalives = GrpcConnector(wake, self._auth, tls)

    def reaches(self, endpoint: Endpoint) -> bool:
        return endpoint.transport == NCCL

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, NcclSenderWire]:
        if self._nccl.hung:
            raise UnreachableError(f"no link to {endpoint}: NCCL did not abort a channel in time")
        deadline = time.monotonic() + timeout_s
        listener = Endpoint(GRPC, endpoint.address, endpoint.rank, endpoint.certificates)
        response, keepalive = self._keepalives.open(listener, request, timeout_s)
        with ExitStack() as undo:
            undo.callback(keepalive.close)
            try:
                host, _ = split_address(endpoint.address)
                wire = self._open(host, response, keepalive, deadline, undo)
            except (OSError, RuntimeError, ValueError, UnreachableError) as error:
                raise UnreachableError(f"no link to {endpoint}: {error}") from error
            undo.pop_all()
        return response, wire

    def _open(
        self,
        host: str,
        response: OpenLinkResponse,
        keepalive: GrpcSenderWire,
        deadline: float,
        undo: ExitStack,
    ) -> NcclSenderWire:
        """Adds to `undo` what must be called if a later step fails."""
        pieces, left_s = response.window_pieces, max(0.001, deadline - time.monotonic())
        sock = connect_frames(host, response.frames_port, self._auth.frames_secret(response.nccl_id), left_s)
        frames = FrameSocket(sock, pieces + CONTROL_FRAMES, self._wake, "receiver")
        undo.callback(frames.close)
        launching = self._blocks.device.launching
        with launching:
            channel = self._nccl.channel(response.nccl_id, SENDER_RANK, self._wake)
            undo.callback(lambda: self._nccl.abort(channel, "the link was not opened"))
            staging = self._nccl.staging(pieces, response.piece_bytes)
        undo.callback(lambda: self._nccl.abort(channel, "the link was not opened", staging.free))
        until = min(deadline, time.monotonic() + self._nccl.connect_timeout_s)
        while not channel.connected:
            if channel.failure is not None or keepalive.failure() is not None or time.monotonic() > until:
                raise UnreachableError(channel.failure or "the two ends did not connect in time")
            time.sleep(_POLL_S)
        with launching:
            return NcclSenderWire(self._nccl, channel, staging, keepalive, frames, response, self._blocks)
