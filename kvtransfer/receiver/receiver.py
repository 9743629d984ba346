"""The receiving end: verifies pieces in staging, scatters them, and says when a transfer is whole.

    expect(id, counts) ─▶ (Described) ─▶ Arrived ─▶ (Announced) ─▶ Committed ─▶ acknowledge(id), refuse(id, …)
                                            └─────▶ Withdrawn                   forget(id) at any time

One thread, the engine's loop, calls everything here. It calls `poll` whenever `wake` was called, and
at least every 100 ms, since deadlines are noticed nowhere else. The sink sees a byte only while its
transfer is expected, and each byte once: after `forget` or `Withdrawn` not one more, so the blocks may be
reused at once. It sees it after the checksum of its piece was right; a device sums while it writes, so there
a wrong piece has been written by then, and its transfer is withdrawn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from baton.errors import BatonError
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkAudit
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.link.interfaces import Listener
from kvtransfer.protocol import frames
from kvtransfer.protocol.frames import FrameError, Refused
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.counters import ReceiverCounters
from kvtransfer.receiver.events import ReceiverEvent
from kvtransfer.receiver.link import ReceivingLink
from kvtransfer.receiver.link_grants import Granting
from kvtransfer.receiver.link_table import MAX_LINKS, ReceivingLinks
from kvtransfer.receiver.transfers import Arrivals, BlockSink
from kvtransfer.transports.nccl.endpoint import NcclLinks
from kvtransfer.transports.registry import listeners_of


class Receiver:
    """One receiver of one incarnation: its listener, links and expected transfers."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        fingerprint: bytes,
        signer: TicketSigner,
        block_bytes: Sequence[int],
        piece_bytes: int,
        window_pieces: int,
        sink: BlockSink,
        wake: Callable[[], None],
        peer_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        device: DeviceSink | None = None,
    ) -> None:
        """`device`: where the blocks lie in a device's memory, to which a sender's device may write."""
        self.counters = ReceiverCounters([0] * len(block_bytes))
        self._arrivals = Arrivals(signer, identity.incarnation, sink, self.counters, peer_timeout_s, clock)
        granting = Granting(identity, fingerprint, block_bytes, piece_bytes, window_pieces, device)
        self._links = ReceivingLinks(granting, self.counters, peer_timeout_s, clock, self._arrivals.lose)
        self._piece_bytes = piece_bytes
        self._device = None if device is None else device.blocks.device
        self._wake = wake
        self._timeout = peer_timeout_s

    def listen(
        self,
        host: str,
        port: int = 0,
        transport: str = "grpc",
        nccl: NcclLinks | None = None,
        auth: LinkAuth | None = None,
        frames_port: int = 0,
    ) -> str:
        """Starts `listeners_of` a transport; the address for tickets (its form:
        `kvtransfer/sender/routes.py`).
        `auth`: which senders get a link, those that know its secret."""
        bounds = self._piece_bytes, self._timeout, MAX_LINKS
        started = listeners_of(
            transport, host, port, *bounds, self._wake, self._device, nccl, auth, frames_port
        )
        for listener in started:
            self._links.attach(listener)
        return " ".join(listener.address for listener in started)

    def attach(self, listener: Listener) -> None:
        """Takes links from this listener too, and owns it from now on."""
        self._links.attach(listener)

    def expect(self, transfer_id: int, block_counts: Sequence[int], held: Sequence[int] = ()) -> None:
        """From now on takes this transfer's bytes: so many blocks of each cache group, but for the first
        `held` of them, which are never written."""
        self._arrivals.expect(transfer_id, block_counts, held)

    def forget(self, transfer_id: int) -> None:
        """Not one more byte of this transfer reaches the sink, no later poll speaks of it. Idempotent. Waits
        for a device that moves pieces of it at this moment."""
        self._arrivals.forget(transfer_id)

    def acknowledge(self, transfer_id: int) -> None:
        """Accepts a commit: the sender is told, the transfer is over."""
        self._arrivals.answer(transfer_id, frames.Committed(transfer_id, time.monotonic_ns()))
        self.counters.transfers_committed += 1

    def refuse(self, transfer_id: int, error: BatonError) -> None:
        """Turns a commit down: the sender is told why, the transfer is over."""
        self._arrivals.answer(transfer_id, Refused(transfer_id, error.kind, error.message))

    def poll(self, max_pieces: int) -> list[ReceiverEvent]:
        """Does what can be done at once, at most `max_pieces` frames of it; never blocks on a peer."""
        self._take_all_ended()
        if not self._arrivals.commits:
            self._keep_awake()
            self._hear(max_pieces)
        if self._arrivals.commits:
            self._wake()  # an admission goes before all else that there is to do
        else:
            self._give_credits()
        return self._arrivals.take_events()

    def land(self, max_pieces: int) -> None:
        """The same, but what there is to tell waits for the next `poll`."""
        self._take_all_ended()
        self._hear(max_pieces)
        self._give_credits()

    def _keep_awake(self) -> None:
        """One link's move wakes the device of all."""
        if self._device is None or not len(self._arrivals):
            return
        for link in self._links:
            if link.scatter is not None:
                link.scatter.keep_awake()
                return

    def _take_all_ended(self) -> None:
        for link in self._links:
            self._take_ended(link)

    def _take_ended(self, link: ReceivingLink) -> None:
        """What its device has moved by now; and it begins with what is there."""
        try:
            self._arrivals.take_ended(link)
        except FrameError as error:
            self._links.break_off(link, error)

    def _hear(self, max_pieces: int) -> None:
        """What senders say: at most so many frames of it."""
        self._give_credits()
        self._links.take_calls()
        budget = max_pieces
        speaking = deque(self._links)
        while speaking and budget > 0:
            link = speaking.popleft()
            if self._step(link):
                speaking.append(link)
                budget -= 1
        # Who has more to say is not judged yet: the answer may be among it.
        self._links.break_overdue([link for link in self._links if link not in speaking])
        self._links.let_go()
        if speaking:
            self._wake()
        self._links.rotate()

    def _give_credits(self) -> None:
        """To whom may wait for them: not where all that a sender began is said. A frame takes time, which an
        admission would wait for; they go with its answer."""
        for link in self._links:
            if not self._arrivals.said(link):
                link.flush()

    def _step(self, link: ReceivingLink) -> bool:
        """Works on one frame of a link; False if it had none."""
        if link in self._links:  # between two frames: what is there waits for none that is only announced
            self._take_ended(link)
        if link not in self._links:
            return False
        broken = link.broken()  # asked first: what was heard before the break still counts
        frame = link.hear()
        if frame is not None:
            try:
                self._arrivals.handle(link, frame)
            except FrameError as error:
                self._links.break_off(link, error)
            return True
        if broken is not None:
            self._links.break_off(link, broken)
        return False

    @property
    def links(self) -> list[LinkAudit]:
        """Every link, quarantined ones included."""
        return self._links.audit()

    @property
    def restless(self) -> bool:
        """Whether to poll again within microseconds: a device has something under way that wakes nobody."""
        awaited = len(self._arrivals) > 0
        return any(link.restless(awaited=awaited) for link in self._links)

    @property
    def landing(self) -> bool:
        """Whether a device moves pieces, or is about to."""
        return any(link.scatter is not None and link.scatter.under_way for link in self._links)

    @property
    def expectant(self) -> bool:
        """Whether a device may write for a transfer that is expected: a wake takes a host some hundred
        microseconds, so whoever is not restless looks again sooner all the same."""
        return len(self._arrivals) > 0 and any(link.scatter is not None for link in self._links)

    @property
    def expected_transfers(self) -> int:
        return len(self._arrivals)

    def close(self) -> None:
        """Breaks every link and ends every thread."""
        self._links.close()
        self._arrivals.take_events()  # nobody will hear of them
        self._links.let_go()
