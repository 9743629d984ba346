"""Decisions of the supervisor, over virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.base.process_watch import STARVED_S
from services.cluster.supervision.reconcile import (
    ACTOR_TIMEOUT_FACTOR,
    LONGEST_REFUSED_PAUSE_S,
    MAX_STARTS,
    WINDOW_S,
    Action,
    Kill,
    Observed,
    Remove,
    Start,
    plan,
    refused_until,
    start_at,
)
from services.cluster.supervision.report import Phase

HANG_S = 5.0


def due(seen: Observed | None, now: float = 1000.0) -> list[Action]:
    return plan(["w"], {"w": seen} if seen else {}, now, HANG_S)


def test_a_worker_never_seen_is_started() -> None:
    assert due(None) == [Start("w")]
    assert due(Observed(Phase.EMPTY)) == [Start("w")]


def test_a_worker_that_is_well_is_left_alone() -> None:
    assert due(Observed(Phase.SERVING, silent_s=HANG_S)) == []
    assert due(Observed(Phase.STARTING, silent_s=1e6)) == []


def test_a_hung_worker_is_killed_and_its_actor_only_if_that_is_unresponsive() -> None:
    (kill,) = due(Observed(Phase.SERVING, silent_s=HANG_S + 0.1, ran_s=1.0))
    assert isinstance(kill, Kill)
    assert not kill.actor
    assert due(Observed(Phase.UNKNOWN, silent_s=HANG_S + 0.1)) == []
    (kill,) = due(Observed(Phase.UNKNOWN, silent_s=HANG_S * ACTOR_TIMEOUT_FACTOR + 0.1))
    assert isinstance(kill, Kill)
    assert kill.actor


def test_a_starved_worker_is_not_hung_for_twenty_seconds() -> None:
    assert due(Observed(Phase.SERVING, silent_s=STARVED_S, ran_s=0.9)) == []
    (kill,) = due(Observed(Phase.SERVING, silent_s=STARVED_S + 0.1))
    assert isinstance(kill, Kill)


def test_the_first_death_for_long_is_mended_at_once() -> None:
    assert due(Observed(Phase.ENDED, starts=(10.0,)), now=1000) == [Start("w")]
    assert due(Observed(Phase.MISSING, starts=(999.9,)), now=1000) == [Start("w")]


def test_a_worker_that_was_replaced_stays_down() -> None:
    assert due(Observed(Phase.ENDED, replaced=True)) == []


def test_a_refused_restart_is_tried_again_after_a_pause_that_doubles() -> None:
    pauses = []
    for refusals in range(1, 9):
        at = refused_until(refusals, 100.0)
        seen = Observed(Phase.ENDED, refusals=refusals, refused_at=100.0, starts=(99.0,))
        assert due(seen, now=at - 0.01) == []
        assert due(seen, now=at) == [Start("w")]
        pauses.append(at - 100.0)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert refused_until(10_000, 0.0) == LONGEST_REFUSED_PAUSE_S


def test_an_unwanted_worker_is_removed() -> None:
    assert plan([], {"old": Observed(Phase.SERVING)}, 0.0, HANG_S) == [Remove("old")]


def test_pauses_double() -> None:
    starts: tuple[float, ...] = (0.0,)
    pauses = []
    for _ in range(5):
        at = start_at(starts, starts[-1])
        pauses.append(at - starts[-1])
        starts = (*starts, at)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0]


PHASES = st.sampled_from(list(Phase))


@given(
    live=st.dictionaries(
        st.sampled_from("abcd"),
        st.builds(
            Observed,
            phase=PHASES,
            silent_s=st.floats(0, 100),
            replaced=st.booleans(),
            refusals=st.integers(0, 40),
            refused_at=st.floats(0, 1000),
            starts=st.lists(st.floats(0, 1000), max_size=9).map(lambda times: tuple(sorted(times))),
        ),
    ),
    wanted=st.sets(st.sampled_from("abcd")),
)
def test_at_most_one_action_a_worker_and_never_a_second_process(
    live: dict[str, Observed], wanted: set[str]
) -> None:
    actions = plan(wanted, live, 1000.0, HANG_S)
    assert len({action.name for action in actions}) == len(actions)
    for action in actions:
        seen = live.get(action.name, Observed(Phase.MISSING))
        match action:
            case Start(name):
                assert name in wanted
                assert seen.phase in (Phase.MISSING, Phase.EMPTY, Phase.ENDED)
            case Kill():
                assert seen.phase in (Phase.SERVING, Phase.UNKNOWN)
            case Remove(name):
                assert name not in wanted


@given(lives=st.lists(st.floats(0, 200), min_size=1, max_size=60), poll=st.floats(0.05, 2))
def test_starts_are_bounded_in_every_window_yet_it_always_comes_back(lives: list[float], poll: float) -> None:
    """A worker that lives for each of these times in turn."""
    now, starts = 0.0, list[float]()
    for life in lives:
        waited = 0.0
        while due(Observed(Phase.ENDED, starts=tuple(starts[-MAX_STARTS:])), now) != [Start("w")]:
            now += poll
            waited += poll
            assert waited <= WINDOW_S + poll
        starts.append(now)
        now += life
    for first in starts:
        assert sum(first <= start < first + WINDOW_S - 1e-6 for start in starts) <= MAX_STARTS
