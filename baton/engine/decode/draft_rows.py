"""The launches of a step that are for drafts alone: they propose drafts, give them rows, and decide which of
these count.

    begin ─ [add] ─ plan ─ layers ─ head ─ draw ─ [accept] ─ [append] ─ finish

Drafts never leave the device, so steps are queued without the host knowing them. They are proposed behind
`begin`: a sequence has some in the step that admits it, and behind steps that verified none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.decode.slot_state import SlotState
from baton.engine.kernels.gpu.speculation.accept_rows import accept_rows
from baton.engine.kernels.gpu.speculation.add_drafts import RowArrays, add_drafts
from baton.engine.kernels.gpu.speculation.append_history import append_history
from baton.engine.kernels.gpu.speculation.find_match import find_match
from baton.engine.speculation.proposer import Proposer

Propose = Callable[[], None]
"""Launches what writes the slots' `SlotDrafts`, for the tokens that their last ones now are."""


def proposals_of(state: SlotState, proposer: Proposer) -> Propose:
    """Launches what a proposer computes on the device, for all slots. Raises ValueError where they have one
    row each."""
    if (drafts := state.drafts) is None:
        raise ValueError("slots have one row each")
    slots = torch.arange(state.shape.slots, device=state.records.device)

    def propose() -> None:
        tokens, lengths, sources = proposer.propose(slots)
        drafts.put(slots, state.generation.long() << 32 | state.position.long(), tokens, lengths, sources)

    return propose


def lookup_in(state: SlotState) -> Propose | None:
    """Launches what looks drafts up in the slots' histories, and in the lookahead table where there is one;
    None where there are no histories, or slots have one row each."""
    history, drafts = state.history, state.drafts
    if history is None or drafts is None:
        return None
    best = torch.zeros_like(history.end)
    records = state.records.view(torch.int32)
    return lambda: find_match(history, drafts, state.active, records, best, state.lookahead)


class DraftRows:
    """Launches the parts of a step that are about drafts. Raises ValueError for slots without room for
    any."""

    def __init__(
        self,
        state: SlotState,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        drawn: Tensor,
        control: Tensor,
        item_bounds: Tensor,
        ring_words: int,
        propose: Propose | None = None,
    ) -> None:
        """`rows`: slot, token, position and place of the step's rows, and `drawn` their tokens, [R] int32.
        `control`, `item_bounds`, `ring_words`: see `add_drafts`. `propose` is launched in steps with
        drafts; None: there are none."""
        if state.drafts is None:
            raise ValueError("slots have one row each")
        slot, token, position, place = rows
        self._state = state
        self._drafts = state.drafts
        self._rows = RowArrays(slot, token, position, torch.zeros_like(slot), place)
        self._drawn = drawn
        self._control = control
        self._item_bounds = item_bounds
        self._ring_words = ring_words
        self._propose = propose
        self._given = torch.zeros(state.shape.slots, dtype=torch.int32, device=slot.device)

    @property
    def depth(self) -> Tensor:
        """The depth of each row, [R] int32."""
        return self._rows.depth

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Token and depth of each row, for `edit_logits`."""
        return self._rows.token, self._rows.depth

    @property
    def progress(self) -> tuple[Tensor, Tensor, Tensor]:
        """Depth of each row, and by slot how many drafts it was given and their source, for `finish`."""
        return self._rows.depth, self._given, self._drafts.source

    def add(self, bucket: int, fixed: int | None) -> None:
        """Launches what proposes drafts and gives them rows, behind `begin`; `fixed`: see `SplitPolicy`."""
        if self._propose is not None:
            self._propose()
        add_drafts(
            self._rows, self._given, self._drafts, self._state.records.view(torch.int32), self._control,
            self._item_bounds, bucket, most=self._state.shape.rows_per_slot - 1,
            vocab=self._state.sampler.counts.in_output.shape[1], ring_words=self._ring_words, fixed=fixed,
        )  # fmt: skip

    def accept(self) -> None:
        """Launches what decides which rows count, behind the draw."""
        accept_rows(self._rows, self._drawn, self._state.records.view(torch.int32), self._control)

    def append(self) -> None:
        """Launches what adds a step's tokens to the histories; in steps without drafts, too. Before `finish`,
        so that the history of a sequence which is seen to have ended has all of it."""
        if self._state.history is not None:
            rows = self._rows.slot, self._rows.position, self._rows.place
            append_history(self._state.history, rows, self._drawn, self._control)
