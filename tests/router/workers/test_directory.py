"""The list of workers changes while the router runs."""

from __future__ import annotations

import contextlib

from baton.v1.decode_pb2 import CancelRequest
from baton.v1.types_pb2 import Attempt, WorkerRole
from services.router.workers.directory import Directory
from tests.router.conftest import until
from tests.router.fake_workers import FakeCluster, FakeWorker


async def test_workers_come_and_go() -> None:
    cluster = FakeCluster()
    changes: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeWorker(f"both-{index}", WorkerRole.WORKER_ROLE_BOTH, cluster) for index in range(3)]
        addresses = [(await stack.enter_async_context(fake.serving())).address for fake in fakes]
        directory = Directory([], lambda: changes.append(1))
        directory.start()
        try:
            directory.set_addresses(addresses[:2])
            await until(lambda: [worker.name for worker in directory.workers] == ["both-0", "both-1"])
            kept, gone = directory.workers[1], directory.workers[0]
            directory.set_addresses(addresses[1:])
            assert gone.lost
            assert not kept.lost
            # A caller that still has the lost worker may have to cancel something there.
            attempt = Attempt(request_id=b"r", number=1)
            await gone.peer.decode.Cancel(CancelRequest(attempt=attempt), timeout=5)
            assert fakes[0].decode.cancels == 1
            await until(lambda: [worker.name for worker in directory.workers] == ["both-1", "both-2"])
            assert directory.workers[0] is kept
            assert sorted(directory.peers) == sorted(addresses[1:])
            before = len(changes)
            directory.set_addresses([])
            assert directory.workers == []
            assert len(changes) > before
        finally:
            await directory.stop()
