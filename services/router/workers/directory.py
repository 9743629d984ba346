"""The known workers: polls every known address twice a second, and follows the token streams of decoders.

A new incarnation at an address is a new worker, and the old one is lost. A worker that does not answer a poll
gets no new work. One that answers nothing for `LIVENESS_TIMEOUT_S`, or whose token stream is silent for that
time, is lost, and its sequences continue elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import grpc
import grpc.aio

from baton.v1.types_pb2 import Attempt
from baton.v1.worker_pb2 import DescribeRequest, DescribeResponse
from services.common.observability.logs import get_log
from services.common.rpc.grpc_server import channel_options
from services.common.rpc.internal_rpc import internal_channel
from services.router.workers.certificates import WorkerCertificates
from services.router.workers.liveness import CHECK_INTERVAL_S
from services.router.workers.peer import Peer
from services.router.workers.token_stream import follow
from services.router.workers.worker import Worker

HEARTBEAT_S = 0.5
# Long enough for a worker that stalls for a second.
_DESCRIBE_S = 1.25
# A worker that missed a poll may be reached over a new connection before its liveness timeout.
RETRY_S = 0.1
# Former ids of this router at a worker that it lost and found again; the worker ends what it runs for them.
_MAX_FORMER_IDS = 8
# Seconds for which cancels to a removed worker may still be sent.
_CLOSE_GRACE_S = 5.0

_log = get_log("directory")


class Directory:
    """Finds workers at a changing list of addresses."""

    def __init__(
        self,
        addresses: Sequence[str],
        on_change: Callable[[], None],
        on_orphan: Callable[[Worker, Attempt], None] = lambda worker, attempt: None,
        cluster_secret: str = "",
        certificates: WorkerCertificates | None = None,
    ) -> None:
        """`on_change` is called whenever a worker may take more or less work, and when one comes or goes;
        `on_orphan` with each output of an attempt that no request of this router waits for.
        `certificates`: None: workers are called in plaintext."""
        self._on_orphan = on_orphan
        self._cluster_secret = cluster_secret
        self._certificates = certificates
        self._on_change = on_change
        self._addresses = dict.fromkeys(addresses)
        self.peers: dict[str, Peer] = {}
        self._workers: dict[str, Worker] = {}
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        # The tasks of open token streams, by address.
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._liveness: asyncio.Task[None] | None = None
        # Open token streams that ended, for any reason.
        self.token_stream_breaks = 0
        # Addresses that are watched only as long as they answer.
        self._expiring: frozenset[str] = frozenset()
        # Groups of workers, by address.
        self._groups: Mapping[str, str] = {}
        # Channels of removed addresses, until their last calls have ended.
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> list[Worker]:
        """Every worker that is not lost, in the order of their addresses."""
        known = (self._workers.get(address) for address in self._addresses)
        return [worker for worker in known if worker is not None and not worker.lost]

    def at(self, address: str) -> Worker | None:
        """The last worker found at an address, lost or not."""
        return self._workers.get(address)

    def start(self) -> None:
        """Opens channels and begins to poll; call it on the event loop."""
        self._liveness = _logged(asyncio.create_task(self._check_liveness()))
        for address in self._addresses:
            self.add(address)

    def set_addresses(self, addresses: Sequence[str], expiring: Sequence[str] = ()) -> None:
        """Watches exactly these addresses, in this order. A worker at any other address is lost at once; one
        at an `expiring` address stays until it does not answer."""
        for address in [address for address in self._addresses if address not in addresses]:
            self.remove(address)
        for address in addresses:
            if address not in self.peers:
                self.add(address)
        self._addresses = dict.fromkeys(addresses)
        self._expiring = frozenset(expiring)
        self._on_change()

    def set_groups(self, groups: Mapping[str, str]) -> None:
        """Sets the groups of workers, by address, as the registry lists them."""
        self._groups = groups
        for worker in self._workers.values():
            worker.group = groups.get(worker.peer.address, worker.group)

    def add(self, address: str) -> None:
        """Watches another address for a worker."""
        self._addresses[address] = None
        tls = None if self._certificates is None else self._certificates.channel(address)
        peer = Peer(address, internal_channel(address, channel_options(), self._cluster_secret, tls))
        self.peers[address] = peer
        self._heartbeats[address] = _logged(asyncio.create_task(self._poll(peer)))

    def remove(self, address: str) -> None:
        """Stops watching an address. Its worker, and what runs there, is lost at once."""
        del self._addresses[address]
        for tasks in (self._heartbeats, self._streams):
            if (task := tasks.pop(address, None)) is not None:
                task.cancel()
        if (worker := self._workers.pop(address, None)) is not None:
            worker.lose("it has ended")
        if self._certificates is not None:
            self._certificates.forget(address)
        closing = asyncio.create_task(_close_later(self.peers.pop(address)))
        self._closing.add(_logged(closing))
        closing.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        """Stops polling, ends the token streams and closes the channels."""
        liveness = [] if self._liveness is None else [self._liveness]
        tasks = [*liveness, *self._heartbeats.values(), *self._streams.values(), *self._closing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self.peers.values():
            await peer.channel.close(None)

    async def _poll(self, peer: Peer) -> None:
        while True:
            worker = self._workers.get(peer.address)
            claimed = worker.claimed_slots if worker is not None else 0
            was_lost = worker is not None and worker.lost
            asked_at = time.monotonic()
            if worker is not None:
                worker.others.poll_sent()
            try:
                described = await peer.worker.Describe(DescribeRequest(), timeout=_DESCRIBE_S)
            except grpc.aio.AioRpcError as error:
                self._poll_failed(peer, error)
            else:
                # An answer to a poll from before the worker was lost does not mean that it is back.
                if worker is None or worker.lost == was_lost:
                    self._poll_answered(peer, described, claimed, asked_at)
            worker = self._workers.get(peer.address)
            unsure = worker is not None and not (worker.lost or worker.reachable)
            await asyncio.sleep(min(RETRY_S, HEARTBEAT_S) if unsure else HEARTBEAT_S)

    async def _check_liveness(self) -> None:
        """Loses workers whose liveness timeout has passed."""
        while True:
            for worker in self.workers:
                worker.check_liveness()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _poll_failed(self, peer: Peer, error: grpc.aio.AioRpcError) -> None:
        worker = self._workers.get(peer.address)
        if worker is not None and worker.reachable and not worker.lost:
            _log.warning("worker_unresponsive", worker=worker.name, status=error.code().name)
            worker.unreachable()
        if peer.address in self._expiring and not (worker is not None and worker.following):
            self.remove(peer.address)

    def _poll_answered(self, peer: Peer, described: DescribeResponse, claimed: int, asked_at: float) -> None:
        worker = self._workers.get(peer.address)
        if worker is not None and not worker.lost:
            if worker.identity.incarnation == described.identity.incarnation:
                worker.update(described, claimed, asked_at)
                return
            worker.lose("it was started again")
        self._add_worker(peer, described)

    def _add_worker(self, peer: Peer, described: DescribeResponse) -> None:
        former = _former_ids(self._workers.get(peer.address), described)
        worker = Worker(peer, described, self._on_change, former, self._on_orphan)
        worker.group = self._groups.get(peer.address, "")
        self._workers[peer.address] = worker
        _log.info("worker_found", worker=worker.name, address=peer.address)
        earlier = self._streams.pop(peer.address, None)
        if earlier is not None:
            earlier.cancel()
        if worker.decodes:
            self._streams[peer.address] = _logged(asyncio.create_task(follow(worker, self._stream_ended)))
        self._on_change()

    def _stream_ended(self) -> None:
        self.token_stream_breaks += 1


def _former_ids(before: Worker | None, described: DescribeResponse) -> tuple[bytes, ...]:
    """This router's former ids at the same incarnation of a worker that it had lost."""
    if before is None or before.identity.incarnation != described.identity.incarnation:
        return ()
    return (*before.former_router_ids, before.router_id)[-_MAX_FORMER_IDS:]


async def _close_later(peer: Peer) -> None:
    """Closes the channel after a while: calls that are made until then get UNAVAILABLE, whereas grpc.aio
    raises UsageError for calls on a closed channel."""
    try:
        await asyncio.sleep(_CLOSE_GRACE_S)
    finally:
        await peer.channel.close(None)


def _logged(task: asyncio.Task[None]) -> asyncio.Task[None]:
    """Has a task log the exception that it ends with."""

    def log_error(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("watch_task_failed", exc_info=error)

    task.add_done_callback(log_error)
    return task
