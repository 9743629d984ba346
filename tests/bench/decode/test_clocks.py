"""Steps' clocks: every line is kept once, whatever the ring's laps, and the figures are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from bench.decode.clocks import ClockReader, Lines, figures

COUNT = 64


class Ring:
    """A ring of 64 lines that steps write, and copies that arrive when they are let."""

    def __init__(self) -> None:
        self.count = COUNT
        self.lines = np.zeros((COUNT, 4), np.int64)
        self.ended = 0
        self.late = False

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.lines[self.ended % COUNT] = self.ended * 100
            self.ended += 1

    def copy(self) -> Copied:
        return Copied(self, self.lines.copy())


class Copied:
    def __init__(self, ring: Ring, lines: Lines) -> None:
        self._ring = ring
        self._lines = lines

    def ended(self) -> Lines | None:
        return None if self._ring.late else self._lines


def test_every_line_once_over_many_laps() -> None:
    ring = Ring()
    ring.run(50)
    reader = ClockReader(ring, ring.ended)
    for _ in range(40):
        ring.run(7)
        reader.look(ring.ended, at=20)
    lines = reader.finish(ring.ended)
    assert lines[:, 0].tolist() == [n * 100 for n in range(50, 50 + 280)]


def test_a_running_copy_is_waited_for_and_lost_lines_are_reported() -> None:
    ring = Ring()
    reader = ClockReader(ring, 0)
    ring.run(30)
    reader.look(ring.ended, at=20)
    ring.late = True
    ring.run(30)
    reader.look(ring.ended, at=20)
    ring.late = False
    assert len(reader.finish(ring.ended)) == 60
    ring.run(30)
    reader.look(ring.ended, at=20)
    ring.run(COUNT)
    with pytest.raises(RuntimeError, match="lines of clocks in a ring of 64"):
        reader.look(ring.ended, at=20)


def lines(gaps: list[int], step: int = 1000, rows: int = 3, head: int = 900) -> Lines:
    """Steps of `step` ns, gaps between them, late enough that a float64 of nanoseconds would lose them."""
    made, at = [], 1_790_000_000_000_000_000
    for gap in [0, *gaps]:
        at += gap
        made.append([at, at + head if head else 0, at + step, rows])
        at += step
    return np.array(made, np.int64)


def test_figures_of_a_hundred_gaps() -> None:
    found = figures(lines([*[3] * 98, 40, 500]))
    assert (found["gap_us_p50"], found["gap_us_p99"], found["gap_us_max"]) == (0.0, 0.5, 0.5)
    found = figures(lines([30] * 150 + [5000], step=9970))
    assert (found["gap_us_p50"], found["gap_us_p99"], found["gap_us_max"]) == (0.03, 0.03, 5.0)
    assert (found["steps"], found["late_gaps"]) == (152, 0)
    assert figures(lines([30] * 150 + [5001, 9000]))["late_gaps"] == 2
    assert found["tpot_ms"] == pytest.approx((150 * 10_000 + 14_970) / 151 / 1e6, abs=1e-4)
    assert found["busy"] == pytest.approx(1 - 9500 / (150 * 10_000 + 14_970), abs=1e-5)
    assert found["tokens_s"] == pytest.approx(3 * 151 / (150 * 10_000 + 14_970) * 1e9, rel=1e-3)
    assert found["tail_us"] == pytest.approx(9.07)


def test_a_tail_is_reported_only_where_the_graph_recorded_it() -> None:
    assert figures(lines([3] * 9, head=0))["tail_us"] is None
    stale = lines([3] * 9)
    stale[:, 1] -= 10**9
    assert figures(stale)["tail_us"] is None


def test_where_the_clock_stands_steps_and_rows_are_all_there_is() -> None:
    standing = np.zeros((5, 4), np.int64)
    standing[:, 3] = [0, 2, 2, 4, 4]
    assert figures(standing) == {"steps": 5, "mean_rows": 3.0}
