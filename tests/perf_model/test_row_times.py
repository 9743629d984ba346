"""Numbers of rows that are worth it, by the times of their products."""

from __future__ import annotations

import pytest

from baton.perf_model.row_times import RowTimes

# In ms; as of an 8B model on an H200, up to 1,024 rows by the rows, then a stair to 2,048.
STAIRS = RowTimes((64, 128, 256, 512, 1024, 1088, 1280, 2048), (4.2, 4.5, 6, 11.5, 20, 24.7, 27, 40))


def test_numbers_that_take_no_less_than_a_larger_one_are_padded_to_it() -> None:
    """448 rows take longer than 512, and 576 within 2 % as long as 640."""
    measured = {64: 4.2, 384: 8.7, 448: 12.0, 512: 10.7, 576: 12.9, 640: 13.0}
    found = RowTimes.of(measured)
    assert found.rows == (64, 384, 512, 640)
    assert [found.padded(rows) for rows in (1, 64, 65, 385, 512, 513)] == [64, 64, 384, 512, 512, 640]
    assert found.seconds_of(400) == 10.7
    with pytest.raises(ValueError, match="641 rows"):
        found.padded(641)


def test_rows_are_padded_to_the_next_number_that_was_measured() -> None:
    assert [STAIRS.seconds_of(rows) for rows in (1, 64, 65, 1024, 1025)] == [4.2, 4.2, 4.5, 20, 24.7]
    assert STAIRS.seconds_of(4096) == 80, "beyond, in proportion"


@pytest.mark.parametrize(
    ("rows", "others", "worth"),
    [
        (1024, 0, 1024),
        (1088, 0, 1024),
        (1280, 0, 1024),
        (2000, 0, 2000),  # 2 % fewer a second than with 1,024: not worth another step
        (1100, 64, 960),
        (1024, 128, 896),
        (190, 64, 190),
        (2048, 0, 2048),
        (2048, 64, 2048),
    ],
)
def test_rows_beyond_a_stair_are_left_to_the_next_step(rows: int, others: int, worth: int) -> None:
    assert STAIRS.most_worth(rows, others) == worth


def test_products_are_shared_where_that_takes_no_longer() -> None:
    assert STAIRS.joins(190, 64)
    assert not STAIRS.joins(1024, 64), "24.7 beside 20 + 4.2"
    assert STAIRS.joins(896, 64)


def test_what_was_not_measured_changes_nothing() -> None:
    nothing = RowTimes()
    assert nothing.joins(1024, 64)
    assert (nothing.most_worth(1100, 64), nothing.seconds_of(5)) == (1100, 0.0)
    assert RowTimes.of({}) == nothing
    assert nothing.padded(5) == 5
