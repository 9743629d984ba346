"""Descriptors of shared memory and of wakeups end with the objects that own them, and with no others."""

from __future__ import annotations

import fcntl
import os

import pytest

from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup


def is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def test_created_memory_closes_its_descriptor_and_views_of_it_stay() -> None:
    memory = SharedMemory.create("test", 4096)
    fd, view = memory.fd, memory.region(8, 1, "u8")
    attached = SharedMemory.attach(os.dup(fd))
    del memory
    assert not is_open(fd)
    view[0] = 7
    assert attached.region(8, 1, "u8")[0] == 7
    attached.drop_descriptor()


def test_attached_memory_leaves_its_descriptor_to_whoever_passed_it() -> None:
    memory = SharedMemory.create("test", 4096)
    attached = SharedMemory.attach(memory.fd)
    del attached
    assert is_open(memory.fd)


def test_a_dropped_descriptor_is_closed_once() -> None:
    """The descriptor's number may be that of another file by the time at which the memory goes."""
    memory = SharedMemory.create("test", 4096)
    fd = memory.fd
    memory.drop_descriptor()
    memory.drop_descriptor()
    assert memory.fd == -1
    other = os.open("/dev/null", os.O_RDONLY)
    os.dup2(other, fd)
    del memory
    assert is_open(fd)
    os.close(fd)
    if other != fd:
        os.close(other)


@pytest.mark.parametrize("closed", [False, True])
def test_a_wakeup_closes_its_own_descriptor_once(closed: bool) -> None:
    wakeup = Wakeup()
    fd = wakeup.fileno()
    passed = Wakeup(os.dup(fd))
    if closed:
        wakeup.close()
    del wakeup
    assert not is_open(fd)
    passed.set()
    theirs = passed.fileno()
    del passed
    assert is_open(theirs)
    os.close(theirs)
