"""Who is there: asks every known address who it is, twice a second, and follows decoders.

A changed incarnation is a new worker; the old one is lost. An address that does not answer gets no new work
at first. A worker that does not answer for `SILENT_S`, or whose token stream is silent for so long, is lost,
and what runs there goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.v1.worker_pb2 import DescribeRequest
from services.common.observability.logs import get_log
from services.common.rpc.grpc_server import channel_options
from services.common.rpc.internal_rpc import internal_channel
from services.router.workers.silence import LOOK_S
from services.router.workers.token_stream import follow
from services.router.workers.worker import Peer, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.v1.types_pb2 import Attempt
    from baton.v1.worker_pb2 import DescribeResponse

HEARTBEAT_S = 0.5
# A worker that stalls for a second still answers in time.
_DESCRIBE_S = 1.25
# One that did not may be heard over another connection before it counts as silent.
_ASK_AGAIN_S = 0.1
# Ids by which a worker is asked to end what it runs for a router that lost it and found it again.
_MOST_FORMER_IDS = 8
# Cancels to a worker that was removed may still be on their way, or about to be sent.
_CLOSE_GRACE_S = 5.0

_log = get_log("directory")


class Directory:
    """The live workers by address; `on_change` is called whenever one may take more or less."""

    def __init__(
        self, addresses: Sequence[str], on_change: Callable[[], None], cluster_secret: str = ""
    ) -> None:
        self._on_change = on_change
        self._cluster_secret = cluster_secret
        self._addresses = dict.fromkeys(addresses)
        self.peers: dict[str, Peer] = {}
        self._workers: dict[str, Worker] = {}
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        # At most one an address.
        self._follows: dict[str, asyncio.Task[None]] = {}
        self._judging: asyncio.Task[None] | None = None
        # Called with each output of an attempt that this router does not wait for.
        self.on_orphan: Callable[[Worker, Attempt], None] = lambda worker, attempt: None
        # Open token streams that ended, whoever ended them.
        self.follow_breaks = 0
        # Watched only for as long as they answer.
        self._lapsed: frozenset[str] = frozenset()
        # Channels of removed addresses, until their last calls have ended.
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> list[Worker]:
        """Every worker that is not lost, in the order of configuration."""
        known = (self._workers.get(address) for address in self._addresses)
        return [worker for worker in known if worker is not None and not worker.lost]

    def at(self, address: str) -> Worker | None:
        """The last worker found at an address, lost or not."""
        return self._workers.get(address)

    def start(self) -> None:
        """Opens the channels and begins the heartbeats; call from a running loop."""
        self._judging = _loud(asyncio.create_task(self._judge()))
        for address in self._addresses:
            self.add(address)

    def set_addresses(self, addresses: Sequence[str], lapsed: Sequence[str] = ()) -> None:
        """Watches exactly these from now on, in this order. What ran at one that is gone is lost; one of
        the `lapsed` among them goes once it does not answer."""
        for address in [address for address in self._addresses if address not in addresses]:
            self.remove(address)
        for address in addresses:
            if address not in self.peers:
                self.add(address)
        self._addresses = dict.fromkeys(addresses)
        self._lapsed = frozenset(lapsed)
        self._on_change()

    def add(self, address: str) -> None:
        """Watches one more address."""
        self._addresses[address] = None
        peer = Peer(address, internal_channel(address, channel_options(), self._cluster_secret))
        self.peers[address] = peer
        self._heartbeats[address] = _loud(asyncio.create_task(self._watch(peer)))

    def remove(self, address: str) -> None:
        """Forgets an address: no new work, and what runs there is lost at once."""
        del self._addresses[address]
        for watches in (self._heartbeats, self._follows):
            if (watch := watches.pop(address, None)) is not None:
                watch.cancel()
        if (worker := self._workers.pop(address, None)) is not None:
            worker.lose("it has ended")
        closing = asyncio.create_task(_close_later(self.peers.pop(address)))
        self._closing.add(_loud(closing))
        closing.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        """Ends heartbeats and streams, closes the channels."""
        judging = [] if self._judging is None else [self._judging]
        tasks = [*judging, *self._heartbeats.values(), *self._follows.values(), *self._closing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self.peers.values():
            await peer.channel.close(None)

    async def _watch(self, peer: Peer) -> None:
        while True:
            worker = self._workers.get(peer.address)
            claimed = worker.claimed_slots if worker is not None else 0
            was_lost = worker is not None and worker.lost
            asked_at = time.monotonic()
            try:
                described = await peer.worker.Describe(DescribeRequest(), timeout=_DESCRIBE_S)
            except grpc.aio.AioRpcError as error:
                self._missed(peer, error)
            else:
                # An answer to what was asked before it was lost does not mean that it is there again.
                if worker is None or worker.lost == was_lost:
                    self._heard(peer, described, claimed, asked_at)
            worker = self._workers.get(peer.address)
            unsure = worker is not None and not (worker.lost or worker.reachable)
            await asyncio.sleep(min(_ASK_AGAIN_S, HEARTBEAT_S) if unsure else HEARTBEAT_S)

    async def _judge(self) -> None:
        """Gives up workers that are silent."""
        while True:
            for worker in self.workers:
                worker.judge()
            await asyncio.sleep(LOOK_S)

    def _missed(self, peer: Peer, error: grpc.aio.AioRpcError) -> None:
        worker = self._workers.get(peer.address)
        if worker is not None and worker.reachable and not worker.lost:
            _log.warning("worker_silent", worker=worker.name, status=error.code().name)
            worker.unreachable()
        if peer.address in self._lapsed and not (worker is not None and worker.following):
            self.remove(peer.address)

    def _heard(self, peer: Peer, described: DescribeResponse, claimed: int, asked_at: float) -> None:
        worker = self._workers.get(peer.address)
        if worker is not None and not worker.lost:
            if worker.identity.incarnation == described.identity.incarnation:
                worker.update(described, claimed, asked_at)
                return
            worker.lose("it was started again")
        self._welcome(peer, described)

    def _welcome(self, peer: Peer, described: DescribeResponse) -> None:
        former = _former_ids(self._workers.get(peer.address), described)
        worker = Worker(peer, described, self._on_change, former, self.on_orphan)
        self._workers[peer.address] = worker
        _log.info("worker_found", worker=worker.name, address=peer.address)
        earlier = self._follows.pop(peer.address, None)
        if earlier is not None:
            earlier.cancel()
        if worker.decodes:
            self._follows[peer.address] = _loud(asyncio.create_task(follow(worker, self._stream_broke)))
        self._on_change()

    def _stream_broke(self) -> None:
        self.follow_breaks += 1


def _former_ids(before: Worker | None, described: DescribeResponse) -> tuple[bytes, ...]:
    """This router's earlier ids at the same start of a worker, which it lost meanwhile."""
    if before is None or before.identity.incarnation != described.identity.incarnation:
        return ()
    return (*before.former_router_ids, before.router_id)[-_MOST_FORMER_IDS:]


async def _close_later(peer: Peer) -> None:
    """Callers that still hold the worker may call it for a moment, and get UNAVAILABLE. On a closed channel
    grpc.aio raises a UsageError instead."""
    try:
        await asyncio.sleep(_CLOSE_GRACE_S)
    finally:
        await peer.channel.close(None)


def _loud(task: asyncio.Task[None]) -> asyncio.Task[None]:
    """A watcher that dies of a fault of ours says so at once."""

    def tell(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("watcher_died", exc_info=error)

    task.add_done_callback(tell)
    return task
