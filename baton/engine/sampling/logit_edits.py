"""Changes to logits before a token is drawn. In this order: bias, penalties, stop ids held back, masks.

Each edit names the rows of the batch that it is for, and costs the others nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bias:
    """Numbers added to single logits.

    `rows` [b] int64; `ids` [b, n] int64, each at most once in a row; `values` [b, n] float32. Unused
    places are id 0, value 0.
    """

    rows: Tensor
    ids: Tensor
    values: Tensor

    def apply(self, logits: Tensor) -> None:
        rows = self.rows[:, None].expand_as(self.ids)
        logits.index_put_((rows, self.ids), self.values.double(), accumulate=True)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties that some rows' requests state against repetition.

    `rows` [p] int64. `repetition` [p] float32 divides positive logits and multiplies others of tokens in
    prompt or output; `frequency` [p] is subtracted for each occurrence in the output, `presence` [p]
    once. `in_prompt` [p, V] bool; `output_counts` [p, V] int32.
    """

    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    in_prompt: Tensor
    output_counts: Tensor

    def apply(self, logits: Tensor) -> None:
        mine = logits[self.rows]
        in_output = self.output_counts > 0
        factor = self.repetition.double()[:, None]
        repeated = torch.where(mine > 0, mine / factor, mine * factor)
        mine = torch.where(self.in_prompt | in_output, repeated, mine)
        mine -= self.frequency.double()[:, None] * self.output_counts
        mine -= self.presence.double()[:, None] * in_output
        logits[self.rows] = mine


@dataclass(frozen=True, slots=True)
class HeldStops:
    """Stop ids that may not be drawn yet. `rows` [m] int64; `ids` [m, n] int64, unused places negative."""

    rows: Tensor
    ids: Tensor

    def apply(self, logits: Tensor) -> None:
        row, place = torch.nonzero(self.ids >= 0, as_tuple=True)
        logits[self.rows[row], self.ids[row, place]] = -torch.inf


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens that may be drawn at all. `rows` [g] int64; `allowed` [g, V] bool."""

    rows: Tensor
    allowed: Tensor

    def apply(self, logits: Tensor) -> None:
        logits[self.rows] = logits[self.rows].masked_fill(~self.allowed, -torch.inf)


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of one batch; None where no row needs that kind."""

    bias: Bias | None = None
    penalties: Penalties | None = None
    held_stops: HeldStops | None = None
    masks: Masks | None = None

    def applied(self, logits: Tensor) -> Tensor:
        """logits [B, V] → themselves where there is nothing to do, else an edited copy.

        Computed in float64 and rounded once to float32, which logits of every narrower dtype fit in; those
        in float64 stay so.
        """
        every = (self.bias, self.penalties, self.held_stops, self.masks)
        edits = [edit for edit in every if edit is not None]
        if not edits:
            return logits
        edited = logits.to(torch.float64, copy=True)
        for edit in edits:
            edit.apply(edited)
        return edited if logits.dtype == torch.float64 else edited.float()


NO_EDITS = LogitEdits()
