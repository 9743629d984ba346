"""Members that are dropped, and when: the rule in virtual time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.state.stores.records import Listed, Listing
from baton.state.view import Roster
from tests.state.contract import member

GRACE_S = 5.0


def listing(*entries: Listed, epoch: str = "one") -> Listing:
    return Listing(epoch, entries)


A, B = Listed(member("a"), 10), Listed(member("b"), 11)


def past_grace() -> Roster:
    """Knows a and b, and has for long."""
    roster = Roster(GRACE_S)
    roster.take(listing(A, B), 0.0)
    assert not roster.take(listing(A, B), 100.0)
    return roster


def test_a_lapsed_member_is_dropped_at_once_and_alone() -> None:
    roster = past_grace()
    assert roster.take(listing(B), 100.5)
    assert set(roster.members) == {"b"}


def test_an_unavailable_registry_removes_no_member() -> None:
    roster = past_grace()
    for _ in range(1000):
        roster.poll_failed()
    assert set(roster.members) == {"a", "b"}


def test_after_an_outage_everyone_has_a_leases_time() -> None:
    roster = past_grace()
    roster.poll_failed()
    assert not roster.take(listing(), 130.0)
    assert not roster.take(listing(A), 130.0 + GRACE_S - 0.1)
    assert roster.take(listing(A), 130.0 + GRACE_S)
    assert set(roster.members) == {"a"}


def test_a_wipe_between_two_polls_removes_no_member() -> None:
    roster = past_grace()
    assert not roster.take(listing(epoch=""), 100.5)
    assert not roster.take(listing(B, epoch="two"), 101.0)
    assert not roster.take(listing(A, B, epoch="two"), 102.0)
    assert not roster.take(listing(A, B, epoch="two"), 200.0)


def test_after_a_wipe_an_older_incarnation_does_not_come_back() -> None:
    roster = past_grace()
    newer = Listed(member("a"), 20)
    assert roster.take(listing(newer, B), 100.5)
    assert not roster.take(listing(A, B, epoch="two"), 101.0)
    assert roster.members["a"] == newer.member


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 3.0), st.sampled_from(["answer", "miss", "wipe"]), st.sets(st.sampled_from("abc"))
        ),
        max_size=30,
    )
)
def test_only_a_calm_reachable_registry_removes(steps: list[tuple[float, str, set[str]]]) -> None:
    """A member that is removed was absent from an answer, one lease's time after the last disturbance."""
    entries = {name: Listed(member(name), 1) for name in "abc"}
    roster, now, epoch, disturbed_at = Roster(GRACE_S), 0.0, 0, -GRACE_S
    poll_failed = False
    for pause, event, present in steps:
        now += pause
        before = set(roster.members)
        if event == "miss":
            roster.poll_failed()
            poll_failed = True
            assert set(roster.members) == before
            continue
        epoch += event == "wipe"
        if before and (poll_failed or event == "wipe"):
            disturbed_at = now
        poll_failed = False
        roster.take(listing(*(entries[name] for name in present), epoch=str(epoch)), now)
        calm = now - disturbed_at >= GRACE_S
        assert set(roster.members) == (present if calm else before | present)
