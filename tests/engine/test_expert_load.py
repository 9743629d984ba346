"""The busiest expert's share of a minute, from counters that steps add to, in virtual time."""

from __future__ import annotations

import torch

from baton.engine.expert_load import ExpertLoad


class Counted:
    """Two layers of four experts, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.layers = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
        self.load = ExpertLoad(self.layers, lambda: self.now)

    def passes(self, seconds: int, *rows: list[int]) -> float:
        """Adds rows to each layer's counters every second → the imbalance then."""
        for _ in range(seconds):
            self.now += 1
            for counts, more in zip(self.layers, rows, strict=True):
                counts += torch.tensor(more)
            for _ in range(3):
                self.load.observe()
        return self.load.imbalance


def test_layers_are_averaged() -> None:
    counted = Counted()
    assert counted.load.imbalance == 0
    assert counted.passes(1, [7, 0, 0, 0], [7, 0, 0, 0]) == 0, "rows before the first look do not count"
    assert counted.passes(3, [1, 1, 1, 1], [3, 1, 0, 0]) == (1 + 3) / 2


def test_only_the_last_minute_counts() -> None:
    counted = Counted()
    counted.passes(30, [4, 0, 0, 0], [4, 0, 0, 0])
    assert counted.passes(50, [1, 1, 1, 1], [1, 1, 1, 1]) > 1
    assert counted.passes(15, [1, 1, 1, 1], [1, 1, 1, 1]) == 1
    assert counted.passes(70, [0, 0, 0, 0], [0, 0, 0, 0]) == 0


def test_counters_are_read_once_a_second() -> None:
    counted = Counted()
    counted.passes(1, [0] * 4, [0] * 4)
    counted.now += 0.9
    for layer in counted.layers:
        layer += 1
    counted.load.observe()
    counted.load.observe()
    assert counted.load.imbalance == 0
    counted.now += 0.2
    counted.load.observe()
    counted.load.observe()
    assert counted.load.imbalance == 1
