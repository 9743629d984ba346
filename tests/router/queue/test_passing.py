"""Which requests may pass those that wait for a prefill worker."""

from __future__ import annotations

from services.router.queue.passing import Passing


def test_only_shorter_prompts_pass_and_only_so_many_are_looked_at() -> None:
    passing = Passing(10.0)
    assert passing.may_try(8192), "nothing waits"
    passing.waits(8192, 9.0)
    assert not passing.over
    assert not passing.may_try(8192)
    assert passing.may_try(512)
    passing.waits(512, 9.5)
    assert [passing.may_try(tokens) for tokens in (600, 512, 500)] == [False, False, True]
    for _ in range(59):
        assert not passing.over
        passing.may_try(9000)
    assert passing.over


def test_one_that_has_waited_for_long_is_passed_by_none() -> None:
    passing = Passing(10.0)
    passing.waits(8192, 7.9)
    assert passing.over
