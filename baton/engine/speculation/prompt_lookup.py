"""Drafts by looking the last tokens of a sequence up in the output that its request predicts, in its own
text, and in the lookahead table.

The longest match of its last 2 to 8 tokens with an earlier place decides, of equally long ones the
prediction's, then the text's and last the table's, and of one text's the latest. What follows there are the
drafts; a longer match gives more of them. If the match is so near to the end of the text that the drafts
reach it, the drafts continue the text that they are taken from: so a few tokens that repeat over and over
are continued.

Where there is no such match, the last token may have taken the place of another one: then the longest match
of the 2 to 8 tokens before it decides, of equally long ones the prediction's and in one text the earliest,
and the drafts are what follows the token in the last one's place there. The latest such place is the one
whose drafts were wrong just now.

Texts have no index to build, grow or evict from: a step reads far more KV than the history
that is compared (docs/decisions).

Prompt lookup: Saxena, https://github.com/apoorvumang/prompt-lookup-decoding; suffix matching as in Oliaro et
al., "SuffixDecoding" (arXiv 2411.04975). This is the plain twin of the kernels in `kernels/gpu/speculation`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import Source
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_table import LookaheadTable
from baton.engine.speculation.proposer import Proposals

LONGEST_MATCH = 8
DRAFTS_BY_MATCH = (0, 0, 2, 3, 4, 7, 7, 7, 7)
"""Number of drafts that a match bears out, by its length in tokens."""
DRAFTS_BEHIND_OTHER = 5
"""Number of drafts that a match of the tokens before the last one bears out."""
assert len(DRAFTS_BY_MATCH) == LONGEST_MATCH + 1
assert max(*DRAFTS_BY_MATCH, DRAFTS_BEHIND_OTHER) <= MOST_DRAFTS

Tokens = npt.NDArray[np.int32]


class Match(NamedTuple):
    """Drafts, where they come from, and how many of the last tokens precede them there; 0: there are none, or
    those before the last one precede them."""

    drafts: Tokens
    source: Source
    length: int


class PromptLookup:
    """Proposes from a history, and from a table where there is one."""

    def __init__(self, history: History, table: LookaheadTable | None = None) -> None:
        self._history = history
        self._table = table

    def propose(self, slots: Tensor) -> Proposals:
        """Looks up drafts for each slot, as `Proposer` says."""
        count = len(slots)
        tokens = torch.zeros(count, MOST_DRAFTS, dtype=torch.int64)
        lengths, sources = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
        for row, slot in enumerate(slots.tolist()):
            drafts, source, _ = self._look_up(slot)
            lengths[row], sources[row] = len(drafts), source
            tokens[row, : len(drafts)] = torch.from_numpy(drafts.astype(np.int64))
        device = slots.device
        return Proposals(tokens.to(device), lengths.to(device), sources.to(device))

    def _look_up(self, slot: int) -> Match:
        text, table = self._history.text(slot), self._table
        match = Match(text[:0], Source.TEXT, 0)
        if table is None or not table.alone:
            match = look_up(text, self._history.prediction(slot))
        if table is not None:
            length, ids = table.look_up(slot, text)
            if length > match.length:
                match = Match(ids[: DRAFTS_BY_MATCH[length]], Source.TABLE, length)
        return match


def look_up(text: Tokens, prediction: Tokens) -> Match:
    """Returns what may follow `text`, by its longest match in itself or in the prediction."""
    last = text[::-1][:LONGEST_MATCH]
    # A match ends before the text's end, and where something follows in the prediction.
    in_text, in_prediction = _longest(text[:-1], last), _longest(prediction[:-1], last)
    if max(in_text[0], in_prediction[0]) < 2:
        return _behind_other(text, prediction)
    if in_text[0] > in_prediction[0]:
        length, end = in_text
        # The text from there on, over and over.
        return Match(np.resize(text[end:], DRAFTS_BY_MATCH[length]), Source.TEXT, length)
    length, end = in_prediction
    return Match(prediction[end : end + DRAFTS_BY_MATCH[length]], Source.PREDICTION, length)


def _behind_other(text: Tokens, prediction: Tokens) -> Match:
    """Returns what follows another token in the last one's place."""
    last = text[::-1][1 : 1 + LONGEST_MATCH]
    in_text, in_prediction = (_longest(where[:-2], last, latest=False) for where in (text, prediction))
    if max(in_text[0], in_prediction[0]) < 2:
        return Match(text[:0], Source.TEXT, 0)
    if in_text[0] > in_prediction[0]:
        return Match(np.resize(text[in_text[1] + 1 :], DRAFTS_BEHIND_OTHER), Source.TEXT, 0)
    begin = in_prediction[1] + 1
    return Match(prediction[begin : begin + DRAFTS_BEHIND_OTHER], Source.PREDICTION, 0)


def _longest(where: Tokens, last: Tokens, *, latest: bool = True) -> tuple[int, int]:
    """The longest match of a text's last tokens, the last one first: its length, and its end, the latest or
    earliest of equals."""
    matches = np.ones(len(where), dtype=bool)
    length = end = 0
    for back, token in enumerate(last):
        # matches[e]: the token `back` places before the e-th is the text's as well.
        matches[back:] &= where[: len(where) - back] == token
        matches[:back] = False
        if not matches.any():
            break
        length, end = back + 1, int(np.flatnonzero(matches)[-1 if latest else 0]) + 1
    return length, end
