"""The lists of workers of parent and registry are merged into the addresses that the directory watches."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

from baton.state import Member, new_incarnation
from baton.v1.types_pb2 import WorkerRole
from services.router.workers.directory import Directory
from services.router.workers.discovery import Discovery
from tests.router.conftest import until
from tests.router.fake_workers import FakeCluster, FakeWorker

MODEL = "fake"
A, B, C = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"


class Watched(Directory):
    """A directory that only records its addresses."""

    def __init__(self) -> None:
        super().__init__((), lambda: None)
        self.expiring: list[str] = []

    def set_addresses(self, addresses: Sequence[str], expiring: Sequence[str] = ()) -> None:
        self.peers = dict.fromkeys(addresses)  # type: ignore[assignment]
        self.expiring = list(expiring)

    @property
    def seen(self) -> list[str]:
        return list(self.peers)


def listed(address: str, **fields: object) -> Member:
    described = {
        "name": f"both-{address}".replace(":", "-").replace("[", "").replace("]", ""),
        "incarnation": new_incarnation(),
        "role": "both",
        "model": MODEL,
        "addresses": {"grpc": address},
    }
    return Member.model_validate(described | fields)


def discovery() -> tuple[Discovery, Watched]:
    watched = Watched()
    return Discovery(watched, MODEL), watched


def test_the_two_lists_are_one_and_a_worker_on_both_is_one() -> None:
    both, watched = discovery()
    both.set_registered([listed(B), listed(A)])
    assert watched.seen == [B, A]
    both.set_parent_workers([A, C])
    assert watched.seen == [A, C, B]


def test_workers_with_another_secret_are_ignored() -> None:
    watched = Watched()
    ours = Discovery(watched, MODEL, secret="ours")
    ours.set_registered([listed(A), listed(B, secret_name="ours"), listed(C, secret_name="theirs")])
    assert watched.seen == [B]


def test_a_worker_that_the_parent_no_longer_lists_has_ended() -> None:
    both, watched = discovery()
    first, other = listed(A), listed(B)
    both.set_parent_workers([A])
    both.set_registered([first, other])
    both.set_parent_workers([])
    assert (watched.seen, watched.expiring) == ([B], [])
    both.set_registered([first, other])
    assert watched.seen == [B], "its lease has yet to lapse"
    # Another start at the very same address is another worker.
    both.set_registered([listed(A), other])
    assert set(watched.seen) == {A, B}


def test_the_registry_removes_no_worker() -> None:
    both, watched = discovery()
    both.set_parent_workers([A])
    both.set_registered([listed(A), listed(B)])
    both.set_registered([])
    assert (watched.seen, watched.expiring) == ([A, B], [B])
    both.set_registered([listed(B)])
    assert (watched.seen, watched.expiring) == ([A, B], [])


def test_only_reachable_workers_of_this_model_are_used() -> None:
    both, watched = discovery()
    here = socket.gethostname()
    both.set_registered(
        [
            listed(A, model="another"),
            listed(A, role="router"),
            listed(A, rank=1, rank_count=2),
            listed(A, addresses={"transfer": A}),
            listed("127.0.0.1:1", host="elsewhere"),
            listed("[::1]:1", host="elsewhere"),
            listed("localhost:1", host="elsewhere"),
            listed("127.0.0.1:2", host=here),
            listed(C, host="elsewhere"),
        ]
    )
    assert watched.seen == ["127.0.0.1:2", C]


async def test_an_expiring_worker_stays_as_long_as_it_answers() -> None:
    cluster = FakeCluster()
    fake = FakeWorker("both-0", WorkerRole.WORKER_ROLE_BOTH, cluster)
    directory = Directory([], lambda: None)
    directory.start()
    both = Discovery(directory, MODEL)
    async with contextlib.AsyncExitStack() as stack:
        address = (await stack.enter_async_context(fake.serving())).address
        both.set_registered([listed(address, host=socket.gethostname())])
        await until(lambda: [worker.alive for worker in directory.workers] == [True])
        (worker,) = directory.workers
        both.set_registered([])
        described = worker.described
        await until(lambda: worker.described is not described)  # it has answered since
        assert directory.workers == [worker]
        assert worker.alive
    await until(lambda: not directory.peers)
    assert worker.lost
    await directory.stop()


async def test_groups_of_the_registry(model_folder: Path) -> None:
    """A worker has its group, whether it is found before or after the registry is read."""
    directory = Directory((), lambda: None)
    finder = Discovery(directory, MODEL)
    worker = FakeWorker("both-0", WorkerRole.WORKER_ROLE_BOTH, FakeCluster.like(model_folder))
    async with worker.serving():
        directory.start()
        here = socket.gethostname()
        finder.set_registered([listed(worker.address, host=here, group="pod-a")])
        await until(lambda: directory.at(worker.address) is not None)
        found = directory.at(worker.address)
        assert found is not None
        assert found.group == "pod-a"
        finder.set_registered([listed(worker.address, host=here, group="pod-b")])
        assert found.group == "pod-b"
        await directory.stop()
