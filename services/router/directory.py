"""Who is there: asks every address it is told of who it is, twice a second, and follows decoders.

A changed incarnation is a new worker; the old one is lost. An address that does not answer gets
no new work; what runs there goes on as long as its token stream does.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.v1.worker_pb2 import DescribeRequest
from services.common.grpc_server import channel_options
from services.common.logs import get_log
from services.router.follow import follow
from services.router.worker import Peer, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.v1.worker_pb2 import DescribeResponse

HEARTBEAT_S = 0.5
_DESCRIBE_S = 2.0
# Cancels to a worker that was removed may still be on their way, or about to be sent.
_CLOSE_GRACE_S = 5.0

_log = get_log("directory")


class Directory:
    """The live workers by address; `on_change` is called whenever one may take more or less."""

    def __init__(self, addresses: Sequence[str], on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._addresses = dict.fromkeys(addresses)
        self.peers: dict[str, Peer] = {}
        self._workers: dict[str, Worker] = {}
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        # At most one an address.
        self._follows: dict[str, asyncio.Task[None]] = {}
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

    @property
    def max_context_tokens(self) -> int | None:
        """The shortest context of the live workers: what any pair can serve."""
        return min((worker.described.max_context_tokens for worker in self.workers), default=None)

    @property
    def vocab_size(self) -> int | None:
        """The smallest vocabulary of the live workers."""
        return min((worker.described.vocab_size for worker in self.workers), default=None)

    def start(self) -> None:
        """Opens the channels and begins the heartbeats; call from a running loop."""
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
        peer = Peer(address, grpc.aio.insecure_channel(address, options=channel_options()))
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
        tasks = [*self._heartbeats.values(), *self._follows.values(), *self._closing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self.peers.values():
            await peer.channel.close(None)

    async def _watch(self, peer: Peer) -> None:
        while True:
            worker = self._workers.get(peer.address)
            claimed = worker.claimed_slots if worker is not None else 0
            asked_at = time.monotonic()
            try:
                described = await peer.worker.Describe(DescribeRequest(), timeout=_DESCRIBE_S)
            except grpc.aio.AioRpcError as error:
                self._missed(peer, error)
            else:
                self._heard(peer, described, claimed, asked_at)
            await asyncio.sleep(HEARTBEAT_S)

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
        worker = Worker(peer, described, self._on_change)
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


async def _close_later(peer: Peer) -> None:
    """Who still holds the worker may call it for a moment, and is told that it is away. On a closed channel
    grpc.aio raises a UsageError instead, which is a fault of ours."""
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
