"""How a receiver grants links: whose memory they get, and how blocks are cut over them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.device.scatter import DeviceScatter
from kvtransfer.link.interfaces import LinkRequest
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.handshake import agree
from kvtransfer.protocol.piece_geometry import PieceGeometry
from kvtransfer.receiver.link import Cut, ReceivingLink


class LinkGrants:
    """Grants the links of one receiver."""

    def __init__(
        self,
        identity: WorkerIdentity,
        fingerprint: bytes,
        block_bytes: Sequence[int],
        piece_bytes: int,
        window_pieces: int,
        device: DeviceSink | None,
    ) -> None:
        if window_pieces < 2:
            raise ValueError("window_pieces must be at least 2")
        self.cut = Cut(PieceGeometry.of(block_bytes, piece_bytes), window_pieces)
        self._identity = identity
        self._fingerprint = fingerprint
        self._device = device
        if device is not None:
            self._device_cut = Cut(
                PieceGeometry.of(block_bytes, device.piece_bytes, multi_block=True), device.window_pieces
            )
        self._link_ids = iter(range(1 + secrets.randbits(48), 1 << 63))

    def agree(self, request: LinkRequest) -> int:
        """The protocol version; BatonError where there can be no link."""
        return agree(request.request, self._identity, self._fingerprint)

    def grant(
        self, request: LinkRequest, transport: str, protocol: int, attach_deadline: float
    ) -> ReceivingLink:
        """BatonError(OVERLOADED) where there is no memory."""
        on_device = self._device if request.device is not None else None
        cut = self.cut if on_device is None else self._device_cut
        response = OpenLinkResponse(
            receiver=self._identity,
            protocol=protocol,
            link_id=next(self._link_ids),
            piece_bytes=cut.geometry.piece_bytes,
            window_pieces=cut.window_pieces,
        )
        window = request.window(cut.window_pieces, cut.geometry.piece_bytes)
        scatter = None if on_device is None else _scatter(on_device, cast(PieceMemory, window))
        staging = Staging(
            cut.window_pieces, cut.geometry.piece_bytes, window, between_devices=on_device is not None
        )
        wire = request.grant(response, staging)
        sender, number = request.request.sender, request.request.link_number
        return ReceivingLink(
            response.link_id, sender, transport, staging, wire, attach_deadline, cut, scatter, number
        )


def _scatter(sink: DeviceSink, window: PieceMemory) -> DeviceScatter:
    try:
        return DeviceScatter(sink, window)
    except RuntimeError as error:
        window.free()
        raise BatonError(ErrorKind.OVERLOADED, f"the device has no memory for a link: {error}") from error
