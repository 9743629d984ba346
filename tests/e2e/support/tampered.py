"""Engines that verify every piece and then keep it, or, while there is a file of TAMPER's name, drop it.

Only the sink of verified bytes changes, so whatever differs came by way of these bytes.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.worker.engine.decode.reserved_slots import ReservedBlockSink

TAMPER = "BATON_TEST_TAMPER"


def install() -> None:
    drop, keep = Path(os.environ[TAMPER]), ReservedBlockSink.scatter

    def scatter(
        self: ReservedBlockSink, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview
    ) -> None:
        if not drop.exists():
            keep(self, transfer_id, group, ordinal, offset, data)

    ReservedBlockSink.scatter = scatter  # type: ignore[method-assign]
