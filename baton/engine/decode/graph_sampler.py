"""The full sampler of a GPU's step, behind the head's product: all that `SlotSampler.draw` does.

    draw     hold_rows ─ edit_logits ─ find_thresholds ─ draw_filtered
    report   write_logprobs

Where slots have several rows, which of them count is decided between both. Each kernel reads from the slots'
records what its row needs, and does nothing for a row that needs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.decode.slot_state import SlotState
from baton.engine.kernels.gpu.sampling.edit_logits import EditInputs, edit_logits
from baton.engine.kernels.gpu.sampling.filtered_draw import draw_filtered
from baton.engine.kernels.gpu.sampling.hold_rows import hold_rows
from baton.engine.kernels.gpu.sampling.sample_simple import sample_places
from baton.engine.kernels.gpu.sampling.sampler_rows import CHUNK
from baton.engine.kernels.gpu.sampling.thresholds import SearchSpace, find_thresholds
from baton.engine.kernels.gpu.sampling.top_logprobs import BestPlaces, write_logprobs


class GraphSampler:
    """Buffers for up to `rows` rows of `vocab` logits, and the launches. `chunk`: tokens of one program."""

    def __init__(self, state: SlotState, rows: int, vocab: int, chunk: int = CHUNK) -> None:
        device = state.records.device
        self._chunk = chunk
        self._records = state.records.view(torch.int32)
        sampler = state.sampler
        self._tags = sampler.masks.tags
        counts = sampler.counts
        self._inputs = EditInputs(
            sampler.bias_ids, sampler.bias_values, counts.in_prompt, counts.in_output, sampler.masks.bits
        )
        self.edited = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
        self._places = sample_places(rows, vocab, device, chunk)
        chunks = self._places[0].shape[1]
        self._peaks = torch.zeros(rows, chunks, dtype=torch.float32, device=device)
        self._lows = torch.zeros_like(self._peaks)
        self.space = SearchSpace(rows, vocab, chunk, device)
        self._best = BestPlaces(rows, vocab, chunk, device)

    def draw(
        self,
        drawn: Tensor,
        logits: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        control: Tensor,
        clocks: Tensor,
        drafts: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """logits [R, V] → drawn [R] int32 of the rows that draw, and their places among these.

        `rows`: slot, position (of the token read) and place of each, int32, the place that of the word
        behind the ring's head, negative where the row is held. `drafts`: see `edit_logits`.
        """
        slot, position, place = rows
        hold_rows(place, slot, position, self._records, self._tags, control, clocks)
        edit_logits(
            self.edited, self._peaks, self._lows, logits, rows, self._records, self._inputs, self._chunk,
            drafts,
        )  # fmt: skip
        find_thresholds(
            self.space, logits, self.edited, self._peaks, self._lows, (slot, place), self._records,
            self._chunk,
        )  # fmt: skip
        draw_filtered(drawn, logits, self.edited, self.space, rows, self._records, self._places, self._chunk)

    def report(
        self,
        drawn: Tensor,
        logits: Tensor,
        rows: tuple[Tensor, Tensor],
        control: Tensor,
        ring_records: Tensor,
        ring: tuple[int, int],
    ) -> None:
        """Writes the logprobs of rows that ask for them and whose tokens `drawn` count. `rows`: slot and
        place of each. `ring_records`: the ring's records as int32, and `ring` its words and alternatives a
        record."""
        if ring[1]:
            write_logprobs(
                ring_records, logits, drawn, rows, self._records, control, self._best, ring, self._chunk
            )
