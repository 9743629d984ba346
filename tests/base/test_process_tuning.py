"""The kernel's settings are read and reported."""

from __future__ import annotations

import ctypes
import threading

from baton.base.process_tuning import sharpen_timers

_PR_GET_TIMERSLACK = 30


def test_waits_of_a_thread_and_of_those_it_starts_are_sharp() -> None:
    found: list[int] = []

    def look() -> None:
        found.append(ctypes.CDLL(None).prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0))

    def sharp() -> None:
        sharpen_timers()
        look()
        started = threading.Thread(target=look)
        started.start()
        started.join()

    looks = threading.Thread(target=sharp)
    looks.start()
    looks.join()
    look()
    assert found[:2] == [1, 1]
    assert found[2] > 1, "another thread's are its own matter"
