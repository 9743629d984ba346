"""The mean load of a decode worker over an interval."""

from __future__ import annotations

import pytest

from services.router.workers.decode_load import DecodeLoad, LoadHistory


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_the_mean_is_by_time() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.changed(DecodeLoad(10, 1000, 0.5))
    clock.now += 1.0
    first = history.mark()
    clock.now += 3.0
    history.changed(DecodeLoad(2, 200, 0.0))
    second = history.mark()
    clock.now += 1.0
    assert history.mean_since(first) == pytest.approx((8, 800, 0.375))
    assert history.mean_since(second) == pytest.approx((2, 200, 0.0))


def test_of_no_time_it_is_the_load_now() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.changed(DecodeLoad(3, 30, 0.1))
    assert history.mean_since(history.mark()) == DecodeLoad(3, 30, 0.1)
