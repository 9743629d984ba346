"""Sizes of the memory that a worker's front, engine and mask processes share, by its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.shared_memory.layout import SharedRings

if TYPE_CHECKING:
    from services.common.config.worker import EngineConfig


def worker_rings(engine: EngineConfig) -> SharedRings:
    """The sizes of a worker's rings."""
    return SharedRings(engine.most_slots, engine.max_logprobs, engine.rows_per_slot)
