"""A worker's prefill loop, as its configuration wants it."""

from __future__ import annotations

from baton.engine.prefill import PrefillLoop
from baton.engine.prefill_cost import PrefillCost, half_context
from baton.engine.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.prefix_cache import PrefixCache
from services.common.config import EngineConfig
from services.worker.loaded_model import LoadedModel


def prefill_loop(
    model: LoadedModel, engine: EngineConfig, prefixes: PrefixCache | None = None
) -> PrefillLoop:
    bounds = StepBounds(engine.chunk_tokens, engine.prefill_step_ms / 1e3, engine.prefill_age_cap_ms / 1e3)
    scheduler = PrefillScheduler(
        model.pools,
        bounds,
        max_sequences=engine.prefill_queue,
        cost=PrefillCost(half_context(model.config)),
        prefixes=prefixes,
    )
    return PrefillLoop(model.decoder, model.cache, scheduler)
