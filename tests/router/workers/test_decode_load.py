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
    history.changed(10, 1000)
    clock.now += 1.0
    first = history.mark(computed_s=7.0)
    clock.now += 3.0
    history.changed(2, 200)
    second = history.mark(computed_s=8.5)
    clock.now += 1.0
    assert history.mean_since(first, computed_s=8.5) == pytest.approx((8, 800, 0.375))
    assert history.mean_since(second, computed_s=8.5) == pytest.approx((2, 200, 0.0))


def test_of_no_time_it_is_the_load_now() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.changed(3, 30)
    assert history.mean_since(history.mark()) == DecodeLoad(3, 30)
