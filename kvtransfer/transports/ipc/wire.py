"""What the two wires of an ipc link share: frames through the rings, bells through the socket.

The loop alone touches the rings. The thread that waits on the socket tells of the other's end, of its
errors and its silence, and wakes the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.errors import BatonError, ErrorKind
from kvtransfer.protocol.frames import FrameError
from kvtransfer.transports.ipc.byte_ring import RingReader, RingWriter
from kvtransfer.transports.ipc.control import Control, Word

# After the last word over a link between devices, its ends look again within microseconds.
_AWAKE_S = 0.002


class IpcWire:
    """One end of a link; `_control` is there once the other has been told of the memory."""

    _control: Control | None

    def __init__(
        self,
        rings: tuple[RingReader, RingWriter],
        wake: Callable[[], None],
        peer: str,
        *,
        between_devices: bool = False,
    ) -> None:
        self._reader, self._writer = rings
        self._wake = wake
        self._peer = peer
        self._control = None
        self._broken: BatonError | None = None
        self._closed = False
        self._deaf = False  # after a malformed frame nothing behind it counts
        # Between devices, something may come without a word of the host's: so long nobody sleeps.
        self._between_devices = between_devices
        self._awake_until = 0.0

    def broken(self) -> BatonError | None:
        return self._broken

    def _take(self) -> bytes | None:
        """The next message; none any more after a malformed one, or once closed."""
        if self._closed or self._deaf:
            return None
        self._writer.flush()
        try:
            # Between devices a bell is asked for when the loop is about to sleep (`restless`), and not
            # before: it costs either end a thread's turn.
            message = self._reader.take(sleeps=not self._between_devices)
        except FrameError as malformed:
            self._garbled(malformed)
            return None
        if message is not None:
            self._stay_awake()
        if self._reader.writer_waits():
            self._say(Word.BELL)
        return message

    def restless(self) -> bool:
        """Whether something may be on its way that no bell tells of; else a bell will be rung."""
        if self._closed or not self._between_devices:
            return False
        return self._awake or self._reader.ask_for_bell()

    @property
    def _awake(self) -> bool:
        return self._between_devices and time.monotonic() < self._awake_until

    def _stay_awake(self) -> None:
        if self._between_devices:
            self._awake_until = time.monotonic() + _AWAKE_S

    def _add(self, message: bytes) -> None:
        """Dropped once broken."""
        self._stay_awake()
        if self._closed or self._broken is not None:
            return
        if not self._writer.add(message):
            self._break(BatonError(ErrorKind.UNAVAILABLE, "the peer does not read its frames"))
        self._ring()

    def _ring(self) -> None:
        """Wakes the other end where it has found nothing and sleeps."""
        if self._writer.reader_sleeps():
            self._say(Word.BELL)

    def _garbled(self, malformed: FrameError) -> None:
        self._deaf = True
        self._break(malformed)

    def _say(self, word: Word) -> None:
        if self._control is not None:
            self._control.say(word)

    def _break(self, error: BatonError) -> None:
        """By either thread; the first reason stays."""
        if self._broken is None:
            self._broken = error
        self._wake()

    # -- the thread that waits --------------------------------------------------------------------

    def _listen(self, control: Control) -> bool:
        """Until the other's end of file, or its silence; whether it said that it has unmapped the memory."""
        unmapped = False
        while not control.ended and not control.silent:
            try:
                words = control.wait()
            except ValueError as error:
                self._break(FrameError(f"no word of a link: {error}"))
                return False
            for word in words:
                if isinstance(word, BatonError):
                    self._break(word)
                else:
                    unmapped |= word is Word.UNMAPPED
                    self._heard(word)
            if any(word is not Word.BEAT for word in words):
                self._wake()
        gone = f"the {self._peer}'s stream ended"
        silent = f"the {self._peer} has shown no sign of life for too long"
        self._break(BatonError(ErrorKind.UNAVAILABLE, gone if control.ended else silent))
        return unmapped

    def _heard(self, word: Word) -> None:
        """A word came."""
        if word is Word.BELL:
            self._stay_awake()
