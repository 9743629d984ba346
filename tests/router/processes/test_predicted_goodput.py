"""The crossing of a predicted attainment, found by bisection."""

from __future__ import annotations

import pytest

from tests.router.processes.predicted_goodput import crossing


def test_a_crossing_is_interpolated_between_near_rates() -> None:
    asked: list[float] = []

    def share(rate: float) -> float:
        asked.append(rate)
        return min(1.0, 2.0 - rate / 10)

    assert crossing(share, 8.0, 16.0, 0.87) == pytest.approx(11.3)
    below, above = max(rate for rate in asked if rate < 11.3), min(rate for rate in asked if rate > 11.3)
    assert above / below <= 1.03
    assert len(asked) < 10


def test_rates_that_do_not_enclose_the_crossing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.000 at 2 and 1\.000 at 4 do not enclose 0\.9"):
        crossing(lambda rate: 1.0, 2.0, 4.0, 0.9)
