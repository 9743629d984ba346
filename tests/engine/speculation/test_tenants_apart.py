"""No draft of one tenant's text is given to another: requests of four tenants in eight slots, whose
prompts and most words are the same, and whose answers differ where each tenant has words of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from baton.engine.speculation.drafts import Source
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_cells import BUCKET_BYTES
from baton.engine.speculation.lookahead_table import LookaheadTable, Output
from baton.engine.speculation.prompt_lookup import PromptLookup
from tests.engine.kernels.gpu.speculation.slot_arrays import DEVICE, Slot, SlotArrays

TENANTS, SLOTS, QUESTIONS, WORDS = 4, 8, 8, 100
_CPU = torch.device("cpu")


def answer(question: int, tenant: int) -> list[int]:
    """The answer to a tenant, every fifth word of which is its own."""
    draw = random.Random(question)
    shared = [draw.randrange(WORDS) for _ in range(20)]
    return [word + (1 + tenant) * WORDS if at % 5 == 4 else word for at, word in enumerate(shared)]


@dataclass
class Office:
    """Answers requests. `names`: of the tenants. `given`: drafts of the table that the slots have had, by the
    owner of their words: the tenant itself, all, or another tenant."""

    buckets: int
    names: tuple[str, ...] = ("a", "b", "c", "d")
    device: torch.device = _CPU
    given: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        size, ids = self.buckets * BUCKET_BYTES, WORDS * (1 + TENANTS)
        self.table = LookaheadTable(SLOTS, size, ids, self.device)
        self._history = History(SLOTS, 64, self.device)

    def run(self, count: int) -> None:
        """Runs `count` requests, which take turns in the slots."""
        draw, running = random.Random(5), dict[int, tuple[int, list[int], int]]()
        begun = 0
        while begun < count or running:
            for slot in range(SLOTS):
                if slot not in running and begun < count:
                    running[slot] = self._begin(slot, draw.randrange(QUESTIONS), draw.randrange(TENANTS))
                    begun += 1
            self._step(running)
            for slot in [slot for slot in running if draw.random() < 0.4]:
                self._end(slot, *running.pop(slot)[1:])

    def _begin(self, slot: int, question: int, tenant: int) -> tuple[int, list[int], int]:
        prompt = [question, 7, 8, 9]
        self._history.fill(slot, prompt)
        self.table.begin(slot, self.names[tenant], len(prompt))
        return tenant, prompt + answer(question, tenant), len(prompt) + 1

    def _step(self, running: dict[int, tuple[int, list[int], int]]) -> None:
        """Every sequence has grown by some tokens; counts the drafts that it is given."""
        for slot, (tenant, text, done) in running.items():
            grown = min(done + 3, len(text) - 1)
            self._append(slot, text, int(self._history.end[slot]), grown)
            running[slot] = tenant, text, grown
        for slot, token in self._drafts_of_table(sorted(running)):
            owner = token // WORDS - 1
            kind = "shared" if owner < 0 else "own" if owner == running[slot][0] else "another's"
            self.given[kind] += 1

    def _drafts_of_table(self, slots: list[int]) -> Iterator[tuple[int, int]]:
        """Slots and drafts."""
        made = PromptLookup(self._history, self.table).propose(torch.tensor(slots))
        for row, slot in enumerate(slots):
            if int(made.sources[row]) == Source.TABLE:
                yield from ((slot, token) for token in made.tokens[row, : int(made.lengths[row])].tolist())

    def _append(self, slot: int, text: list[int], begin: int, end: int) -> None:
        positions = torch.arange(begin, end, device=self.device)
        tokens = torch.tensor(text[begin:end], device=self.device)
        self._history.append(torch.full_like(positions, slot), positions, tokens)

    def _end(self, slot: int, text: list[int], done: int) -> None:
        self._append(slot, text, done, len(text))
        if (output := self.table.take_output(slot, len(text))) is not None:
            self._learn(output)

    def _learn(self, output: Output) -> None:
        self.table.learn(self._history, output)


class KernelOffice(Office):
    """The same by the kernels of a step."""

    def _drafts_of_table(self, slots: list[int]) -> Iterator[tuple[int, int]]:
        from baton.engine.kernels.gpu.speculation.find_match import find_match

        arrays = SlotArrays([Slot(int(end) - 1) for end in self._history.end], 1)
        best = torch.zeros(SLOTS, dtype=torch.int32, device=self.device)
        active = torch.zeros(SLOTS, dtype=torch.bool, device=self.device)
        active[slots] = True
        find_match(self._history, arrays.drafts, active, arrays.records, best, self.table)
        counts, sources = arrays.drafts.count.tolist(), arrays.drafts.source.tolist()
        for slot, tokens in enumerate(arrays.drafts.tokens.tolist()):
            if slot in slots and sources[slot] == Source.TABLE:
                yield from ((slot, token) for token in tokens[: counts[slot]])

    def _learn(self, output: Output) -> None:
        from baton.engine.kernels.gpu.speculation.lookahead import fill_table

        fill_table(self.table, self._history, output)


def prove(count: int, office: Office) -> None:
    office.run(count)
    assert office.given["another's"] == 0
    assert office.given["own"] > count // 4
    replaced = office.table.replaced
    print(f"{count} requests, drafts of the table: {dict(office.given)}; {replaced} cells replaced")


def test_three_hundred_requests_of_four_tenants() -> None:
    """The requests share a table that is full."""
    prove(300, Office(200))


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [200, 20_000])
def test_ten_thousand_requests_of_four_tenants(buckets: int) -> None:
    prove(10_000, Office(buckets))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("buckets", [200, 20_000])
def test_ten_thousand_requests_by_kernels(buckets: int) -> None:
    prove(10_000, KernelOffice(buckets, device=torch.device(DEVICE)))


def test_tenants_of_one_name_are_given_one_anothers() -> None:
    """So there is something to be kept apart."""
    office = Office(2000, names=("a",) * TENANTS)
    office.run(60)
    assert office.given["another's"] > 20
