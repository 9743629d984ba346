"""Makes the lookahead table of a worker that decodes with drafts."""

from __future__ import annotations

from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.engine.speculation.lookahead_cells import NO_TOKEN
from baton.engine.speculation.lookahead_table import LookaheadTable
from services.common.config.worker import EngineConfig
from services.worker.engine.startup.host_memory import MEMORY, check_available
from services.worker.engine.startup.model_loader import LoadedModel


def lookahead_table(model: LoadedModel, engine: EngineConfig, memory: Path = MEMORY) -> LookaheadTable | None:
    """The table; None where there is to be none. A GPU's memory for it has been planned. Raises
    BatonError(INVALID) where a host has less memory left, or a cell has too few bits for the model's ids."""
    size, ids = engine.lookahead_table_bytes, model.config.vocab_size
    if not size:
        return None
    if ids > NO_TOKEN:
        raise BatonError(
            ErrorKind.INVALID,
            f"engine.lookahead_table_mb: the table holds ids of vocabularies of up to {NO_TOKEN}, not {ids}",
        )
    if model.device.type != "cuda":
        check_available("lookahead_table_mb", size, memory)
    return LookaheadTable(
        model.slots,
        size,
        ids,
        model.device,
        model=model.fingerprint,
        alone=engine.speculation == "table",
    )
