"""The same steps launched kernel by kernel and replayed as graphs, each over a cache of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Run
from pathlib import Path
from typing import Any

import torch

from baton.device.streams.graphs import Graph
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.weights import random_weights
from baton.engine.plan.step_plan import Chunk, step_of
from baton.engine.prefill.attention_plan import KeySplit, LibraryRule
from baton.engine.prefill.gpu_pass import PrefillPass
from baton.engine.prefill.graphs import GraphBounds
from baton.engine.prefill.step_inputs import StepInputs
from baton.perf_model.row_times import RowTimes
from tests.engine.local_engine import CONFIG
from tests.engine.prompt_passes import FAMILIES, scattered_sequences

# (sequence, first position, rows).
Pieces = Run[tuple[int, int, int]]


class GraphTwins:
    """Two passes of the same weights, one of which has graphs; of `steps`, `replayed` were its graphs."""

    def __init__(
        self,
        folder: Path,
        family: str,
        *,
        lengths: Run[int],
        most_rows: int,
        block_tokens: int,
        layers: int = 2,
        settings: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        rule: LibraryRule | None = None,
        tuning: PromptTuning | None = None,
        split: KeySplit | None = None,
        bounds: GraphBounds | None = None,
        row_times: RowTimes | None = None,
        device: str = "cpu",
    ) -> None:
        (folder / "config.json").write_text(
            json.dumps({**CONFIG, "num_hidden_layers": layers, **FAMILIES[family], **(settings or {})})
        )
        config = load_config(folder)
        layout = config.layout(block_tokens, str(dtype).removeprefix("torch."))
        weights = random_weights(config, 3, torch.device(device), dtype)
        model = Model(config, weights, layout, device, Precision.of(dtype))
        blocks = [-(-length // block_tokens) for length in lengths]
        self.caches = [KVCache(layout, 1 + sum(blocks), device) for _ in range(2)]
        self.eager, self.graphed = (
            PrefillPass(model, cache, most_rows, rule, tuning, split) for cache in self.caches
        )
        for each in (self.eager, self.graphed):
            each.row_times = row_times or RowTimes()
        self.graphed.capture(bounds)
        assert self.graphed.uncaptured == ""
        self.sequences = scattered_sequences(lengths, blocks, len(layout.groups), config.vocab_size)
        self.done = [0] * len(lengths)
        self.steps = self.replayed = 0
        prepare = self.graphed.graphs.prepare

        def counted(step: StepInputs, joined: JoinedRows | None = None) -> Graph | None:
            found = prepare(step, joined)
            self.replayed += found is not None
            return found

        self.graphed.graphs.prepare = counted  # type: ignore[method-assign]

    def check(self, pieces: Pieces) -> None:
        """Runs a step both ways: rows and caches are the same, bit for bit, whatever an earlier one left."""
        step = step_of(Chunk(self.sequences[number], start, count) for number, start, count in pieces)
        expected = self.eager.forward(step).clone()
        for left in (
            self.graphed.workspace.hidden,
            self.graphed.workspace.attn_out,
            self.graphed.attention.sums,
        ):
            left.fill_(torch.nan)
        found = self.graphed.forward(step)
        assert bool(found.isfinite().all())
        assert torch.equal(found, expected), f"{pieces}: {(found - expected).abs().max()}"
        for theirs, ours in zip(*(cache.groups for cache in self.caches), strict=True):
            assert torch.equal(ours[1:], theirs[1:]), pieces
            assert bool(ours[0].isfinite().all()), "what padding writes to scratch"
        for number, start, count in pieces:
            self.done[number] = start + count
        self.steps += 1

    def packing(self, draw: random.Random, rows: int, most_chunks: int) -> Pieces:
        """Draws chunks of up to `rows` rows together for up to `most_chunks` sequences, each from where it
        stands or from its start again."""
        numbers = draw.sample(range(len(self.sequences)), min(most_chunks, len(self.sequences)))
        cuts = sorted(draw.sample(range(1, rows), min(len(numbers), rows) - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        pieces = []
        for number, count in zip(numbers, counts, strict=False):
            length = self.sequences[number].length
            assert count <= length
            start = self.done[number] if self.done[number] + count <= length else 0
            pieces.append((number, start, count))
        return pieces
