"""The rows of a step: one for each slot that advances, and those that verify its drafts, side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import Source


@dataclass(frozen=True, slots=True)
class VerificationRows:
    """The rows of a step with drafts. All but `drafts` are int64.

    `slots` [B]: those that advance, and `drafts` [B, MOST_DRAFTS] their drafts; `begins` [B + 1]: the first
    row of each, and behind the last one. `slot`, `token`, `position`, `depth` [R]: of each row its slot, its
    input and the input's position; 0 for a slot's first row, d for its d-th draft.
    """

    slots: Tensor
    drafts: Tensor
    begins: Tensor
    slot: Tensor
    token: Tensor
    position: Tensor
    depth: Tensor

    @classmethod
    def of(
        cls, slots: Tensor, last_tokens: Tensor, positions: Tensor, drafts: Tensor, counts: Tensor
    ) -> VerificationRows:
        """The rows of slots that have `counts` drafts. slots, last_tokens, positions and counts [B]; drafts
        [B, MOST_DRAFTS]."""
        rows = 1 + counts.long()
        begins = torch.cat((rows.new_zeros(1), rows.cumsum(0)))
        index = torch.repeat_interleave(rows)
        depth = torch.ones_like(index).cumsum(0) - 1 - begins[index]
        token = torch.where(
            depth == 0, last_tokens[index].long(), drafts[index, (depth - 1).clamp(min=0)].long()
        )
        return cls(
            slots=slots,
            drafts=drafts,
            begins=begins,
            slot=slots[index],
            token=token,
            position=positions[index].long() + depth,
            depth=depth,
        )

    @classmethod
    def plain(cls, slots: Tensor, last_tokens: Tensor, positions: Tensor) -> VerificationRows:
        """The rows of a step without drafts."""
        none = torch.zeros_like(slots)
        return cls.of(slots, last_tokens, positions, none[:, None].expand(-1, MOST_DRAFTS), none)

    def given(self, counts: Tensor) -> Tensor:
        """Number of each slot's rows that count; counts [R] bool → [B]."""
        index = torch.repeat_interleave(self.begins.diff())
        return torch.zeros_like(self.slots).index_add_(0, index, counts.long())

    def progress(self, counts: Tensor, sources: Tensor) -> Tensor:
        """Amounts by which the step advances the fields of `Progress`: [B, 7]. counts [R] bool; sources [B]:
        the `Source` of each slot's drafts."""
        drafts, accepted = self.begins.diff() - 1, self.given(counts) - 1
        columns = [torch.ones_like(drafts), drafts, accepted]
        for source in (Source.PREDICTION, Source.TABLE):
            columns += [drafts * (sources == source), accepted * (sources == source)]
        return torch.stack(columns, dim=1)

    def drafts_before(self) -> Tensor:
        """The drafts that a row's token would follow: [R, MOST_DRAFTS], its own input among them; unused
        places negative."""
        drafts = self.drafts.long().repeat_interleave(self.begins.diff(), dim=0)
        depths = torch.ones_like(drafts).cumsum(1)
        return torch.where(depths <= self.depth[:, None], drafts, -1)


def usable_drafts(
    counts: Tensor, most: Tensor, position: Tensor, capacity: Tensor, end: Tensor, masked: Tensor
) -> Tensor:
    """Number of drafts of each slot that a step may verify; all are [B].

    `counts`: drafts that there are for the tokens behind `position`, that of the slot's last token; `most`:
    as many as its request allows; `capacity`: tokens that its blocks hold; `end`: length at which its
    sequence ends; `masked`: whether each of its tokens waits for a mask of its own, so that it can have no
    draft.
    """
    # The row of draft d computes the KV at position + d, and its token makes the sequence position + d + 2
    # long.
    by_blocks = capacity - position - 1
    by_end = end - position - 2
    usable = torch.minimum(torch.minimum(counts, most), torch.minimum(by_blocks, by_end)).clamp(min=0)
    return torch.where(masked, 0, usable)


def share_rows(wanted: Tensor, spare: int, turn: int) -> Tensor:
    """Gives rows to drafts: wanted [B] int64, each slot's number of drafts → the number of them that get a
    row [B].

    `spare` rows are given out, each slot's first draft before any slot's second, beginning with slot
    `turn` modulo B.
    """
    given = torch.zeros_like(wanted)
    for depth in range(1, MOST_DRAFTS + 1):
        asks = (wanted >= depth).roll(-turn)
        gets = (asks & (asks.cumsum(0) <= spare)).roll(turn)
        given += gets
        spare -= int(gets.sum())
    return given
