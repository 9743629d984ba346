"""The criterion of flat memory passes what is flat and fails what leaks, noise and jumps or not."""

from __future__ import annotations

import random

import pytest

from tests.support.flatness import Flat, Sample, growth, slope

REQUESTS = 5000
EVERY = 100


def memory(seed: int, leak: float = 0.0, start: int = 80_000, jump: int = 0) -> list[Sample]:
    """A process as measured: an allocator that takes and gives back some hundred KiB, and once most of a MiB,
    which is what Python's has at a time."""
    dice = random.Random(seed)
    at = dice.randrange(REQUESTS)
    return [
        Sample(done, round(start + dice.gauss(0, 250) + leak * done + jump * (done > at)))
        for done in range(0, REQUESTS + 1, EVERY)
    ]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("jump", [-700, 0, 700])
def test_noise_and_a_jump_are_flat(seed: int, jump: int) -> None:
    assert Flat().broken_by(memory(seed, jump=jump)) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("start", [60_000, 300_000])
@pytest.mark.parametrize("jump", [-700, 0, 700])
def test_a_leak_of_a_kib_a_request_is_not(seed: int, start: int, jump: int) -> None:
    assert Flat().broken_by(memory(seed, leak=1.0, start=start, jump=jump))


def test_what_grows_at_first_and_then_no_more_is_flat() -> None:
    filled = [Sample(done, 100_000 + min(done, 1500)) for done in range(0, REQUESTS + 1, EVERY)]
    assert slope(filled) == 0
    assert growth(filled) == pytest.approx(0.015)
    assert Flat().broken_by(filled) == []


def test_slow_growth_to_a_share_is_not() -> None:
    grown = [Sample(done, 50_000 + done * 2 // 5) for done in range(0, REQUESTS + 1, EVERY)]
    assert slope(grown) == pytest.approx(0.4, abs=0.01)
    assert Flat().broken_by(grown) == ["3.6% more"]
