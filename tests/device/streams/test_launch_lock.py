"""One thread at a time holds it, and none waits for ever."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from baton.device.streams.launch_lock import LaunchLock
from tests.support.waiting import block_until


def test_one_thread_at_a_time_holds_it() -> None:
    lock, inside, most = LaunchLock(60), list[int](), list[int]()

    def work() -> None:
        for _ in range(50):
            with lock, lock:  # nested
                inside.append(1)
                most.append(len(inside))
                time.sleep(1e-5)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 200
    assert max(most) == 1


def test_a_call_that_does_not_return_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    lock, returns, held = LaunchLock(0.05), threading.Event(), threading.Event()

    def hang() -> None:
        with lock:
            held.set()
            assert returns.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    block_until(held.is_set)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with lock:  # launches go on
                pass
    assert [record.message for record in caplog.records] == ["launches_not_kept_apart"]
    returns.set()
    thread.join(60)
    with lock:
        pass
