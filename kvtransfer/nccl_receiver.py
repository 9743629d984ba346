"""The receiver's side of the nccl transport; the whole of it is drawn in `nccl_links`."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.device.nccl_line import Job, NcclLine, Way
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.frames import (
    FrameError,
    Piece,
    ReceiverFrame,
    SenderFrame,
    Summed,
    decode_announced,
    decode_summed,
)
from kvtransfer.grpc_listener import GrpcListener, GrpcOpenCall, GrpcReceiverWire
from kvtransfer.inbox import CONTROL_FRAMES, Inbox
from kvtransfer.nccl_links import GREETING_BYTES, RECEIVER_RANK, TRANSPORT, NcclLinks, Place, greeting
from kvtransfer.routes import NCCL_SCHEME
from kvtransfer.staging import Staging, Window
from kvtransfer.transport import OpenCall

_GREETED_S = 2.0
_ON_ITS_WAY_S = 0.1


@dataclass(slots=True)
class _Run:
    """Pieces whose bytes come together, those that have not been heard yet; the staging indices of all."""

    pieces: deque[Piece]
    indices: frozenset[int]
    arrived: bool = False


class RunInbox:
    """What comes over a link's stream: runs, for which a receive is posted at once, and frames between them.

    Between devices a piece is heard when it is announced, and `landed` counts those whose bytes and sums are
    here; else it is heard when they are.

    `accept` is called by the stream's thread, `arrived` of a run set by the line's, all else by the loop.
    """

    def __init__(
        self,
        staging: Staging,
        line: NcclLine,
        address: int,
        wake: Callable[[], None],
        *,
        between_devices: bool = False,
    ) -> None:
        self._staging = staging
        self._line = line
        self._address = address
        self._wake = wake
        self._between_devices = between_devices
        # Between devices, written by the stream's thread alone: staging indices whose sums have not come, and
        # each index's last sum, the loop's to read when its piece has landed.
        self._unsummed: set[int] = set()
        self._sums = [0] * staging.pieces
        # Of the loop: runs that have been heard and have not landed.
        self._landing: deque[_Run] = deque()
        self._landed = 0
        # Set when the line is known to carry the sender's bytes: until then none are posted.
        self.greeted = threading.Event()
        self._waiting: Inbox[SenderFrame | _Run] = Inbox(staging.pieces + CONTROL_FRAMES, wake)
        self._run: _Run | None = None
        self._posted: _Run | None = None  # the last one

    def accept(self, message: bytes) -> None:
        """Raises `FrameError` for what is no frame, no run, or a run of indices that are not the sender's."""
        summed = decode_summed(message) if self._between_devices else None
        if summed is not None:
            self._take_sum(summed)
            return
        frames = decode_announced(message)
        pieces = [frame for frame in frames if isinstance(frame, Piece)]
        if not pieces:
            self._waiting.put(frames[0])
            return
        # The greeting has arrived when a sender announces anything: this waits for our own thread to look.
        if not self.greeted.wait(_GREETED_S):
            raise FrameError("a run before the greeting")
        self._expect_run(pieces)
        run = _Run(deque(pieces), frozenset(piece.staging for piece in pieces))
        if self._between_devices:
            self._unsummed |= run.indices

        def ended() -> None:
            run.arrived = True
            self._wake()

        size = (len(pieces) - 1) * self._staging.piece_bytes + pieces[-1].length
        address = self._address + pieces[0].staging * self._staging.piece_bytes
        self._posted = run
        self._waiting.put(run)
        self._line.add(Job(Way.IN, address, size, ended=ended))

    def take(self) -> SenderFrame | None:
        """The next frame; where bytes are waited for, a piece when its run has arrived, and nothing before
        it."""
        if self._run is None or not self._run.pieces:
            head = self._waiting.take()
            if not isinstance(head, _Run):
                return head
            self._run = head
            if self._between_devices:
                self._landing.append(head)
        return self._run.pieces.popleft() if self._between_devices or self._run.arrived else None

    def landed(self) -> int:
        """How many of the pieces that were heard have their bytes and sums here, in their order."""
        while self._landing and self._whole(self._landing[0]):
            self._landed += len(self._landing.popleft().indices)
        return self._landed

    def checksum(self, piece: Piece) -> int:
        """Of one that has landed."""
        return self._sums[piece.staging]

    def expects(self) -> bool:
        """Whether a receive was posted that has not ended; they end in their order."""
        return self._posted is not None and not self._posted.arrived

    def close(self, error: BatonError) -> None:
        self._waiting.close(error)

    def closed(self) -> BatonError | None:
        return self._waiting.closed()

    def _whole(self, run: _Run) -> bool:
        return run.arrived and self._unsummed.isdisjoint(run.indices)

    def _take_sum(self, summed: Summed) -> None:
        if summed.staging not in self._unsummed:
            raise FrameError(f"a sum of staging index {summed.staging}, where none is awaited")
        self._sums[summed.staging] = summed.checksum
        self._unsummed.remove(summed.staging)
        self._wake()

    def _expect_run(self, pieces: list[Piece]) -> None:
        """All are the sender's indices, one behind the other, and become the receiver's."""
        whole = self._staging.piece_bytes
        for before, after in itertools.pairwise(pieces):
            if after.staging != before.staging + 1 or before.length != whole:
                raise FrameError(f"staging index {after.staging} does not continue a run")
        for piece in pieces:
            self._staging.take(piece)


class NcclReceiverWire:
    """One link at the receiver."""

    def __init__(
        self,
        links: NcclLinks,
        line: NcclLine,
        place: Place,
        control: GrpcReceiverWire,
        inbox: RunInbox,
        link_id: int,
    ) -> None:
        self._links = links
        self._line = line
        self._place = place
        self._control = control
        self._inbox = inbox
        self._greeting = greeting(link_id)
        self._broken_at: float | None = None
        line.add(Job(Way.IN, place.address, GREETING_BYTES, ended=self._compare))

    def hear(self) -> SenderFrame | None:
        return self._control.hear()

    @property
    def threaded(self) -> bool:
        return True

    def landed(self) -> int:
        return self._inbox.landed()

    def checksum(self, piece: Piece) -> int:
        return self._inbox.checksum(piece)

    def tell(self, frame: ReceiverFrame) -> None:
        self._control.tell(frame)

    def attached(self) -> bool:
        return self._inbox.greeted.is_set() and self._control.attached()

    def restless(self) -> bool:
        """The line's thread wakes the loop."""
        return False

    def broken(self) -> BatonError | None:
        if (why := self._line.broken) is not None:
            return self._control.broken() or BatonError(ErrorKind.UNAVAILABLE, why)
        error = self._control.broken()
        if error is None or not self._inbox.expects():
            return error
        # What was announced before the break is on its way, unless its sender's device stopped with it.
        now = time.monotonic()
        self._broken_at = self._broken_at or now
        return error if now > self._broken_at + _ON_ITS_WAY_S else None

    def fenced(self) -> bool:
        """Nothing writes the window but our own receives: none is posted any more, and none runs."""
        return self._control.fenced() and self._line.over

    def close(self, error: BatonError) -> None:
        self._control.close(error)
        self._links.end(self._line, self._place, error.message, free=False)

    def _compare(self) -> None:
        if self._place.window[:GREETING_BYTES].tobytes() == self._greeting:
            self._inbox.greeted.set()
        else:
            self._line.abort("what came first over the line is not the sender's greeting")


class _NcclCall:
    """A sender's request that came over grpc, and the line that its link will have."""

    def __init__(self, call: GrpcOpenCall, links: NcclLinks, wake: Callable[[], None]) -> None:
        self.request: OpenLinkRequest = call.request
        self._call = call
        self._links = links
        self._wake = wake
        self.device = links.device
        self._place: Place | None = None

    def window(self, pieces: int, piece_bytes: int) -> Window:
        try:
            self._place = self._links.place(pieces * piece_bytes)
        except OSError as error:
            raise BatonError(ErrorKind.OVERLOADED, f"no memory for a link: {error}") from error
        return self._place.window

    def grant(self, response: OpenLinkResponse, staging: Staging) -> NcclReceiverWire:
        place = self._place
        assert place is not None, "staging lies in the window of its call"
        response.nccl_id = self._links.unique_id()
        line = self._links.line(response.nccl_id, RECEIVER_RANK, self._wake)
        between_devices = self.device is not None
        inbox = RunInbox(staging, line, place.address, self._wake, between_devices=between_devices)
        control = self._call.grant(response, staging, inbox)
        return NcclReceiverWire(self._links, line, place, control, inbox, response.link_id)

    def refuse(self, error: BatonError) -> None:
        self._call.refuse(error)


class NcclListener:
    """A grpc listener of its own, for frames; the bytes come by NCCL."""

    transport = TRANSPORT

    def __init__(
        self,
        host: str,
        port: int,
        *,
        peer_timeout_s: float,
        max_links: int,
        wake: Callable[[], None],
        links: NcclLinks,
    ) -> None:
        """`BatonError` INVALID where it cannot bind."""
        self._control = GrpcListener(
            host, port, piece_bytes=0, peer_timeout_s=peer_timeout_s, max_links=max_links, wake=wake
        )
        self._links = links
        self._wake = wake
        self.address = NCCL_SCHEME + self._control.address

    def next_call(self) -> OpenCall | None:
        call = self._control.next_call()
        return None if call is None else _NcclCall(call, self._links, self._wake)

    def close(self) -> None:
        self._control.close()
