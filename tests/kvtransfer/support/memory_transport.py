"""A transport without threads or sockets: messages cross when they are received. Its faults are the tests'.

Every message is encoded, decoded and stored as over grpc.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.link.frame_queue import receiver_queue, sender_queue
from kvtransfer.link.interfaces import LinkRequest
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import (
    FrameError,
    Piece,
    ReceiverFrame,
    SenderControl,
    SenderFrame,
    encode,
    encode_piece_header,
)


class Pipe:
    """Both directions of one link, and its receiver's staging."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.to_receiver: deque[bytes] = deque()
        self.to_sender: deque[bytes] = deque()
        self.error: BatonError | None = None
        self.sender_came = False
        # While held, a broken link is not fenced: the sender may still write.
        self.hold_fence = False

    def break_off(self, error: BatonError) -> None:
        if self.error is None:
            self.error = error


class MemoryReceiverWire:
    def __init__(self, pipe: Pipe, staging: Staging, wake: Callable[[], None]) -> None:
        self.pipe = pipe
        self._frames = receiver_queue(staging, wake)
        self._closed = False

    def receive(self) -> SenderFrame | None:
        if self._closed:
            return None
        if self.pipe.to_receiver:
            try:
                self._frames.accept(self.pipe.to_receiver.popleft())
            except FrameError as error:
                self.pipe.to_receiver.clear()
                self.pipe.break_off(error)
        return self._frames.take()

    def send(self, frame: ReceiverFrame) -> None:
        if self.pipe.error is None:
            self.pipe.to_sender.append(encode(frame))

    def attached(self) -> bool:
        return self.pipe.sender_came

    def failure(self) -> BatonError | None:
        return None if self.pipe.to_receiver else self.pipe.error

    def busy_poll(self) -> bool:
        return False

    def fenced(self) -> bool:
        return self._closed and not self.pipe.hold_fence

    def close(self, error: BatonError) -> None:
        self._closed = True
        self.pipe.break_off(error)


class MemorySenderWire:
    on_device = False

    def __init__(self, pipe: Pipe, window_pieces: int, wake: Callable[[], None]) -> None:
        self.pipe = pipe
        self._frames = sender_queue(window_pieces, wake)
        self.shares_clock = False
        pipe.sender_came = True

    def put(self, piece: Piece, payload: memoryview) -> None:
        self._publish(encode_piece_header(piece) + bytes(payload))

    def send(self, frame: SenderControl) -> None:
        self._publish(encode(frame))

    def receive(self) -> ReceiverFrame | None:
        while self.pipe.to_sender:
            try:
                self._frames.accept(self.pipe.to_sender.popleft())
            except FrameError as error:
                self.pipe.break_off(error)
        return self._frames.take()

    def failure(self) -> BatonError | None:
        return None if self.pipe.to_sender else self.pipe.error

    def close(self) -> None:
        self.pipe.break_off(BatonError(ErrorKind.UNAVAILABLE, "the sender closed the link"))

    def _publish(self, message: bytes) -> None:
        if self.pipe.error is None:
            self.pipe.to_receiver.append(message)


class _MemoryRequest:
    device = None

    def __init__(self, request: OpenLinkRequest, wake: Callable[[], None]) -> None:
        self.request = request
        self.pipe: Pipe | None = None
        self.response: OpenLinkResponse | None = None
        self.refusal: BatonError | None = None
        self._wake = wake

    def window(self, pieces: int, piece_bytes: int) -> None:
        """Returns None: a message brings its piece."""

    def grant(self, response: OpenLinkResponse, staging: Staging) -> MemoryReceiverWire:
        self.response = response
        self.pipe = Pipe(staging)
        return MemoryReceiverWire(self.pipe, staging, self._wake)

    def refuse(self, error: BatonError) -> None:
        self.refusal = error


class MemoryTransport:
    """Listener and connector in one: the one address there is."""

    transport = "memory"
    endpoint = Endpoint("memory", "1")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.requests: deque[_MemoryRequest] = deque()
        self.pipes: list[Pipe] = []

    def next_request(self) -> LinkRequest | None:
        return self.requests.popleft() if self.requests else None

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.break_off(BatonError(ErrorKind.UNAVAILABLE, "the receiver closes"))

    def reaches(self, endpoint: Endpoint) -> bool:
        return endpoint == self.endpoint

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, MemorySenderWire]:
        # Runs in the sender's opening thread; the loop answers from its own.
        call = _MemoryRequest(request, self._wake)
        self.requests.append(call)
        self._wake()
        for _ in range(int(timeout_s * 1000)):
            if call.refusal is not None:
                raise call.refusal
            if call.pipe is not None and call.response is not None:
                self.pipes.append(call.pipe)
                return call.response, MemorySenderWire(call.pipe, call.response.window_pieces, self._wake)
            time.sleep(0.001)
        raise BatonError(ErrorKind.DEADLINE, "no answer")
