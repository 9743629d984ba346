"""Kept entries take at most the limit in bytes, however small or large they are."""

from __future__ import annotations

from baton.base.bounded_cache import BoundedCache


def cache() -> BoundedCache[int, str]:
    return BoundedCache(10_000, lambda key, value: 100 + len(value))


def test_the_entries_used_longest_ago_are_dropped() -> None:
    kept = cache()
    for number in range(100):
        kept.put(number, "x" * 400)
        assert kept.get(0) == "x" * 400
    assert len(kept) == 20
    assert kept.bytes == 10_000
    assert (kept.get(1), kept.get(99)) == (None, "x" * 400)


def test_many_small_entries_are_bounded_as_few_large_ones() -> None:
    kept = cache()
    for number in range(10_000):
        kept.put(number, "")
    assert (len(kept), kept.bytes) == (100, 10_000)
    kept.put(0, "y" * 9_000)
    assert (len(kept), kept.bytes) == (10, 10_000)


def test_a_value_that_is_replaced_counts_once() -> None:
    kept = cache()
    for size in (10, 1000, 1):
        kept.put(0, "z" * size)
        assert (len(kept), kept.bytes) == (1, 100 + size)


def test_what_is_larger_than_all_that_may_be_kept_is_not_kept() -> None:
    kept = cache()
    kept.put(0, "a")
    kept.put(1, "b" * 10_000)
    assert (kept.get(1), len(kept), kept.bytes) == (None, 0, 0)
