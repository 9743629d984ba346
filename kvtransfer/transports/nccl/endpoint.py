"""State that the nccl links of one process share: the library, and whether it can still be trusted.

On such a link the bytes of a piece go from the sender's staging to the same index of the receiver's, over an
NCCL channel between the two processes. Frames have a TCP socket of their own (`frame_socket`). A gRPC stream
in addition carries no frames: its pings detect a peer that has ended or stopped (see the wires).

    sender                                       receiver
    announce(i) ───────────────────────────────▶ received; a receive is posted, whose kernel waits
    gathered into staging[i], send enqueued ───▶ both kernels run for as long as bytes flow
    commit, after the announcements ───────────▶ received at once; pieces arrive when their receives complete

The partial sums of a piece are its header in staging (`piece_memory`), and travel with it. So a receive waits
on its GPU for the rest of the step that computes its piece, about a millisecond, and for the sender to gather
it; none is posted per credit. NCCL's kernels write nothing but the target of a receive that this process
posted, so a window is exclusively the receiver's again once its own channel has terminated, whatever the
sender does. How well that is known, and what else NCCL does: docs/decisions/0015.

A loop that finds its peer gone aborts the channel. But when NCCL aborts another channel it frees memory,
which waits for all work on the device, the kernels of this channel included, and a loop that launches a
kernel waits with it. So a thread that makes no CUDA call checks as well, and aborts what a loop has not
aborted in time (`watch`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.base.errors import BatonError
from baton.device.nccl.nccl_channel import NcclChannel
from baton.device.streams.link_device import LinkDevice
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.link.interfaces import UnreachableError

_LOG = logging.getLogger(__name__)

SENDER_RANK, RECEIVER_RANK = 0, 1
CONNECT_TIMEOUT_S = 5.0
_WATCH_INTERVAL_S = 0.1
# A loop that is able to has aborted the channel of a lost peer by then.
_ABORT_DELAY_S = 0.4


class Channels(Protocol):
    """`baton.device.nccl.cuda_nccl.CudaNccl`, or a test double."""

    def unique_id(self) -> bytes: ...

    def channel(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclChannel: ...


@dataclass(slots=True)
class _Watched:
    channel: NcclChannel
    lost: Callable[[], BatonError | None]
    since: float | None = None


class NcclEndpoint:
    """Opens channels for links, and keeps the memory they access until they have terminated. Thread-safe."""

    def __init__(
        self, device: LinkDevice, channels: Channels, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """`connect_timeout_s`: how long the two ends may take to connect before another transport is used."""
        self.device = device
        self.connect_timeout_s = connect_timeout_s
        self._channels = channels
        self._lock = threading.Lock()
        self._aborting: list[NcclChannel] = []
        self._hung = False
        self._watched: list[_Watched] = []

    def unique_id(self) -> bytes:
        """Names a channel that is about to be opened."""
        return self._channels.unique_id()

    def staging(self, pieces: int, piece_bytes: int) -> PieceMemory:
        """Staging with headers. OSError where the device has no memory left."""
        return PieceMemory(self.device, pieces, piece_bytes, heads=True)

    def channel(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclChannel:
        """One end of a channel. UnreachableError once NCCL has hung: this process opens no further ones."""
        if self.hung:
            raise UnreachableError("NCCL did not abort a channel of this process in time")
        return self._channels.channel(unique_id, rank, wake)

    def watch(self, channel: NcclChannel, lost: Callable[[], BatonError | None]) -> None:
        """Aborts the channel if its peer has been lost for a while and the loop has not aborted it. `lost` is
        called by a thread that serves all channels."""
        with self._lock:
            self._watched.append(_Watched(channel, lost))
            if len(self._watched) == 1:
                threading.Thread(target=self._watch_all, name="nccl-watch", daemon=True).start()

    def _watch_all(self) -> None:
        while True:
            time.sleep(_WATCH_INTERVAL_S)
            now = time.monotonic()
            with self._lock:
                self._watched = [one for one in self._watched if not one.channel.aborting]
                watched = list(self._watched)
                if not watched:
                    return
            for one in watched:
                try:
                    if (error := one.lost()) is not None:
                        one.since = one.since or now
                        if now > one.since + _ABORT_DELAY_S:
                            one.channel.abort(error.message)
                except Exception:  # of a `wake`: the other channels are still watched
                    _LOG.exception("nccl_channel_abort_failed")

    def abort(self, channel: NcclChannel, why: str, then: Callable[[], None] | None = None) -> None:
        """Aborts a channel; `then` is called by a thread of its own when it has terminated. Idempotent."""
        with self._lock:
            if channel not in self._aborting:
                self._aborting.append(channel)
        channel.abort(why, then)

    @property
    def hung(self) -> bool:
        """True if an abort ever took too long. Stays True: a worker that sees it drains and restarts."""
        with self._lock:
            self._hung = self._hung or any(channel.hung for channel in self._aborting)
            self._aborting = [channel for channel in self._aborting if not channel.terminated]
            return self._hung
