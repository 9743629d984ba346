"""Counts of drafts by source and depth."""

from __future__ import annotations

import numpy as np

from baton.engine.speculation.drafts import Source
from baton.engine.speculation.verified_drafts import SOURCES, VerifiedDrafts


def test_sources_have_names_in_their_order() -> None:
    assert tuple(source.name.lower() for source in Source) == SOURCES


def test_drafts_of_each_source_are_counted_by_depth() -> None:
    verified = VerifiedDrafts(3)
    # Steps, drafts, accepted, and of these predicted ones and those of the table.
    verified.add(
        np.array([[1, 3, 2, 0, 0, 0, 0], [1, 2, 1, 2, 1, 0, 0], [1, 1, 1, 0, 0, 1, 1], [1] + [0] * 6])
    )
    assert verified.steps == 4
    assert verified.rows.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert verified.accepted.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    verified.add(np.array([[1, 1, 0, 1, 0, 0, 0]]))
    assert verified.steps == 5
    assert verified.rows.tolist() == [[1, 1, 1], [2, 1, 0], [1, 0, 0]]
    assert verified.accepted.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]


def test_of_several_steps_all_drafts_are_counted() -> None:
    """Each is taken to have had as many."""
    verified = VerifiedDrafts(3)
    verified.add(np.array([[4, 10, 5, 0, 0, 0, 0]]))
    assert verified.steps == 4
    assert verified.rows[0].tolist() == [4, 4, 2]
    assert verified.accepted[0].tolist() == [4, 1, 0]
