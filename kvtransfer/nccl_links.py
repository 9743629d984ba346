"""What the nccl links of one process share: the library, their memory, and whether NCCL can still be trusted.

Over such a link frames go by a grpc stream of its own (`nccl_sender`, `nccl_receiver`), and a piece's bytes
from the sender's staging to the same index of the receiver's, by a line between the two processes:

    sender                                       receiver
    announce(i) ───────────────────────────────▶ heard; receive issued, whose kernel waits for the sender's
    gathered into staging[i], send issued ─────▶ both kernels run, for as long as bytes flow
    sum(i) ────────────────────────────────────▶ landed, when the receive has ended and the sum is here
    commit, behind what was announced            heard at once

So a receive waits on its GPU for as long as the sender takes to gather one piece; none is posted per credit.
Where pieces lie in the host's memory, a run of them is announced when its send has been issued, and heard
when it is there. NCCL's kernels write nothing but what a receive of this process was given, so a window is
the receiver's alone again as soon as its own line is over, whatever the sender does. How far that is known,
and what NCCL does otherwise: docs/decisions/0015.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from baton.device.link_device import LinkDevice
from baton.device.nccl_line import NcclLine
from kvtransfer.staging import Window
from kvtransfer.transport import OutOfReachError

TRANSPORT = "nccl"
SENDER_RANK, RECEIVER_RANK = 0, 1

# The first bytes over a line: they make NCCL connect the two ends before anybody waits for a block.
GREETING_BYTES = 64


def greeting(link_id: int) -> bytes:
    """What the sender says first, and the receiver compares."""
    return link_id.to_bytes(8, "little") * (GREETING_BYTES // 8)


class Place(Protocol):
    """Memory that lines move bytes to and from: a window, or its sender's half."""

    @property
    def window(self) -> Window: ...

    @property
    def address(self) -> int: ...

    def write(self, at: int, payload: bytes | memoryview) -> None:
        """From the host; there before any job that is added later begins."""

    def free(self) -> None:
        """When every line that it was given to is over. Idempotent; by any thread."""


class Library(Protocol):
    """NCCL, on the device of this process."""

    def unique_id(self) -> bytes: ...

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None], connect_s: float) -> NcclLine: ...

    def place(self, size: int) -> Place:
        """OSError where there is no room."""

    @property
    def device(self) -> LinkDevice | None:
        """Where places are; None for the host's memory."""


class NcclLinks:
    """Opens lines for links, and keeps what they move until they are over. Any thread may call it."""

    def __init__(self, library: Library, connect_s: float) -> None:
        self.connect_s = connect_s
        self._library = library
        self._lock = threading.Lock()
        self._ending: list[tuple[NcclLine, Place]] = []
        self._hung = False

    def unique_id(self) -> bytes:
        return self._library.unique_id()

    def place(self, size: int) -> Place:
        return self._library.place(size)

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclLine:
        """`OutOfReachError` once NCCL has hung: no further line of this process is to be believed in."""
        if self.hung:
            raise OutOfReachError("NCCL did not end a link of this process in time")
        return self._library.line(unique_id, rank, wake, self.connect_s)

    def end(self, line: NcclLine, place: Place, why: str, *, free: bool) -> None:
        """Aborts it; the memory stays until it is over, and is freed then if it is to be. Idempotent."""
        with self._lock:
            if all(other is not line for other, _ in self._ending):
                self._ending.append((line, place))
        line.abort(why, place.free if free else None)

    @property
    def device(self) -> LinkDevice | None:
        return self._library.device

    @property
    def hung(self) -> bool:
        """Whether an abort ever took too long. It stays so: a worker that sees it drains and restarts."""
        with self._lock:
            self._hung = self._hung or any(line.overdue for line, _ in self._ending)
            self._ending = [(line, place) for line, place in self._ending if not line.over]
            return self._hung

    @property
    def ending(self) -> int:
        """Lines that are not over yet."""
        with self._lock:
            return sum(not line.over for line, _ in self._ending)
