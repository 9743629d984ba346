"""The vendor's library takes memory for a stream before a step of several devices begins there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.device.streams.cuda_stream import DEFAULT_STREAM
from baton.engine.forward.layers.linear import Gemm
from baton.engine.parallel.rank_exchange import Launches
from baton.engine.prefill import gpu_pass
from tests.engine.executor.test_ranks_in_steps import SHAPE
from tests.engine.parallel.test_prefill_on_ranks import add, on_ranks


def test_a_stream_that_is_new_has_products_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are of a layer and of the head, on each of two devices; the default stream has had them:
    kernels are warmed up there."""
    engine = on_ranks(tmp_path / "model", changes=SHAPE)
    assert engine.group is not None
    multiply, launch_in_turns, products, ahead = Gemm.__call__, engine.group.launch_in_turns, 0, list[int]()

    def count(gemm: Gemm, *operands: Any) -> None:
        nonlocal products
        products += 1
        multiply(gemm, *operands)

    def launch(steps: Sequence[Launches]) -> None:
        ahead.append(products)
        launch_in_turns(steps)

    monkeypatch.setattr(Gemm, "__call__", count)
    monkeypatch.setattr(engine.group, "launch_in_turns", launch)
    for stream in (DEFAULT_STREAM, 7, 7, 9):
        monkeypatch.setattr(gpu_pass, "current_stream", lambda device, stream=stream: stream)
        products = 0
        add(engine, (1, 2, 3))
        engine.compute()
    assert ahead == [0, 2 * 5, 0, 2 * 5]
