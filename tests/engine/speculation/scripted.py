"""Proposers that know what a sequence will draw, and propose what they are told to: nothing that a step gives
out may depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.decode.slot_state import SlotState
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import Source
from baton.engine.speculation.prompt_lookup import PromptLookup
from baton.engine.speculation.proposer import Proposals

Key = tuple[int, int]
Script = Callable[[random.Random, list[int]], list[int]]
"""The tokens that a sequence will draw next, none behind its end → the drafts."""
VOCAB = 97


def wrong(token: int) -> int:
    """Returns a token that differs from `token`."""
    return (token + 1) % VOCAB


def oracle(error_rate: float) -> Script:
    """Each draft is wrong at this rate; those behind a wrong one may be right."""

    def script(draw: random.Random, right: list[int]) -> list[int]:
        return [wrong(token) if draw.random() < error_rate else token for token in right]

    return script


def past_the_end(draw: random.Random, right: list[int]) -> list[int]:
    """Goes on behind the end with its last token, which may be a stop id."""
    return right + (MOST_DRAFTS - len(right)) * right[-1:]


def noise(draw: random.Random, right: list[int]) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(draw.randint(0, MOST_DRAFTS))]


SCRIPTS: dict[str, Script] = {
    "right": lambda draw, right: right,
    "wrong": oracle(1.0),
    "oracle 0.1": oracle(0.1),
    "oracle 0.5": oracle(0.5),
    "random lengths": lambda draw, right: right[: draw.randint(0, MOST_DRAFTS)],
    "past the end": past_the_end,
    "noise": noise,
}
LOOKUP = "lookup"
PROPOSERS = (*SCRIPTS, LOOKUP)


@dataclass(eq=False)
class ScriptedProposer:
    """`texts`: the whole text of each sequence, to its end; `scripts`: the name of each one's proposer. Those
    of sequences that are in neither propose nothing."""

    state: SlotState
    draw: random.Random
    texts: dict[Key, Sequence[int]] = field(default_factory=dict)
    scripts: dict[Key, str] = field(default_factory=dict)

    def begin(self, key: Key, text: Sequence[int], script: str) -> None:
        """Scripts the drafts of a sequence whose whole text, to its end, is `text`."""
        self.texts[key], self.scripts[key] = text, script

    def propose(self, slots: Tensor) -> Proposals:
        """Returns the script's drafts of these slots."""
        looked_up = None if self.state.history is None else PromptLookup(self.state.history).propose(slots)
        tokens = torch.zeros(len(slots), MOST_DRAFTS, dtype=torch.int64)
        lengths, sources = torch.zeros(len(slots), dtype=torch.int64), torch.zeros_like(slots)
        for row, slot in enumerate(slots.tolist()):
            key = slot, int(self.state.generation[slot])
            script = self.scripts.get(key)
            if script == LOOKUP and looked_up is not None:
                tokens[row], lengths[row], sources[row] = (column[row] for column in looked_up)
            elif script is not None:
                drafts = self._drafts(script, key, int(self.state.position[slot]))
                lengths[row], sources[row] = len(drafts), self.draw.choice(list(Source))
                tokens[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
                # What lies behind a slot's drafts has no meaning.
                tokens[row, len(drafts) :] = self.draw.randrange(VOCAB)
        return Proposals(tokens, lengths, sources)

    def _drafts(self, script: str, key: Key, position: int) -> list[int]:
        right = list(self.texts[key][position + 1 : position + 1 + MOST_DRAFTS])
        return SCRIPTS[script](self.draw, right)[:MOST_DRAFTS]
