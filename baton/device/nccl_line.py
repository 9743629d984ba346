"""Bytes from one process's device to another's by NCCL, in the order they were asked for; nobody waits here.

    connecting ──▶ whole ──▶ ending (`abort`) ──▶ over: no kernel of ours touches memory any more
         └── broken ──────────▶

A line has a communicator of its own, a stream of its own, and one thread that hands work to NCCL and sees it
end. What is handed over runs on the device whether this process runs on or is stopped. A receive's kernel
occupies multiprocessors until its bytes are there: ask for one when they are on their way.

`abort` ends work that waits for a peer that is gone. It runs in a thread, since NCCL's may not return; a line
that is not over `OVERDUE_S` after it is `overdue`, and its process had better use no more of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.device.nccl import NcclError, Result

_LOG = logging.getLogger(__name__)

OVERDUE_S = 2.0
# How often the thread looks: soon at first, seldom where nothing happens for long.
_SOON_S, _SELDOM_S = 20e-6, 2e-3
_PATIENCE = 1.02


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
    """`baton.device.nccl.Communicator`, as far as a line needs it."""

    def state(self) -> Result: ...

    def send(self, address: int, size: int, peer: int, stream: int) -> None: ...

    def receive(self, address: int, size: int, peer: int, stream: int) -> None: ...

    def abort(self) -> None: ...


class Way(Enum):
    """Of bytes, seen from here."""

    OUT = 1
    IN = 2


@dataclass(frozen=True, slots=True)
class Job:
    """`size` bytes at `address`, once `after` has ended (None: at once).

    `issued` is called when `after` has ended and the device will do it whatever becomes of this process,
    `ended` when it is done; both by the line's thread, each in the order of the jobs. One without bytes is
    only issued.
    """

    way: Way
    address: int = 0
    size: int = 0
    after: Moment | None = None
    issued: Callable[[], None] | None = None
    ended: Callable[[], None] | None = None


class NcclLine:
    """One end of a pair. Jobs may be added, and the line aborted, by any thread."""

    def __init__(
        self, begin: Callable[[], Ends], stream: Stream, peer: int, wake: Callable[[], None], connect_s: float
    ) -> None:
        """`begin` starts to make the communicator, in the line's thread; within `connect_s` it must be whole.
        `wake` is called when the line breaks, and when it is over."""
        self._begin = begin
        self._stream = stream
        self._peer = peer
        self._wake = wake
        self._connect_s = connect_s
        self._jobs: deque[Job] = deque()
        self._running: deque[tuple[Moment, Job]] = deque()
        self._unsaid: deque[Job] = deque()  # handed over, and not called issued yet
        self._changed = threading.Condition()
        self._ends: Ends | None = None
        self._begun = threading.Event()  # set once there is a communicator, or never will be
        self._broken: str | None = None
        self._whole = False
        self._aborted_at: float | None = None
        self._over = False
        self._when_over: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._work, name="nccl-line", daemon=True)
        self._thread.start()

    @property
    def whole(self) -> bool:
        """Whether both ends have met."""
        return self._whole and self._broken is None

    @property
    def broken(self) -> str | None:
        """Why no further job will end."""
        return self._broken

    @property
    def over(self) -> bool:
        """After `abort`: nothing of this line's reads or writes memory any more."""
        return self._over

    @property
    def overdue(self) -> bool:
        aborted = self._aborted_at
        return aborted is not None and not self._over and time.monotonic() - aborted > OVERDUE_S

    def add(self, job: Job) -> None:
        """Behind all jobs before; dropped once the line is broken."""
        with self._changed:
            if self._broken is None:
                self._jobs.append(job)
                self._changed.notify()

    def abort(self, why: str = "the line was closed", then: Callable[[], None] | None = None) -> None:
        """Breaks the line and begins to end what runs on the device. Returns at once; idempotent. `then` is
        called when the line is over, by a thread of its own; the last one that was given."""
        with self._changed:
            self._when_over = then or self._when_over
            if self._aborted_at is not None:
                return
            self._aborted_at = time.monotonic()
        self._break(why)
        threading.Thread(target=self._end, name="nccl-abort", daemon=True).start()

    def _break(self, why: str) -> None:
        with self._changed:
            if self._broken is None:
                self._broken = why
            self._jobs.clear()
            self._changed.notify()
        self._wake()

    # -- the line's thread ------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            ends = self._connect()
            while self._broken is None:
                self._issue(ends)
                self._see_ended(ends)
        except NcclError as error:
            self._break(str(error))
        except Exception as error:  # the device's, or a callback's: whoever waits must hear of it
            _LOG.exception("a line breaks")
            self._break(repr(error))
        finally:
            self._begun.set()

    def _connect(self) -> Ends:
        try:
            self._ends = ends = self._begin()
        finally:
            self._begun.set()
        self._settle(ends, self._connect_s)
        self._whole = self._broken is None
        self._wake()
        return ends

    def _issue(self, ends: Ends) -> None:
        """Hands the next job to the device; waits for one where nothing runs either."""
        with self._changed:
            if not (self._jobs or self._running or self._unsaid):
                # Ends with a job or `_break`: a line without work has no peer to wait for.
                self._changed.wait_for(lambda: self._jobs or self._broken is not None)
            if not self._jobs or self._broken is not None:
                return
            job = self._jobs.popleft()
        if job.size:
            if job.after is not None:
                self._stream.after(job.after)
            move = ends.send if job.way is Way.OUT else ends.receive
            move(job.address, job.size, self._peer, self._stream.handle)
            # Before this NCCL may not have told the device: an event would come too soon.
            self._settle(ends, self._connect_s)
            self._running.append((self._stream.moment(), job))
        if job.issued is not None:
            self._unsaid.append(job)

    def _see_ended(self, ends: Ends) -> None:
        """Waits until all that was handed over has ended, or there is another job to hand over."""
        pause = _SOON_S
        while (self._running or self._unsaid) and self._broken is None:
            if self._call_issued() or self._call_ended():
                pause = _SOON_S
            elif self._jobs:
                return
            else:
                self._look(ends)
                time.sleep(pause)
                pause = min(pause * _PATIENCE, _SELDOM_S)

    def _call_issued(self) -> bool:
        """Of the oldest whose turn it is, if any."""
        if not self._unsaid or not ((after := self._unsaid[0].after) is None or after.ended()):
            return False
        issued = self._unsaid.popleft().issued
        assert issued is not None
        issued()
        return True

    def _call_ended(self) -> bool:
        """The same of the oldest that runs."""
        if not self._running or not self._running[0][0].ended():
            return False
        _, job = self._running.popleft()
        if job.ended is not None:
            job.ended()
        return True

    def _settle(self, ends: Ends, within_s: float) -> None:
        """Until NCCL is done with the last call, or the line breaks."""
        deadline = time.monotonic() + within_s
        while self._broken is None and not self._look(ends):
            if time.monotonic() > deadline:
                raise NcclError(
                    "ncclCommGetAsyncError", Result.IN_PROGRESS, f"not done within {within_s:g} s"
                )
            time.sleep(_SOON_S)

    def _look(self, ends: Ends) -> bool:
        """Whether NCCL has nothing left to do; raises `NcclError` where it has failed."""
        state = ends.state()
        if state not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise NcclError("ncclCommGetAsyncError", state, "the communicator has failed")
        return state is Result.SUCCESS

    # -- the thread that ends it ------------------------------------------------------------------

    def _end(self) -> None:
        """Over when the abort has returned and the stream has come to its end."""
        self._begun.wait()  # `begin` returns at once, or raises
        try:
            if self._ends is not None:
                self._ends.abort()
            self._thread.join()  # it issues nothing more
            last, pause = self._stream.moment(), _SOON_S
            while not last.ended():
                time.sleep(pause)
                pause = min(2 * pause, _SELDOM_S)
            self._stream.close()
            if self._when_over is not None:
                self._when_over()
        except Exception:  # NCCL's or the device's: what cannot be known to be over is not
            _LOG.exception("a line cannot be ended")
            return
        self._over = True
        self._wake()
