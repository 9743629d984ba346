"""Bytes from one process's device to another's by NCCL, in the order in which they were asked for.

    meeting ──▶ whole ──▶ ending (`abort`) ──▶ over: no kernel of ours touches memory any more
       └── broken ──────────▶

A line has a communicator of its own and a stream of its own. A thread makes both ends meet and has them move
a word, by which NCCL connects the two: so far its calls wait for the peer, and from then on none does. So
`send` and `receive` are called by the loop, which they cost microseconds. What was said runs on the device
whether this process runs on or is stopped. A receive's kernel occupies multiprocessors until its bytes are
there: ask for one when they are on their way.

`abort` ends work that waits for a peer that is gone. It runs in a thread, since NCCL's may not return; a line
that is not over `OVERDUE_S` after it is `overdue`, and its process had better use no more of them. A line
whose ends have not met has touched no memory but its own, and is over at once; should the peer be stopped,
the thread that waits for it stays behind until it wakes or dies."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from baton.device.nccl import NcclError, Result

_LOG = logging.getLogger(__name__)

OVERDUE_S = 2.0
# How often a line asks NCCL whether it has failed.
_LOOK_S = 0.01
_SOON_S, _SELDOM_S = 20e-6, 2e-3


class Moment(Protocol):
    """A place in a stream's work."""

    def ended(self) -> bool:
        """Whether all that was said before it is done."""


class Stream(Protocol):
    """A device's stream that is the line's alone."""

    @property
    def handle(self) -> int:
        """As NCCL takes it."""

    def after(self, moment: Moment) -> None:
        """What is said from now on begins when another stream has come to this moment."""

    def moment(self) -> Moment:
        """Here and now."""

    def close(self) -> None:
        """When all that was said is done."""


class Ends(Protocol):
    """`baton.device.nccl.Communicator`, as far as a line needs it: whole, and connected to its peer."""

    def state(self) -> Result: ...

    def send(self, address: int, size: int, peer: int, stream: int) -> None: ...

    def receive(self, address: int, size: int, peer: int, stream: int) -> None: ...

    def abort(self) -> None: ...


Meet = Callable[[Stream, Callable[[], bool]], Ends]
"""Waits for the peer, until it is given up: `NcclError`. Whatever it began has ended then."""


class NcclLine:
    """One end of a pair. The loop moves bytes; any thread may abort."""

    def __init__(self, meet: Meet, stream: Stream, peer: int, wake: Callable[[], None]) -> None:
        """`wake` is called when the line is whole, when it breaks, and when it is over."""
        self._meet = meet
        self._stream = stream
        self._peer = peer
        self._wake = wake
        # Held while something is said to the device, which may have to wait, and nothing is once the line is
        # broken; and while this line's own state changes, which waits for nothing.
        self._saying = threading.Lock()
        self._changing = threading.Lock()
        self._ends: Ends | None = None
        self._broken: str | None = None
        self._looked_at = 0.0
        self._aborted_at: float | None = None
        self._over = False
        self._when_over: Callable[[], None] | None = None
        threading.Thread(target=self._begin, name="nccl-line", daemon=True).start()

    @property
    def whole(self) -> bool:
        """Whether both ends have met."""
        return self._ends is not None and self._broken is None

    @property
    def broken(self) -> str | None:
        """Why nothing more will arrive. Asked by the loop: it looks at NCCL's state now and then."""
        now = time.monotonic()
        if self.whole and now > self._looked_at + _LOOK_S:
            self._looked_at = now
            self._do(lambda ends: _look(ends))
        return self._broken

    @property
    def over(self) -> bool:
        """After `abort`: nothing of this line's reads or writes memory any more."""
        return self._over

    @property
    def ending(self) -> bool:
        """Whether it was aborted."""
        return self._aborted_at is not None

    @property
    def overdue(self) -> bool:
        aborted = self._aborted_at
        return aborted is not None and not self._over and time.monotonic() - aborted > OVERDUE_S

    def send(self, address: int, size: int, after: Moment) -> None:
        """So many bytes, when another stream has come to this moment. Dropped once the line is broken."""

        def say(ends: Ends) -> None:
            self._stream.after(after)
            ends.send(address, size, self._peer, self._stream.handle)

        self._do(say)

    def receive(self, address: int, size: int) -> Moment | None:
        """So many bytes. When they are there; None once the line is broken."""
        said: list[Moment] = []

        def say(ends: Ends) -> None:
            ends.receive(address, size, self._peer, self._stream.handle)
            said.append(self._stream.moment())

        self._do(say)
        return said[0] if said else None

    def abort(self, why: str = "the line was closed", then: Callable[[], None] | None = None) -> None:
        """Breaks the line and begins to end what runs on the device. Returns at once, though something that
        is being said may wait; idempotent. `then` is called when the line is over, by a thread of its own;
        the last one that was given."""
        with self._changing:
            late = then if self._over else None
            self._when_over = then or self._when_over
            first = self._aborted_at is None
            if first:
                self._aborted_at = time.monotonic()
                self._broken = self._broken or why
        if first:
            threading.Thread(target=self._end, name="nccl-abort", daemon=True).start()
            self._wake()
        elif late is not None:
            threading.Thread(target=late, name="nccl-over", daemon=True).start()

    def _do(self, what: Callable[[Ends], None]) -> None:
        """Nothing once broken; breaks the line where NCCL or CUDA refuses."""
        with self._saying:
            if self._ends is None or self._broken is not None:
                return
            try:
                what(self._ends)
                return
            except RuntimeError as error:
                with self._changing:
                    self._broken = self._broken or str(error)
        self._wake()

    # -- threads ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        ends, why = None, None
        try:
            ends = self._meet(self._stream, lambda: self._broken is not None)
        except Exception as error:  # NCCL's, the device's: whoever waits must hear of it
            why = str(error) or repr(error)
        with self._changing:
            if self._broken is None:
                self._ends, self._broken = ends, why
                ends = None
            given_up = self._ends is None
        if ends is not None:  # it came too late
            ends.abort()
        if given_up:
            self._stream.close()
        self._wake()

    def _end(self) -> None:
        """Over when the abort has returned and the stream has come to its end."""
        try:
            if self._ends is not None:
                self._ends.abort()
                with self._saying:  # what was being said has been said
                    last, pause = self._stream.moment(), _SOON_S
                while not last.ended():
                    time.sleep(pause)
                    pause = min(2 * pause, _SELDOM_S)
                self._stream.close()
            while not self._over:
                with self._changing:
                    then, self._when_over = self._when_over, None
                    self._over = then is None
                if then is not None:
                    then()
        except Exception:  # NCCL's or the device's: what cannot be known to be over is not
            _LOG.exception("nccl_line_end_failed")
            return
        self._wake()


def _look(ends: Ends) -> None:
    state = ends.state()
    if state not in (Result.SUCCESS, Result.IN_PROGRESS):
        raise NcclError("ncclCommGetAsyncError", state, "the communicator has failed")
