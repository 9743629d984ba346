"""A disk that fails is taken out of use, reported once, tried again after growing pauses, never spun on."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.prefix_cache.disk_store import DiskBlockStore, FinishedRead
from baton.engine.prefix_cache.outage import FIRST_PAUSE_S, LONGEST_PAUSE_S, Outage
from tests.engine.prefix_cache.test_disk_store import KEY, SIZE, data, file, name
from tests.engine.prefix_cache.test_host_store import Case
from tests.support.waiting import block_until


class Disk:
    """A store on a disk that fails as the test says, in virtual time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.folder = folder
        self.error: int | None = None
        self.writes = self.failures = 0
        self.reported: list[str | None] = []
        self._patched = monkeypatch
        real = os.replace

        def replace(source: Path, target: Path) -> None:
            self.writes += 1
            if self.error is not None:
                self.failures += 1
                raise OSError(self.error, os.strerror(self.error))
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        self.store = self.opened()

    def opened(self, most: int = 100) -> DiskBlockStore:
        return DiskBlockStore(
            self.folder,
            KEY,
            SIZE,
            most * (SIZE + 40),
            lambda: None,
            self.reported.append,
            lambda: self.now,
        )

    def write(self, number: int) -> list[FinishedRead]:
        """Writes a block, and waits until that has ended."""
        writes = self.writes
        self.store.write(name(number), data(number))
        block_until(lambda: self.writes > writes or not self.folder.is_dir())
        return self.settled()

    def settled(self) -> list[FinishedRead]:
        block_until(lambda: not self.store.queued)
        time.sleep(0.02)
        return self.store.poll()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path / "blocks", monkeypatch)
    yield made
    made.store.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_tried_after_growing_pauses(disk: Disk, error: int) -> None:
    assert disk.write(1) == []
    disk.error = error
    assert disk.write(2) == [FinishedRead(name(2), None)]
    assert disk.reported == [os.strerror(error)]
    tries = []
    for _ in range(4000):
        disk.now += 0.1
        if disk.store.accepts:
            assert disk.write(3) == [FinishedRead(name(3), None)]
            tries.append(disk.now)
        else:
            assert disk.store.write(name(3), data(3)) == [name(3)]
    pauses = [round(after - before) for before, after in itertools.pairwise(tries)]
    assert pauses[:7] == [2, 4, 8, 16, 32, 60, 60]
    assert disk.reported == [os.strerror(error)]
    assert (disk.store.corrupt, disk.store.failed) == (0, 1 + len(tries))
    assert not list(disk.folder.glob("*.kvpart")), "what a full disk keeps of a failed write"
    disk.error = None
    disk.now += LONGEST_PAUSE_S
    assert disk.write(4) == []
    assert disk.reported == [os.strerror(error), None]
    assert disk.write(5) == []
    assert disk.store.hashes() == {name(1), name(4), name(5)}


def test_what_a_full_disk_has_is_still_read(disk: Disk) -> None:
    disk.write(1)
    disk.error = errno.ENOSPC
    disk.write(2)
    assert disk.store.request(name(1))
    assert disk.settled() == [FinishedRead(name(1), data(1))]


def test_all_blocks_of_a_removed_folder_are_lost_and_it_is_made_again(disk: Disk) -> None:
    for number in range(1, 4):
        disk.write(number)
    shutil.rmtree(disk.folder)
    lost = disk.write(4)
    assert {one.block_hash for one in lost} == {name(number) for number in range(1, 5)}
    assert disk.store.hashes() == set()
    assert disk.store.corrupt == 0
    assert len(disk.reported) == 1
    disk.now += FIRST_PAUSE_S
    assert disk.store.accepts
    disk.store.write(name(5), data(5))
    block_until(file(disk.folder, 5).exists)
    disk.settled()
    assert disk.reported[1:] == [None]
    disk.store.close()
    disk.store = disk.opened()
    assert disk.store.hashes() == {name(5)}


def test_a_folder_that_is_removed_before_a_read(disk: Disk) -> None:
    disk.write(1)
    disk.write(2)
    shutil.rmtree(disk.folder)
    assert disk.store.request(name(1))
    assert {one.block_hash for one in disk.settled()} == {name(1), name(2)}
    assert (len(disk.reported), disk.store.corrupt) == (1, 0)


def test_many_failures_at_once_are_one(disk: Disk) -> None:
    """Writes that were queued when the disk failed do not lengthen the pause."""
    disk.error = errno.ENOSPC
    for number in range(10):
        disk.store.write(name(number), data(number))
    disk.settled()
    assert disk.store.failed == 10
    disk.now += FIRST_PAUSE_S
    assert disk.store.accepts
    disk.store.write(name(20), data(20))
    assert not disk.store.accepts, "one try at a time"


@pytest.mark.parametrize("mine", [True, False])
def test_a_start_on_a_full_disk(disk: Disk, mine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker serves without the disk, or with what an earlier start of the same owner left there."""
    disk.write(1)
    disk.store.close()
    if not mine:
        (disk.folder / "owner").unlink()

    def full(path: Path, text: str, encoding: str | None = None) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        disk.store = disk.opened()
    assert disk.store.hashes() == ({name(1)} if mine else set())
    assert len(disk.reported) == (not mine)
    disk.now += FIRST_PAUSE_S
    assert disk.write(2) == []
    assert disk.store.outage is None


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"):
        DiskBlockStore(tmp_path / "taken", KEY, SIZE, 10_000, lambda: None)


def test_a_loop_with_nothing_to_do_stays_idle_while_the_disk_is_gone(tmp_path: Path) -> None:
    case = Case(room=4, disk=tmp_path / "blocks", disk_room=20)
    assert case.behind is not None
    behind = case.behind
    shutil.rmtree(tmp_path / "blocks")
    case.put(1, 2, 3, 4)
    block_until(lambda: not case.store.poll() and behind.failed > 0)
    failed = behind.failed
    assert sum(case.store.poll() for _ in range(5000)) <= 2, "a try and its failure"
    assert behind.failed <= failed + 1


def test_a_read_that_hangs_is_not_waited_for_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait for a block as long as reads usually take; one that takes longer tells so meanwhile."""
    disk.write(1)
    begun, ends, real = threading.Event(), threading.Event(), Path.read_bytes

    def hangs(path: Path) -> bytes:
        begun.set()
        assert ends.wait(10)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", hangs)
    assert disk.store.seconds_each == 0
    disk.store.request(name(1))
    assert begun.wait(10)
    time.sleep(0.05)
    assert disk.store.seconds_each >= 0.05
    ends.set()
    assert disk.settled() == [FinishedRead(name(1), data(1))]


def test_pauses_double_up_to_the_longest() -> None:
    now = 0.0
    outage = Outage(lambda: now)
    outage.failed("full")
    pauses = []
    for _ in range(9):
        began = now
        while not outage.may_try:
            now += 0.5
        pauses.append(now - began)
        outage.tries()
        assert not outage.may_try
        outage.failed("full")
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    outage.worked()
    assert outage.may_try
    outage.failed("again")
    now += FIRST_PAUSE_S
    assert outage.may_try
