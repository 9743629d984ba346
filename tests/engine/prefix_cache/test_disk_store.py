"""Blocks on a disk: what comes back is what was written, or a miss; nothing waits or grows without bound."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from baton.engine.prefix_cache.disk_store import MOST_QUEUED, DiskBlockStore, FinishedRead
from tests.support.waiting import block_until

SIZE = 100
KEY = b"k" * 16


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def data(number: int) -> bytes:
    return bytes([number % 256]) * SIZE


def opened(folder: Path, *, key: bytes = KEY, most: int = 4) -> DiskBlockStore:
    return DiskBlockStore(folder, key, SIZE, most * (SIZE + 40), lambda: None)


def read(disk: DiskBlockStore, number: int) -> FinishedRead | None:
    """Returns the outcome of asking for a block; None where it is not there to be asked for."""
    if not disk.request(name(number)):
        return None
    deadline = time.monotonic() + 20
    while not (came := disk.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return came[-1]


def file(folder: Path, number: int) -> Path:
    return folder / f"{name(number).hex()}.kv"


def test_what_was_written_is_read_in_this_life_and_the_next(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    assert disk.write(name(1), data(1)) == []
    assert disk.seconds_each == 0
    assert read(disk, 1) == FinishedRead(name(1), data(1))
    assert 0 < disk.seconds_each < 1
    disk.close()
    again = opened(tmp_path)
    assert again.hashes() == {name(1)}
    assert read(again, 1) == FinishedRead(name(1), data(1))
    assert read(again, 2) is None
    again.close()


def test_the_oldest_goes_where_the_budget_is_used_up(tmp_path: Path) -> None:
    disk = opened(tmp_path, most=2)
    disk.write(name(1), data(1))
    disk.write(name(2), data(2))
    assert read(disk, 1) is not None  # now 2 is the oldest
    assert disk.write(name(3), data(3)) == [name(2)]
    assert disk.hashes() == {name(1), name(3)}
    disk.close()
    assert sorted(path.stem for path in tmp_path.glob("*.kv")) == sorted([name(1).hex(), name(3).hex()])


@pytest.mark.parametrize("spoil", ["flip", "truncate", "swap", "delete"])
def test_a_spoilt_file_is_a_miss_and_goes(tmp_path: Path, spoil: str) -> None:
    disk = opened(tmp_path)
    disk.write(name(1), data(1))
    disk.write(name(2), data(2))
    block_until(file(tmp_path, 2).exists)
    spoilt = file(tmp_path, 1)
    whole = bytearray(spoilt.read_bytes())
    if spoil == "flip":
        whole[-1] ^= 1
        spoilt.write_bytes(whole)
    elif spoil == "truncate":
        spoilt.write_bytes(whole[:-1])
    elif spoil == "swap":  # another block's file under this name
        spoilt.write_bytes(file(tmp_path, 2).read_bytes())
    else:
        spoilt.unlink()
    assert read(disk, 1) == FinishedRead(name(1), None)
    assert disk.corrupt == 1
    assert disk.hashes() == {name(2)}
    assert not spoilt.exists()
    assert read(disk, 2) == FinishedRead(name(2), data(2))
    disk.close()


def test_another_owners_files_and_half_written_ones_go_at_the_start(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    disk.write(name(1), data(1))
    disk.close()
    (tmp_path / f"{name(2).hex()}.kvpart").write_bytes(b"half")
    file(tmp_path, 3).write_bytes(b"of another size")
    (tmp_path / "notes.txt").write_text("an operator's own")
    mine = opened(tmp_path)
    assert mine.hashes() == {name(1)}
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".kv", ".txt"]
    mine.close()
    other = opened(tmp_path, key=b"o" * 16)
    assert other.hashes() == set()
    assert not list(tmp_path.glob("*.kv*"))
    other.close()


def test_a_disk_that_does_not_keep_up_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, asked = threading.Event(), threading.Event()
    replace = os.replace

    def held_up(source: Path, target: Path) -> None:
        asked.set()
        assert slow.wait(10)
        replace(source, target)

    monkeypatch.setattr(os, "replace", held_up)
    disk = opened(tmp_path, most=1000)
    gone = [disk.write(name(number), data(number)) for number in range(200)]
    assert asked.wait(5)
    taken = [number for number, names in enumerate(gone) if not names]
    assert len(taken) <= MOST_QUEUED + 1
    assert disk.dropped == 200 - len(taken)
    assert [names[0] for names in gone if names] == [name(n) for n in range(200) if n not in taken]
    slow.set()
    disk.close()
    assert len(list(tmp_path.glob("*.kv"))) == len(taken)


def test_a_disk_that_is_full_costs_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    woken = threading.Event()
    disk = DiskBlockStore(tmp_path, KEY, SIZE, 10_000, woken.set)
    monkeypatch.setattr(os, "replace", full)
    disk.write(name(1), data(1))
    assert woken.wait(5)
    assert disk.poll() == [FinishedRead(name(1), None)]
    assert name(1) not in disk
    disk.close()
