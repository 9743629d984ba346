"""Device memory of drafts and histories, before there are any. Torch-free."""

from __future__ import annotations

from baton.engine.shared_memory.step_shape import MOST_DRAFTS

_TOKEN_BYTES = 4


def history_bytes(slots: int, tokens: int) -> int:
    """Bytes of the histories of `slots` slots, of `tokens` tokens each."""
    return slots * tokens * _TOKEN_BYTES


def slot_draft_bytes(slots: int) -> int:
    """Bytes of the drafts of `slots` slots: tokens, count, source, most and tag."""
    return slots * (MOST_DRAFTS * _TOKEN_BYTES + 4 + 4 + 4 + 8)
