"""Code that the two wires of an ipc link share: frames through the rings, doorbells through the socket.

Only the loop accesses the rings. A thread that waits on the socket reports the peer's end, its errors and its
silence, and wakes the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.protocol.frames import FrameError, ReceiverFrame, SenderControl, encode
from kvtransfer.transports.ipc.byte_ring import RingReader, RingWriter
from kvtransfer.transports.ipc.control import Control, ControlByte

# How long both ends of a link between devices poll within microseconds after the last frame.
_BUSY_S = 0.002


class IpcWire:
    """One end of a link; `control` is set once the peer can know of the memory."""

    control: Control | None

    def __init__(
        self,
        rings: tuple[RingReader, RingWriter],
        wake: Callable[[], None],
        peer: str,
        *,
        between_devices: bool = False,
    ) -> None:
        """`between_devices`: bytes may come without a frame, so the loop is kept from sleeping for a
        while."""
        self._reader, self._writer = rings
        self._wake = wake
        self._peer = peer
        self.control = None
        self._broken: BatonError | None = None
        self._closed = False
        self._unreadable = False  # a malformed frame was read: what follows it does not count
        self._between_devices = between_devices
        self._busy_until = 0.0

    def failure(self) -> BatonError | None:
        return self._broken

    def _take(self) -> bytes | None:
        """The next message, or None; always None after a malformed one, and once closed."""
        if self._closed or self._unreadable:
            return None
        self._writer.flush()
        try:
            # Between devices a doorbell is requested only when the loop is about to sleep (`busy_poll`): it
            # costs a thread switch at both ends.
            message = self._reader.take(sleeps=not self._between_devices)
        except FrameError as malformed:
            self._malformed(malformed)
            return None
        if message is not None:
            self._stay_busy()
        if self._reader.writer_blocked():
            self._send(ControlByte.DOORBELL)
        return message

    def busy_poll(self) -> bool:
        """True if something may come without a doorbell; if False, a doorbell will be rung."""
        if self._closed or not self._between_devices:
            return False
        return time.monotonic() < self._busy_until or self._reader.arm_doorbell()

    def _stay_busy(self) -> None:
        if self._between_devices:
            self._busy_until = time.monotonic() + _BUSY_S

    def send(self, frame: SenderControl | ReceiverFrame) -> None:
        self._add(encode(frame))

    def _add(self, message: bytes) -> None:
        """Sends a message; dropped once broken."""
        self._stay_busy()
        if self._closed or self._broken is not None:
            return
        if not self._writer.add(message):
            self._break(BatonError(ErrorKind.UNAVAILABLE, "the peer does not read its frames"))
        if self._writer.reader_idle():
            self._send(ControlByte.DOORBELL)

    def _malformed(self, error: FrameError) -> None:
        self._unreadable = True
        self._break(error)

    def _send(self, byte: ControlByte) -> None:
        if self.control is not None:
            self.control.send(byte)

    def _break(self, error: BatonError) -> None:
        """Called by either thread; keeps the first reason."""
        if self._broken is None:
            self._broken = error
        self._wake()

    # -- the thread that waits --------------------------------------------------------------------

    def _wait_for_end(self, control: Control) -> bool:
        """Runs until the peer's end of file, or its silence; whether it reported to have unmapped the
        memory."""
        unmapped = False
        while not control.ended and not control.silent:
            try:
                received = control.wait()
            except ValueError as error:
                self._break(FrameError(f"unknown control byte: {error}"))
                return False
            for one in received:
                if isinstance(one, BatonError):
                    self._break(one)
                else:
                    unmapped |= one is ControlByte.UNMAPPED
                    self._handle(one)
            if any(one is not ControlByte.HEARTBEAT for one in received):
                self._wake()
        ended = f"the {self._peer}'s stream ended"
        silent = f"the {self._peer} has shown no sign of life for too long"
        self._break(BatonError(ErrorKind.UNAVAILABLE, ended if control.ended else silent))
        return unmapped

    def _handle(self, byte: ControlByte) -> None:
        """Handles a control byte of the peer."""
        if byte is ControlByte.DOORBELL:
            self._stay_busy()
