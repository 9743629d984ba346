"""The receiving end: verifies pieces in staging, scatters them, and reports when a transfer is complete.

    transfers.expect ─▶ (MetadataReceived) ─▶ TransferStarted ─▶ (CommitPending) ─▶ Committed ─▶ acknowledge,
                                                   └──────────▶ Withdrawn                        refuse
    transfers.forget at any time

One thread, the engine's loop, calls everything here. It calls `poll` whenever `wake` was called, and at least
every 100 ms, since deadlines are checked nowhere else. The sink gets bytes only while their transfer is
expected, and each byte once: after `forget` or `Withdrawn` not one more, so the blocks may be reused at once.
It gets a piece after its checksum was verified; a device computes the sum while it writes, so there a corrupt
piece has been written before its transfer is withdrawn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from baton.v1.worker_pb2 import LinkReport
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.link.interfaces import Listener
from kvtransfer.link.settings import LinkSettings, WindowSettings
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import FrameError
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import ReceiverCounters, ReceiverEvent
from kvtransfer.receiver.inbound_transfer import BlockSink, TransferContext
from kvtransfer.receiver.link import ReceivingLink
from kvtransfer.receiver.link_table import LinkTable
from kvtransfer.receiver.transfers import InboundTransfers
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.registry import start_listeners


class Receiver:
    """The listeners, links and expected transfers of one receiver."""

    def __init__(
        self,
        *,
        settings: LinkSettings,
        window: WindowSettings,
        signer: TicketSigner,
        sink: BlockSink,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        device: DeviceSink | None = None,
    ) -> None:
        """`device`: where blocks lie in device memory, to which a sender's device may write."""
        self.counters = ReceiverCounters([0] * len(settings.block_bytes))
        timeout_s = settings.peer_timeout_s
        context = TransferContext(signer, settings.identity.incarnation, sink, self.counters)
        self.transfers = InboundTransfers(context, timeout_s, clock)
        broke = self.transfers.link_broke
        self._links = LinkTable(settings, window, device, self.counters, clock, broke)
        self._window = window
        self._device = None if device is None else device.blocks.device
        self._wake = wake
        self._timeout = timeout_s

    def listen(self, config: ListenConfig) -> tuple[Endpoint, ...]:
        """Starts the listeners of `config`; returns the endpoints for tickets, the preferred one first."""
        started = start_listeners(config, self._window, self._timeout, self._wake, self._device)
        for listener in started:
            self._links.attach(listener)
        return tuple(listener.endpoint for listener in started)

    def attach(self, listener: Listener) -> None:
        """Takes requests from this listener too, and owns it from now on."""
        self._links.attach(listener)

    def poll(self, max_pieces: int) -> list[ReceiverEvent]:
        """Does what can be done at once, handling at most `max_pieces` frames; never blocks on a peer."""
        self._collect_all_moved()
        if not self.transfers.has_commits:
            self._keep_warm()
            self._handle_frames(max_pieces)
        if self.transfers.has_commits:
            self._wake()  # the engine admits the sequence before anything else is done here
        else:
            self._return_credits()
        return self.transfers.take_events()

    def progress(self, max_pieces: int) -> None:
        """Does the work of `poll`, but keeps events for the next `poll`."""
        self._collect_all_moved()
        self._handle_frames(max_pieces)
        self._return_credits()

    def _keep_warm(self) -> None:
        """Keeps the device from going idle while a transfer is expected; one link's kernel is enough."""
        if self._device is None or not len(self.transfers):
            return
        for link in self._links:
            if link.scatter is not None:
                link.scatter.keep_warm()
                return

    def _collect_all_moved(self) -> None:
        for link in self._links:
            self._collect_moved(link)

    def _collect_moved(self, link: ReceivingLink) -> None:
        """Collects what the link's device has moved, and starts it on what has arrived."""
        try:
            self.transfers.collect_moved(link)
        except FrameError as error:
            self._links.break_off(link, error)

    def _handle_frames(self, max_pieces: int) -> None:
        """Handles at most `max_pieces` frames, one of each link in turn."""
        self._return_credits()
        self._links.take_requests()
        budget = max_pieces
        ready = deque(self._links)
        while ready and budget > 0:
            link = ready.popleft()
            if self._handle_one(link):
                ready.append(link)
                budget -= 1
        # A link with unread frames is not judged yet: the awaited answer may be among them.
        self._links.break_overdue([link for link in self._links if link not in ready])
        self._links.free_fenced()
        if ready:
            self._wake()
        self._links.rotate()

    def _return_credits(self) -> None:
        """Returns freed credits, except on links all of whose transfers have their commits: building the
        frame takes time, which would delay an admission. Those go with the answer to a commit."""
        for link in self._links:
            if not self.transfers.all_commits_received(link):
                link.flush()

    def _handle_one(self, link: ReceivingLink) -> bool:
        """Handles one frame of a link; False if it had none."""
        if link in self._links:  # between frames, so that arrived pieces do not wait for announced ones
            self._collect_moved(link)
        if link not in self._links:
            return False
        failure = link.wire.failure()  # checked first: frames received before it count
        frame = link.wire.receive()
        if frame is not None:
            try:
                self.transfers.handle(link, frame)
            except FrameError as error:
                self._links.break_off(link, error)
            return True
        if failure is not None:
            self._links.break_off(link, failure)
        return False

    @property
    def links(self) -> list[LinkReport]:
        """The state of every link, quarantined ones included."""
        return self._links.report()

    @property
    def busy_poll(self) -> bool:
        """True if the receiver should be polled again within microseconds: a device's work will end without a
        wake-up."""
        expecting = len(self.transfers) > 0
        return any(link.busy_poll(expecting=expecting) for link in self._links)

    @property
    def moving(self) -> bool:
        """True if a device moves pieces, or is about to."""
        return any(link.scatter is not None and link.scatter.busy for link in self._links)

    @property
    def poll_soon(self) -> bool:
        """True if a device may write for an expected transfer: a wake-up takes some hundred microseconds, so
        polling sooner saves time even where `busy_poll` is False."""
        return len(self.transfers) > 0 and any(link.scatter is not None for link in self._links)

    def close(self) -> None:
        """Breaks every link and ends every thread."""
        self._links.close()
        self.transfers.take_events()  # there will be no further poll
        self._links.free_fenced()
