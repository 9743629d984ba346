"""What the nccl links of one process share: the library, and whether NCCL can still be trusted.

Over such a link a piece's bytes go from the sender's staging to the same index of the receiver's, by a line
between the two processes. Frames have a TCP socket of their own (`frame_socket`). A grpc stream beside it
carries no frame: by its pings a peer that is gone or stopped is noticed (`nccl_sender`, `nccl_receiver`).

    sender                                       receiver
    announce(i) ───────────────────────────────▶ heard; receive issued, whose kernel waits for the sender's
    gathered into staging[i], send issued ─────▶ both kernels run, for as long as bytes flow
    commit, behind what was announced            heard at once; pieces land when their receives have ended

Parts of a piece's sum are its head in staging (`piece_memory`), and travel with it. So a receive waits on its
GPU for what is left of the step that computes its piece, a millisecond, and for the sender to gather it; none
is posted per credit. NCCL's kernels write nothing but what a receive of this process was given, so a window
is the receiver's alone again as soon as its own line is over, whatever the sender does. How far that is
known, and what NCCL does otherwise: docs/decisions/0015.

A loop that finds its peer gone ends the channel. But NCCL's end of another line frees memory, which waits for
all that runs on the device, this line's kernel too, and a loop that launches something waits with it. So a
thread that asks nothing of the device looks as well, and ends what a loop has not ended in time (`watch`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.device.link_device import LinkDevice
from baton.device.nccl_channel import NcclChannel
from baton.errors import BatonError
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.link.interfaces import OutOfReachError

_LOG = logging.getLogger(__name__)

TRANSPORT = "nccl"
SENDER_RANK, RECEIVER_RANK = 0, 1
_LOOK_S = 0.1
# A loop that can, has ended the line of a peer that is gone by then.
_LATE_S = 0.4


class Channels(Protocol):
    """`baton.device.cuda_nccl.CudaNccl`, or a double of it."""

    def unique_id(self) -> bytes: ...

    def channel(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclChannel: ...


@dataclass(slots=True)
class _Watched:
    channel: NcclChannel
    gone: Callable[[], BatonError | None]
    since: float | None = None


class NcclLinks:
    """Opens lines for links, and keeps what they move until they are over. Any thread may call it."""

    def __init__(self, device: LinkDevice, channels: Channels, connect_s: float) -> None:
        """`connect_s`: until both ends have met, or a link goes over another way."""
        self.device = device
        self.connect_s = connect_s
        self._channels = channels
        self._lock = threading.Lock()
        self._ending: list[NcclChannel] = []
        self._hung = False
        self._watched: list[_Watched] = []

    def unique_id(self) -> bytes:
        return self._channels.unique_id()

    def staging(self, pieces: int, piece_bytes: int) -> PieceMemory:
        """OSError where there is no room."""
        return PieceMemory(self.device, pieces, piece_bytes, heads=True)

    def channel(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclChannel:
        """`OutOfReachError` once NCCL has hung: no further line of this process is to be believed in."""
        if self.hung:
            raise OutOfReachError("NCCL did not end a link of this process in time")
        return self._channels.channel(unique_id, rank, wake)

    def watch(self, channel: NcclChannel, gone: Callable[[], BatonError | None]) -> None:
        """Aborts the line should its peer have been `gone` for a while, and nobody has. `gone` is asked by a
        thread that serves all lines, while there are any."""
        with self._lock:
            self._watched.append(_Watched(channel, gone))
            if len(self._watched) == 1:
                threading.Thread(target=self._watching, name="nccl-watch", daemon=True).start()

    def _watching(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            with self._lock:
                self._watched = [one for one in self._watched if not one.channel.aborting]
                watched = list(self._watched)
                if not watched:
                    return
            for one in watched:
                try:
                    if (gone := one.gone()) is not None:
                        one.since = one.since or now
                        if now > one.since + _LATE_S:
                            one.channel.abort(gone.message)
                except Exception:  # of whoever is woken by it: the others are looked after all the same
                    _LOG.exception("nccl_line_abort_failed")

    def end(self, channel: NcclChannel, why: str, then: Callable[[], None] | None = None) -> None:
        """Aborts it; `then` is called when it is over, by a thread of its own. Idempotent."""
        with self._lock:
            if channel not in self._ending:
                self._ending.append(channel)
        channel.abort(why, then)

    @property
    def hung(self) -> bool:
        """Whether an abort ever took too long. It stays so: a worker that sees it drains and restarts."""
        with self._lock:
            self._hung = self._hung or any(channel.hung for channel in self._ending)
            self._ending = [channel for channel in self._ending if not channel.terminated]
            return self._hung

    @property
    def ending(self) -> int:
        """Lines that are not over yet."""
        with self._lock:
            return sum(not channel.terminated for channel in self._ending)
