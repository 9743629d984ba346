"""Orders prompts: the shortest first, and others before them as their TTFT limits require. Torch-free.

As many prompts with limits as possible are kept in time, the longest given up first (J. M. Moore, "An n job,
one machine sequencing algorithm for minimizing the number of late jobs", Management Science 15(1), 1968).
Kept ones run by the earliest deadline where they must; as long as none of them would be late for it, what is
shorter goes before them (slack stealing: Lehoczky and Ramos-Thuel, "An optimal algorithm for scheduling
soft-aperiodic tasks in fixed-priority preemptive systems", RTSS 1992). One that is given up has no precedence
any more: it waits like a prompt without a limit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from baton.engine.sequence import Sequence


class Prompt(NamedTuple):
    """A prompt that waits: what it takes from now on, and until when its first token is due, in seconds;
    infinite where it has no limit."""

    sequence: Sequence
    left_s: float
    due_s: float = math.inf


def in_order(prompts: list[Prompt], step_s: float, share: float = 1.0) -> list[Sequence]:
    """The order for a step of `step_s` seconds, after which it is determined again; behind what fills the
    step, `prompts` as they are.

    `prompts`: the shortest first. `share`: of the time from now on, what those with limits may count on.
    """
    kept = _kept(prompts)
    slack = _least_slack(kept, share)
    chosen: dict[Prompt, None] = {}
    shortest, earliest = iter(prompts), iter(zip(kept, slack, strict=True))
    short, due = next(shortest, None), next(earliest, None)
    planned_s = taken_s = 0.0
    while short is not None and due is not None and planned_s < step_s:
        part_s = min(short.left_s, step_s)
        if short is not due[0] and part_s > due[1] - taken_s:
            first = due[0]
        else:
            first = short
            taken_s += part_s if short is not due[0] else 0.0
        chosen[first] = None
        planned_s += first.left_s
        while short in chosen:
            short = next(shortest, None)
        while due is not None and due[0] in chosen:
            due = next(earliest, None)
    return [one.sequence for one in (*chosen, *(one for one in prompts if one not in chosen))]


def _kept(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Selects prompts with limits that can all be met, if nothing else runs, by when they are due."""
    limited = sorted((one for one in prompts if one.due_s < math.inf), key=lambda one: one.due_s)
    longest: list[tuple[float, int]] = []
    total_s = 0.0
    for place, prompt in enumerate(limited):
        heapq.heappush(longest, (-prompt.left_s, place))
        total_s += prompt.left_s
        if total_s > prompt.due_s:
            total_s += heapq.heappop(longest)[0]
    return [limited[place] for place in sorted(place for _, place in longest)]


def _least_slack(kept: list[Prompt], share: float) -> list[float]:
    """Returns for each place how long the kept prompts from there on may wait, if then they run by when
    they are due with a share of the time."""
    total_s, slack = 0.0, []
    for prompt in kept:
        total_s += prompt.left_s
        slack.append(prompt.due_s - total_s / share)
    for place in reversed(range(len(slack) - 1)):
        slack[place] = min(slack[place], slack[place + 1])
    return slack
