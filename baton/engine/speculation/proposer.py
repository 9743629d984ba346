"""The interface of proposers of drafts, for steps that the host computes itself."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Proposals(NamedTuple):
    """Drafts of B slots: `tokens` [B, MOST_DRAFTS], of which the first `lengths` [B] are drafts; `sources`
    [B], each a `Source`."""

    tokens: Tensor
    lengths: Tensor
    sources: Tensor


class Proposer(Protocol):
    """Proposes what may follow the slots' last tokens. It need know nothing of limits, capacities, stop ids
    or masks: the step leaves out what it cannot verify, and its tokens do not depend on what was proposed."""

    def propose(self, slots: Tensor) -> Proposals:
        """Drafts of the tokens behind the last one of each of `slots` [B] int64."""
        ...
