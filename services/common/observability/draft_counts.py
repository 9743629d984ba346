"""Sums of `DraftCounts`, tokens a step by them, and how a span has both."""

from __future__ import annotations

from baton.v1.types_pb2 import DraftCounts

_NAMES = tuple(field.name for field in DraftCounts.DESCRIPTOR.fields)


def add_counts(total: DraftCounts, more: DraftCounts) -> None:
    """Adds counts to a total."""
    for name in _NAMES:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def tokens_per_step(counts: DraftCounts) -> float:
    """Tokens that a step gave out on average; 0 where no step was counted."""
    return (counts.steps + counts.accepted) / counts.steps if counts.steps else 0.0


def draft_attributes(counts: DraftCounts) -> dict[str, int | float]:
    """The attributes of a span in which these steps ran; none where no step was counted."""
    if not counts.steps:
        return {}
    return {
        "baton.decode_steps": counts.steps,
        "baton.draft_tokens": counts.drafts,
        "baton.accepted_draft_tokens": counts.accepted,
        "baton.tokens_per_step": round(tokens_per_step(counts), 3),
    }
