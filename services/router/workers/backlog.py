"""Models the prompts that a worker has yet to compute, and which of them go before another.

Workers do not compute prompts in the order of arrival (`baton.engine.plan.prompt_order`): the shortest first,
as long as every prompt that can meet its limit does, else the one that is due first. The model of that here
is coarse and cheap: of a prompt that comes now, those go first that take no longer, and longer ones that are
due before it and would be late otherwise. If it would be late then, only those go first that are due before
it, as long as that makes none late that is due after it. What has been computed is taken to be of the oldest.

Prompts of a router's other processes are known by seconds and length alone (`SecondsByLength`): shorter ones
go first, and where those go first that are due before, all of them do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.base.prefill_defaults import ALONE_STEP_S, MARGIN

# The prompts of a worker, and of the queue, that are looked at for a prediction; where there are more, one
# that comes is taken to wait for all.
MOST_PROMPTS = 64
# Prompts are of one length that take the same power of 2 of these seconds.
_SHORTEST_S, LENGTHS = 1e-3, 12

SecondsByLength = tuple[float, ...]
"""Seconds of prompts: item i of those that take 2^i to 2^(i + 1) ms each, the first also of shorter and the
last of longer ones."""
NO_PROMPTS: SecondsByLength = (0.0,) * LENGTHS


class PromptWait(NamedTuple):
    """Predicted wait of a prompt: the seconds until it begins; `tokens_behind`: of prompts that are there and
    go after it."""

    wait_s: float
    tokens_behind: int = 0


class Prompt(NamedTuple):
    """A prompt that waits: the seconds that it takes of a worker, or that are left; its tokens; when its
    first token is due; its length in seconds, by which it is compared with others. `limits_known` False: it
    may be due at any time."""

    seconds: float
    tokens: int
    due_at: float
    length_s: float
    limits_known: bool = True


class Queued(NamedTuple):
    """Requests that wait in queues before another: their number; seconds of prompts, on one worker, that go
    first in any case; and the prompts that go first or not by their length and limits."""

    requests: int = 0
    prefill_s: float = 0.0
    prompts: Sequence[Prompt] = ()


def length_of(seconds: float) -> int:
    """Index in `SecondsByLength` of prompts that take `seconds`."""
    return min(LENGTHS - 1, max(0, math.frexp(seconds / _SHORTEST_S)[1] - 1))


def seconds_by_length(prompts: Iterable[float]) -> SecondsByLength:
    """Sums the predicted seconds of prompts by length."""
    sums = list(NO_PROMPTS)
    for seconds in prompts:
        sums[length_of(seconds)] += seconds
    return tuple(sums)


def prompts_of(seconds: SecondsByLength, tokens: int = 0) -> list[Prompt]:
    """One prompt for all of a length, compared as the shortest of them. `tokens`: of all lengths together,
    which are divided as their seconds are."""
    total_s = sum(seconds) or 1.0
    return [
        Prompt(
            each,
            round(tokens * each / total_s),
            math.inf,
            _SHORTEST_S * 2**i if i else 0.0,
            limits_known=False,
        )
        for i, each in enumerate(seconds)
        if each > 0
    ]


def all_seconds(parts: Sequence[SecondsByLength]) -> SecondsByLength:
    """The sum of each length."""
    if not parts:
        return NO_PROMPTS
    return parts[0] if len(parts) == 1 else tuple(map(sum, zip(*parts, strict=True)))


class BacklogPart(NamedTuple):
    """The prompts of some processes of a router at a worker: seconds of all that they ever sent there, of
    those that have not ended, and what is left of these by length."""

    added_s: float = 0.0
    unfinished_s: float = 0.0
    left: SecondsByLength = NO_PROMPTS

    @classmethod
    def of(cls, parts: Sequence[BacklogPart]) -> BacklogPart:
        """Adds up the parts of several processes."""
        return cls(
            sum(part.added_s for part in parts),
            sum(part.unfinished_s for part in parts),
            all_seconds([part.left for part in parts if part.unfinished_s]),
        )


NO_BACKLOG = BacklogPart()


class Backlog:
    """Predicted seconds of the prompts that this router has at a worker.

    Their sum shrinks as time passes, and is corrected at the end of each prompt: what is left cannot take
    longer than the prompts that have not ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompts: dict[int, Prompt] = {}
        self._added = 0
        # Of all that were added, and of those that have not ended.
        self._added_s = self._own_s = 0.0
        self._clear_at = 0.0
        self._siblings = NO_BACKLOG
        self._sibling_tokens = 0

    @property
    def wait_s(self) -> float:
        """Predicted seconds until everything is computed that is there."""
        return max(0.0, self._clear_at - self._clock()) if self._unfinished_s else 0.0

    @property
    def prompts(self) -> int:
        """Number of prompts of this process that have not ended."""
        return len(self._prompts)

    @property
    def own(self) -> BacklogPart:
        """The prompts of this process."""
        left = seconds_by_length(self._seconds_left()) if self._prompts else NO_PROMPTS
        return BacklogPart(self._added_s, self._own_s, left)

    @property
    def computed_s(self) -> float:
        """Seconds of all that was computed of prompts that this process and its siblings ever sent there. It
        changes by all of a sibling's when that one ends or starts."""
        return self._added_s + self._siblings.added_s - self.wait_s

    @property
    def overdue_s(self) -> float:
        """Seconds since all prompts should have been computed, while some of this process have not ended; 0
        after each that is added."""
        return max(0.0, self._clock() - self._clear_at) if self._prompts else 0.0

    @property
    def _unfinished_s(self) -> float:
        """Seconds of all prompts that have not ended."""
        return self._own_s + self._siblings.unfinished_s

    def _part(self, unfinished_s: float) -> float:
        """Remaining seconds of prompts of `unfinished_s` in all, if all unfinished prompts progress
        proportionally."""
        return unfinished_s * self.wait_s / (self._unfinished_s or 1.0)

    def wait_of(
        self, seconds: float, left_s: float | None = None, queued: Sequence[Prompt] = ()
    ) -> PromptWait:
        """Predicts the wait of a prompt that comes now and takes `seconds`, whose first token is due in
        `left_s`. `queued`: prompts that will be sent there."""
        if len(self._prompts) + len(queued) > 2 * MOST_PROMPTS:
            return PromptWait(self.wait_s + _sum_s(queued))
        now = self._clock()
        prompts = [*self._left(), *self._left_of_siblings(), *queued]
        new = Prompt(seconds, 0, math.inf if left_s is None else now + left_s, seconds)
        due_before = _due_before(new, prompts, now)
        if due_before is None:
            return PromptWait(_sum_s(prompts))
        first = _first_by_length(new, prompts, now)
        if now + _wait_s(first, prompts) + seconds > new.due_at:
            first = [*due_before, *(one for one in prompts if not one.limits_known)]
        behind = sum(one.tokens for one in prompts) - sum(one.tokens for one in first)
        return PromptWait(_wait_s(first, prompts), behind)

    def _left(self) -> list[Prompt]:
        """The prompts of this process, the oldest first, with what is left of each."""
        left = zip(self._prompts.values(), self._seconds_left(), strict=True)
        return [prompt._replace(seconds=left_s, length_s=left_s) for prompt, left_s in left]

    def _seconds_left(self) -> list[float]:
        computed_s = self._own_s - self._part(self._own_s)
        left = []
        for prompt in self._prompts.values():
            left_s = prompt.seconds - computed_s if computed_s > 0 else prompt.seconds
            computed_s -= prompt.seconds
            left.append(left_s if left_s > 0 else 0.0)
        return left

    def _left_of_siblings(self) -> list[Prompt]:
        left, total_s = self._siblings.left, sum(self._siblings.left)
        if not total_s:
            return []
        scale = self._part(self._siblings.unfinished_s) / total_s
        return prompts_of(tuple(scale * each for each in left), self._sibling_tokens)

    def set_siblings(self, part: BacklogPart, tokens: int = 0) -> None:
        """Takes the prompts that sibling processes have there, and their tokens."""
        if part.added_s > self._siblings.added_s:
            self._clear_at = self._clock() + self.wait_s + part.added_s - self._siblings.added_s
        self._siblings, self._sibling_tokens = part, tokens
        self._correct()

    def add(self, seconds: float, tokens: int = 0, left_s: float | None = None) -> int:
        """Adds a prompt, whose first token is due in `left_s`; returns its number, for `ended`."""
        now = self._clock()
        self._clear_at = now + self.wait_s + seconds
        self._added += 1
        self._added_s += seconds
        self._own_s += seconds
        due_at = math.inf if left_s is None else now + left_s
        self._prompts[self._added] = Prompt(seconds, tokens, due_at, seconds)
        return self._added

    def ended(self, number: int) -> None:
        """Removes a prompt that was computed, or will not be. Idempotent."""
        if (prompt := self._prompts.pop(number, None)) is not None:
            self._own_s = self._own_s - prompt.seconds if self._prompts else 0.0
            self._correct()

    def _correct(self) -> None:
        """Corrects the estimate: what is left takes no longer than the prompts that have not ended."""
        self._clear_at = min(self._clear_at, self._clock() + self._unfinished_s)


def _first_by_length(new: Prompt, prompts: list[Prompt], now: float) -> list[Prompt]:
    """The prompts before a new one while the shortest go first, except where one that is due earlier would be
    late for it; one that is late in any case has no claim."""
    first = [one for one in prompts if one.length_s <= new.length_s]
    planned_s = _sum_s(first) + new.seconds
    longer = (one for one in prompts if one.length_s > new.length_s and one.due_at < new.due_at)
    for one in sorted(longer, key=lambda one: one.due_at):
        if now + one.seconds <= one.due_at < now + MARGIN * (planned_s + one.seconds) + ALONE_STEP_S:
            first.append(one)
            planned_s += one.seconds
    return first


def _due_before(new: Prompt, prompts: list[Prompt], now: float) -> list[Prompt] | None:
    """The prompts that can meet their limits and are due before a new one: those alone go before it where
    it has to go. None where it would make one late that is due after it: what is there is not given up."""
    first: list[Prompt] = []
    planned_s = 0.0
    limited = (one for one in prompts if one.due_at < math.inf)
    for one in sorted(limited, key=lambda one: one.due_at):
        if now + planned_s + one.seconds > one.due_at:
            continue  # it is late in any case
        planned_s += one.seconds
        if one.due_at <= new.due_at:
            first.append(one)
        elif now + MARGIN * (planned_s + new.seconds) + ALONE_STEP_S > one.due_at:
            return None
    return first


def _wait_s(first: list[Prompt], prompts: list[Prompt]) -> float:
    """Seconds until the prompts that go first are computed; the others hold them up by the step that runs,
    which is at most as long as while no short prompt waits."""
    first_s = _sum_s(first)
    return first_s + min(max(0.0, _sum_s(prompts) - first_s), ALONE_STEP_S)


def _sum_s(prompts: Sequence[Prompt]) -> float:
    return sum(one.seconds for one in prompts)
