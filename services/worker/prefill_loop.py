"""A worker's prefill loop, as its configuration wants it."""

from __future__ import annotations

from baton.engine.prefill import PrefillLoop
from baton.engine.prefill_cost import PrefillCost, half_context
from baton.engine.prefill_scheduler import PrefillScheduler, StepBounds
from services.common.config import EngineConfig
from services.worker.loaded_model import LoadedModel


def prefill_loop(model: LoadedModel, engine: EngineConfig) -> PrefillLoop:
    bounds = StepBounds(engine.chunk_tokens, engine.prefill_step_ms / 1e3, engine.prefill_age_cap_ms / 1e3)
    cost = PrefillCost(half_context(model.config))
    scheduler = PrefillScheduler(model.pools, bounds, max_sequences=engine.prefill_queue, cost=cost)
    return PrefillLoop(model.decoder, model.cache, scheduler)
