"""Counts of drafts in an output's usage and trace, over all attempts."""

from __future__ import annotations

from baton.v1.types_pb2 import DraftCounts
from services.router.lifecycle.output_state import OutputState
from services.router.request.request import Finish
from tests.router.lifecycle.reported_outputs import LENGTH, PREEMPTED, an_output_of, decoded, delivered


def counts(*numbers: int) -> DraftCounts:
    """Steps, drafts, accepted ones, and the same of the prediction's."""
    names = [field.name for field in DraftCounts.DESCRIPTOR.fields]
    return DraftCounts(**dict(zip(names, numbers, strict=True)))


def used(output: OutputState) -> tuple[int, int]:
    usage = output.usage
    return usage.accepted_prediction_tokens, usage.rejected_prediction_tokens


def test_drafts_are_those_of_all_attempts_as_each_reported_them_last() -> None:
    output, outbox = an_output_of(predicted=True)
    assert used(output) == (0, 0)
    output.accept_decoded(decoded(0, [10], drafts=counts(1, 3, 1, 2, 1)))
    assert used(output) == (1, 1)
    output.accept_decoded(decoded(1, [11], PREEMPTED, drafts=counts(2, 6, 3, 5, 2)))
    output.begin(2)
    output.accept_decoded(decoded(1, [11, 12], attempt=1, drafts=counts(9, 9, 9, 9, 9)))  # too late
    output.accept_decoded(decoded(2, [12], attempt=2))
    assert used(output) == (2, 3)
    output.accept_decoded(decoded(3, [13], LENGTH, attempt=2, drafts=counts(1, 1, 0, 1, 0)))
    assert used(output) == (2, 4)
    output.end(Finish.LENGTH)
    last = delivered(outbox)
    assert last.trace is not None
    assert last.trace.drafts == counts(3, 7, 3, 6, 2)
    assert last.usage == output.usage


def test_without_a_prediction_drafts_are_those_of_the_end() -> None:
    output, outbox = an_output_of()
    output.accept_decoded(decoded(0, [10], drafts=counts(5, 5, 5, 0, 0)))
    output.accept_decoded(decoded(1, [11, 12, 13], LENGTH, drafts=counts(2, 2, 1, 0, 0)))
    output.end(Finish.LENGTH)
    last = delivered(outbox)
    assert last.trace is not None
    assert last.trace.drafts == counts(2, 2, 1, 0, 0)


def test_a_worker_that_counts_nothing_leaves_no_counts() -> None:
    output, outbox = an_output_of(predicted=True)
    output.accept_decoded(decoded(0, [10, 11, 12, 13], LENGTH))
    output.end(Finish.LENGTH)
    last = delivered(outbox)
    assert last.trace is not None
    assert not last.trace.HasField("drafts")
    assert used(output) == (0, 0)


def test_more_accepted_drafts_than_drafts_reject_none() -> None:
    output, _ = an_output_of(predicted=True)
    output.accept_decoded(decoded(0, [10], drafts=counts(1, 1, 2, 1, 2)))
    assert used(output) == (2, 0)
