"""The conversations of a run. Number n is the same in every process, so that processes share one load without
communication. A single request is a conversation of one turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loadgen.common.settings import RequestClass, Settings
from loadgen.load.alphabet import Content, WordAlphabet, alphabet_of
from loadgen.load.distributions import Distribution
from loadgen.load.prompts import PromptMaker

_CONVERSATIONS = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message and the length of its answer."""

    content: Content
    # Tokens of the content; None where only the server knows.
    tokens: int | None
    output_tokens: int
    # Seconds between the end of the last answer and this turn.
    think_s: float = 0.0
    # Seconds after which the client cancels.
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Consecutive turns of one class."""

    number: int
    klass: RequestClass
    turns: tuple[Turn, ...]


class Workload(Protocol):
    """A source of conversations, by number."""

    def conversation(self, number: int) -> Conversation | None:
        """Conversation `number`; None where there are no more."""


class Mix:
    """Draws what does not depend on the prompts: class, think times, cancellations."""

    def __init__(self, settings: Settings) -> None:
        load = settings.load
        weights = np.array([one.weight for one in load.classes])
        self._shares = np.cumsum(weights / weights.sum())
        # A class without limits uses the run's.
        common = settings.judge.goodput
        self._classes = tuple(
            one if one.goodput or not common else one.model_copy(update={"goodput": common})
            for one in load.classes
        )
        self._cancel_share = load.cancel_share
        self._cancel_after = Distribution.parse(load.cancel_after)
        self._think = Distribution.parse(settings.prompts.think_time)
        self._seed = load.seed

    def random(self, number: int) -> np.random.Generator:
        """The random generator of one conversation."""
        return np.random.default_rng([self._seed, _CONVERSATIONS, number])

    def klass(self, random: np.random.Generator) -> RequestClass:
        """The class of a conversation."""
        place = int(np.searchsorted(self._shares, random.random(), side="right"))
        return self._classes[min(place, len(self._classes) - 1)]

    def turn(
        self, random: np.random.Generator, content: Content, tokens: int | None, output: int, first: bool
    ) -> Turn:
        """The turn with its think time and, if it is cancelled, the time."""
        leaves = self._cancel_share > 0 and random.random() < self._cancel_share
        return Turn(
            content,
            tokens,
            output,
            0.0 if first else self._think.draw(random),
            self._cancel_after.draw(random) if leaves else None,
        )


class SyntheticWorkload:
    """An endless sequence of prompts drawn from distributions."""

    def __init__(self, settings: Settings) -> None:
        prompts = settings.prompts
        self._mix = Mix(settings)
        self._alphabet = alphabet_of(prompts)
        self._maker = PromptMaker(prompts, self._alphabet, settings.load.seed)
        self._turns = Distribution.parse(prompts.turns)
        self._system_len = prompts.system_len
        self._lengths = {
            one.name: (
                Distribution.parse(one.input_len or prompts.input_len),
                Distribution.parse(one.output_len or prompts.output_len),
            )
            for one in settings.load.classes
        }

    def conversation(self, number: int) -> Conversation | None:
        """Draws conversation `number`; the same for the same seed."""
        random = self._mix.random(number)
        klass = self._mix.klass(random)
        turns = tuple(
            self._turn(random, klass.name, first=turn == 0) for turn in range(self._turns.draw_length(random))
        )
        return Conversation(number, klass, turns)

    def _turn(self, random: np.random.Generator, klass: str, *, first: bool) -> Turn:
        inputs, outputs = self._lengths[klass]
        tokens, output = inputs.draw_length(random), outputs.draw_length(random)
        alphabet = self._alphabet
        symbols = self._maker.symbols(random, tokens)
        if first:
            symbols = np.concatenate([self._maker.system(random), symbols])
            tokens += self._system_len
        content = alphabet.content(symbols, tokens)
        if isinstance(alphabet, WordAlphabet):
            tokens = alphabet.counted(tokens)
        return self._mix.turn(random, content, tokens, output, first)
