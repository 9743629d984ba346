"""The sender's side of the nccl transport; the whole of it is drawn in `nccl_links`."""

from __future__ import annotations

from collections.abc import Callable

from baton.device.nccl_line import Job, NcclLine, Way
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.frames import Piece, ReceiverFrame, Words, encode_piece_header
from kvtransfer.grpc_connector import GrpcSenderWire
from kvtransfer.nccl_links import NcclLinks, Place


class NcclSenderWire:
    """One link at the sender. Pieces that lie behind one another in staging travel as one run of bytes."""

    def __init__(
        self,
        links: NcclLinks,
        line: NcclLine,
        place: Place,
        control: GrpcSenderWire,
        response: OpenLinkResponse,
        wake: Callable[[], None],
    ) -> None:
        self._links = links
        self._line = line
        self._place = place
        self._control = control
        self._pieces = response.window_pieces
        self._piece_bytes = response.piece_bytes
        # So many pieces at most: half of the window moves while the other half is filled.
        self._longest = max(1, response.window_pieces // 2)
        self._wake = wake
        self._run: list[Piece] = []
        self._closed = False

    @property
    def gathers(self) -> bool:
        return False

    def put(self, piece: Piece, payload: memoryview) -> None:
        if self._closed:
            return
        if piece.staging >= self._pieces:  # written nowhere: its receiver says what it is
            self.flush()
            self._line.add(Job(Way.OUT, issued=lambda: self._control.announce(encode_piece_header(piece))))
            return
        if self._run and not self._follows(piece):
            self.flush()
        self._place.write(piece.staging * self._piece_bytes, payload)
        if not self._run:
            self._wake()  # the next `hear` sends what has come together by then
        self._run.append(piece)
        if len(self._run) == self._longest:
            self.flush()

    def flush(self) -> None:
        """Sends the run: first its bytes, which then need this process no more, and behind them its name."""
        run, self._run = self._run, []
        if not run:
            return
        size = (len(run) - 1) * self._piece_bytes + run[-1].length
        address = self._place.address + run[0].staging * self._piece_bytes
        headers = b"".join(map(encode_piece_header, run))
        self._line.add(Job(Way.OUT, address, size, issued=lambda: self._control.announce(headers)))

    def tell(self, frame: Words) -> None:
        self.flush()
        self._line.add(Job(Way.OUT, issued=lambda: self._control.tell(frame)))

    def hear(self) -> ReceiverFrame | None:
        self.flush()
        return self._control.hear()

    def broken(self) -> BatonError | None:
        if (error := self._control.broken()) is not None:
            return error
        why = self._line.broken
        return None if why is None else BatonError(ErrorKind.UNAVAILABLE, why)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._run.clear()
        self._control.close()
        self._links.end(self._line, self._place, "the sender closed the link", free=True)

    def _follows(self, piece: Piece) -> bool:
        last = self._run[-1]
        return piece.staging == last.staging + 1 and last.length == self._piece_bytes
