"""An NCCL connection between two processes' devices, over which bytes move in the order of the calls.

    connecting ──▶ connected ──▶ aborting (`abort`) ──▶ terminated: no kernel of the channel accesses memory
        └── failed ──────────────▶

A channel has its own communicator and its own stream. A thread connects the two ends and has them exchange a
few bytes, which makes NCCL set up its transport: up to then its calls wait for the peer, afterwards none
does. So the engine can call `send` and `receive` in its loop, which costs microseconds. Enqueued work runs
on the device even while this process is stopped. The kernel of a receive occupies multiprocessors until its
bytes have come: post one only when they are on their way.

`abort` ends work that waits for a lost peer. It runs in a thread, since NCCL's own abort may not return; a
channel that has not terminated `ABORT_TIMEOUT_S` later is `hung`, and the process should use no further ones.
A channel that never connected has accessed no memory but its own, and terminates at once; if its peer is
stopped, the thread that waits for it stays behind until the peer resumes or dies."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from baton.device.nccl.nccl_library import NcclError, Result
from baton.device.streams.stream import Event, Stream

_LOG = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0
# How often `failure` asks NCCL for the communicator's state.
_STATE_INTERVAL_S = 0.01
_MIN_POLL_S, _MAX_POLL_S = 20e-6, 2e-3


class PairCommunicator(Protocol):
    """The part of `nccl_library.Communicator` that a channel uses: complete, and connected to its peer."""

    def state(self) -> Result: ...

    def send(self, address: int, size: int, peer: int, stream: int) -> None: ...

    def receive(self, address: int, size: int, peer: int, stream: int) -> None: ...

    def abort(self) -> None: ...


Connect = Callable[[Stream, Callable[[], bool]], PairCommunicator]
"""Waits for the peer until the callable returns True, then raises `NcclError`, with everything it started
ended."""


class NcclChannel:
    """One end of a pair. `send` and `receive` are called by one thread, `abort` by any."""

    def __init__(
        self,
        connect: Connect,
        stream: Stream,
        peer: int,
        wake: Callable[[], None],
        launching: AbstractContextManager[object] | None = None,
    ) -> None:
        """`peer`: the other end's rank. `wake` is called when the channel has connected, failed or
        terminated. `launching`: held while NCCL aborts, which waits for the device; None: nothing is."""
        self._launching = launching or nullcontext()
        self._connect = connect
        self._stream = stream
        self._peer = peer
        self._wake = wake
        # `_enqueueing` is held around calls that may wait for the device; none is made after a failure.
        # `_changing` is held around changes of state, which wait for nothing.
        self._enqueueing = threading.Lock()
        self._changing = threading.Lock()
        self._communicator: PairCommunicator | None = None
        self._failure: str | None = None
        self._checked_at = 0.0
        self._aborted_at: float | None = None
        self._terminated = False
        self._on_terminated: Callable[[], None] | None = None
        threading.Thread(target=self._start, name="nccl-connect", daemon=True).start()

    @property
    def connected(self) -> bool:
        """True once both ends have met, until the channel fails."""
        return self._communicator is not None and self._failure is None

    @property
    def failure(self) -> str | None:
        """The reason why nothing more will arrive; None while the channel works. Called by the loop; checks
        NCCL's state now and then."""
        now = time.monotonic()
        if self.connected and now > self._checked_at + _STATE_INTERVAL_S:
            self._checked_at = now
            self._enqueue(_check_state)
        return self._failure

    @property
    def terminated(self) -> bool:
        """True once, after `abort`, no work of this channel accesses memory any more."""
        return self._terminated

    @property
    def aborting(self) -> bool:
        """True once `abort` was called."""
        return self._aborted_at is not None

    @property
    def hung(self) -> bool:
        """True if an abort has not terminated the channel within `ABORT_TIMEOUT_S`."""
        aborted = self._aborted_at
        return aborted is not None and not self._terminated and time.monotonic() - aborted > ABORT_TIMEOUT_S

    def send(self, address: int, size: int, after: Event) -> None:
        """Enqueues a send of `size` bytes that starts after another stream's event. Dropped after a
        failure."""

        def work(communicator: PairCommunicator) -> None:
            self._stream.wait_event(after)
            communicator.send(address, size, self._peer, self._stream.handle)

        self._enqueue(work)

    def receive(self, address: int, size: int) -> Event | None:
        """Enqueues a receive of `size` bytes; an event that completes with it, or None after a failure."""
        recorded: list[Event] = []

        def work(communicator: PairCommunicator) -> None:
            communicator.receive(address, size, self._peer, self._stream.handle)
            recorded.append(self._stream.record_event())

        self._enqueue(work)
        return recorded[0] if recorded else None

    def abort(self, why: str = "the channel was closed", then: Callable[[], None] | None = None) -> None:
        """Fails the channel and begins to end what runs on the device. Returns at once, even where a call
        is blocked; idempotent. `then` is called, by a thread of its own, when the channel has terminated; of
        several only the last."""
        with self._changing:
            late = then if self._terminated else None
            self._on_terminated = then or self._on_terminated
            first = self._aborted_at is None
            if first:
                self._aborted_at = time.monotonic()
                self._failure = self._failure or why
        if first:
            threading.Thread(target=self._terminate, name="nccl-abort", daemon=True).start()
            self._wake()
        elif late is not None:
            threading.Thread(target=late, name="nccl-terminated", daemon=True).start()

    def _enqueue(self, work: Callable[[PairCommunicator], None]) -> None:
        """Does nothing after a failure; fails the channel where NCCL or CUDA returns an error."""
        with self._enqueueing:
            if self._communicator is None or self._failure is not None:
                return
            try:
                work(self._communicator)
                return
            except RuntimeError as error:
                with self._changing:
                    self._failure = self._failure or str(error)
        self._wake()

    # -- threads ----------------------------------------------------------------------------------

    def _start(self) -> None:
        communicator, why = None, None
        try:
            communicator = self._connect(self._stream, lambda: self._failure is not None)
        except Exception as error:  # of NCCL or the device: reported as this channel's failure
            why = str(error) or repr(error)
        with self._changing:
            if self._failure is None:
                self._communicator, self._failure = communicator, why
                communicator = None
            unused = self._communicator is None
        if communicator is not None:  # the channel was aborted meanwhile
            communicator.abort()
        if unused:
            self._stream.close()
        self._wake()

    def _terminate(self) -> None:
        """Terminated when NCCL's abort has returned and all work of the stream has finished."""
        try:
            if self._communicator is not None:
                with self._launching:
                    self._communicator.abort()
                with self._enqueueing:  # a call under way has returned
                    last, pause = self._stream.record_event(), _MIN_POLL_S
                while not last.query():
                    time.sleep(pause)
                    pause = min(2 * pause, _MAX_POLL_S)
                self._stream.close()
            while not self._terminated:
                with self._changing:
                    then, self._on_terminated = self._on_terminated, None
                    self._terminated = then is None
                if then is not None:
                    then()
        except Exception:  # of NCCL or the device: without proof the channel does not count as terminated
            _LOG.exception("nccl_abort_failed")
            return
        self._wake()


def _check_state(communicator: PairCommunicator) -> None:
    state = communicator.state()
    if state not in (Result.SUCCESS, Result.IN_PROGRESS):
        raise NcclError("ncclCommGetAsyncError", state, "the communicator has failed")
