"""Drafts that are looked up: how long finding them takes, and how many tokens a step they give.

    python -m bench.decode drafts [--runs 64x8192,256x32768] [--lookahead-mb 64] [--json]
    python -m bench.decode drafts --replay [--answers 200] [--tokens 400] [--text markov:0.9] [--table-mb 64]
        [--fills 10] [--json]
    python -m bench.decode drafts --replay --tasks copy,json [--count 40] [--json]

A run is slots x tokens of history, on a GPU. `random`: a vocabulary of 128,256, in which next to nothing
matches; `repeats`: a text of 500 tokens over and over; `constant`: one token, so that every place matches.
`us`: both nodes, of a graph. With a lookahead table, which is full of other texts' cells, so that nothing is
found, also `probed_us`: the same with the table; and `fill_us`: a table's learning of an output of 400
tokens.

--replay: on a CPU; no model runs, so there are no times. A greedy answer of which the tokens are known takes
as many steps as an engine needs that draws them: each accepts the drafts that are its next tokens. Every
answer is replayed with its own text alone (`own`), before it was ever answered with the lookahead table too
(`first sight`, answers before it were learned), and once more (`second sight`). Answers are of text that
repeats itself (`bench.markov_text`), each of a cycle of ids of its own; then other outputs are learned
until they have filled the table --fills times over, and the answers once more, which are replayed (`second
sight, later`). With --tasks they are the right answers of the demo model's tasks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_table import LookaheadTable
from baton.engine.speculation.prompt_lookup import PromptLookup
from bench.markov_text import CYCLE, chain, chance_of
from bench.options import program_parser, show

_RUNS = "64x8192,256x32768"
_VOCABULARY, _REPEATED = 128_256, 500
# Tokens of an output that is learned.
_OUTPUT = 400
TEXTS = ("random", "repeats", "constant")


def measure(
    slots: int, length: int, kind: str, device: str, table_mb: int = 0, output_tokens: int = _OUTPUT
) -> dict[str, Any]:
    """The line of one run."""
    from baton.engine.decode.slot_state import SlotState
    from baton.engine.kernels.gpu.speculation.find_match import find_match
    from baton.engine.kernels.gpu.speculation.lookahead import fill_table
    from baton.engine.speculation.lookahead_table import Output
    from bench.decode.timing import microseconds

    state = SlotState(slots, (1,), 256, torch.device(device), 1 + MOST_DRAFTS, length)
    history, drafts = state.history, state.drafts
    assert history is not None
    assert drafts is not None
    history.tokens.copy_(_texts(slots, length, kind))
    history.end.fill_(length)
    state.active.fill_(True)
    state.records.view(torch.uint8).fill_(1)  # whatever drafts a request allows, more than none
    best = torch.zeros(slots, dtype=torch.int32, device=device)
    records = state.records.view(torch.int32)

    def search(table: LookaheadTable | None = None) -> Callable[[], None]:
        return lambda: find_match(history, drafts, state.active, records, best, table)

    us = microseconds(search(), device)
    tokens, more = history.device_bytes, {}
    if table_mb:
        table = LookaheadTable(slots, table_mb * 10**6, _VOCABULARY, torch.device(device))
        table.cells.random_()
        table.seeds.fill_(1)
        more["probed_us"] = round(microseconds(search(table), device), 2)
        output = Output(0, 0, min(length, 1 + output_tokens), 1)
        more["fill_us"] = round(microseconds(lambda: fill_table(table, history, output), device), 2)
    return more | {
        "slots": slots, "history": length, "text": kind, "us": round(us, 2),
        "tb_s": round(tokens / us / 1e6, 3), "mean_drafts": round(float(drafts.count.float().mean()), 2),
    }  # fmt: skip


def _texts(slots: int, length: int, kind: str) -> Tensor:
    if kind == "constant":
        return torch.full((slots, length), 7)
    ids = torch.randint(_VOCABULARY, (slots, length))
    return ids if kind == "random" else ids[:, torch.arange(length) % _REPEATED]


_CPU = torch.device("cpu")
_DEMO_MODEL = Path(__file__).parents[2] / "baton" / "demo_model"
_IDS = 32_000
_PROMPT = 32
_LONGEST = 1 << 15


@dataclass(frozen=True, slots=True)
class Text:
    """An answer, of which the first token is prefill's, and its prompt."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(slots=True)
class Counts:
    """Steps behind the first token, drafts that they had, and those that were accepted."""

    steps: int = 0
    drafts: int = 0
    accepted: int = 0

    def line(self) -> dict[str, float]:
        """Formats the counts as figures of one step."""
        return {
            "tokens_a_step": round(1 + self.accepted / max(self.steps, 1), 3),
            "drafts_a_step": round(self.drafts / max(self.steps, 1), 3),
        }


class Replay:
    """Replays texts of one tenant in one slot. `table`: None: drafts come from the text itself alone."""

    def __init__(self, table: LookaheadTable | None, longest: int = _LONGEST) -> None:
        self._table = table
        self._history = History(1, longest, _CPU)
        self._lookup = PromptLookup(self._history, table)
        self._slot = torch.tensor([0])

    def run(self, text: Text, counts: Counts, prediction: Sequence[int] = ()) -> None:
        """Decodes an answer, and counts its steps."""
        tokens = [*text.prompt, *text.answer]
        self._begin(text, len(text.prompt), prediction)
        self._append(text.answer[:1], len(text.prompt))
        done = len(text.prompt) + 1
        while done < len(tokens):
            right = tokens[done : done + 1 + MOST_DRAFTS]
            made = self._lookup.propose(self._slot)
            # The last token needs no draft: a step draws it anyway.
            drafts = made.tokens[0, : int(made.lengths[0])].tolist()[: len(right) - 1]
            accepted = next((at for at, one in enumerate(drafts) if one != right[at]), len(drafts))
            self._append(right[: accepted + 1], done)
            done += accepted + 1
            counts.steps += 1
            counts.drafts += len(drafts)
            counts.accepted += accepted

    def learn(self, text: Text) -> None:
        """Has the table learn an answer."""
        assert self._table is not None
        tokens = [*text.prompt, *text.answer]
        self._begin(text, len(tokens))
        if (output := self._table.take_output(0, len(tokens))) is not None:
            self._table.learn(self._history, output)

    def _begin(self, text: Text, known: int, prediction: Sequence[int] = ()) -> None:
        self._history.fill(0, [*text.prompt, *text.answer][:known], prediction)
        if self._table is not None:
            self._table.begin(0, "tenant", len(text.prompt))

    def _append(self, tokens: Sequence[int], position: int) -> None:
        positions = torch.arange(position, position + len(tokens))
        self._history.append(torch.zeros_like(positions), positions, torch.tensor(tokens))


def markov_texts(count: int, tokens: int, chance: float, seed: int = 0) -> list[Text]:
    """Answers that are chains, each of a cycle of its own; prompts are their beginnings."""
    made = []
    for number in range(count):
        ids = random.Random(f"{seed} {number}").sample(range(_IDS), CYCLE)
        text = [ids[token] for token in chain(chance, _PROMPT + tokens, 1000 * seed + number)]
        made.append(Text(text[:_PROMPT], text[_PROMPT:]))
    return made


def task_texts(part: str, count: int) -> list[Text]:
    """Questions of a task and their right answers, as the demo model is asked and answers."""
    from transformers import AutoTokenizer

    from models.demo_training.exam import questions

    tokenizer = AutoTokenizer.from_pretrained(_DEMO_MODEL)
    made = []
    for turn in questions(part, count):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn.question}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(asked, add_special_tokens=False).input_ids
        answer = tokenizer(turn.answer, add_special_tokens=False).input_ids
        made.append(Text(prompt, [*answer, tokenizer.eos_token_id]))
    return made


def sights(texts: Sequence[Text], table: LookaheadTable) -> dict[str, Counts]:
    """Replays all texts by themselves, then with a table that learns each, then once more."""
    own, first, second = Counts(), Counts(), Counts()
    alone, replay = Replay(None), Replay(table)
    for text in texts:
        alone.run(text, own)
        replay.run(text, first)
        replay.learn(text)
    for text in texts:
        replay.run(text, second)
    return {"own": own, "first sight": first, "second sight": second}


def later(texts: Sequence[Text], table: LookaheadTable, fills: int, others: Callable[[int], Text]) -> Counts:
    """Counts a replay of `texts` from a table that has first learned other texts, until their cells would
    have filled it `fills` times, and then `texts` again. `others` makes the other text of a number."""
    cells, number, replay, counts = table.cells[..., 0].numel(), 0, Replay(table), Counts()
    until = table.used + table.replaced + fills * cells
    while table.used + table.replaced < until:
        replay.learn(others(number))
        number += 1
    for text in texts:
        replay.learn(text)
    for text in texts:
        replay.run(text, counts)
    return counts


def random_text(number: int, tokens: int) -> Text:
    """An answer in which no three tokens come again, as good as surely."""
    ids: npt.NDArray[np.int64] = np.random.default_rng(number).integers(0, _IDS, _PROMPT + tokens)
    text = ids.tolist()
    return Text(text[:_PROMPT], text[_PROMPT:])


def replay_all(arguments: argparse.Namespace) -> None:
    """Replays the answers that the arguments ask for. Raises ValueError for a text of another name."""

    def table() -> LookaheadTable:
        return LookaheadTable(1, int(arguments.table_mb * 1e6), _IDS, _CPU)

    for part in filter(None, arguments.tasks.split(",")):
        for sight, counts in sights(task_texts(part, arguments.count), table()).items():
            show({"task": part, "sight": sight, **counts.line()}, arguments.json)
    if arguments.tasks:
        return
    chance = chance_of(arguments.text)
    texts, shared = markov_texts(arguments.answers, arguments.tokens, chance), table()
    found = sights(texts, shared)
    for sight, counts in found.items():
        show({"text": arguments.text, "sight": sight, **counts.line()}, arguments.json)
    used = {"cells": shared.used, "of": shared.cells[..., 0].numel()}
    counts = later(texts, shared, arguments.fills, lambda n: random_text(n, arguments.tokens))
    line = {"text": arguments.text, "sight": "second sight, later", **counts.line()}
    show({**line, "fills": arguments.fills, **used, "replaced": shared.replaced}, arguments.json)


def main() -> None:
    parser = program_parser("decode", __doc__, "drafts")
    parser.add_argument("--runs", default=_RUNS, metavar="NxT,NxT", help="slots x tokens of history")
    parser.add_argument("--lookahead-mb", type=int, default=0, metavar="M", help="of a lookahead table")
    parser.add_argument("--replay", action="store_true", help="instead: tokens a step of known answers")
    parser.add_argument("--answers", type=int, default=200, help="with --replay")
    parser.add_argument("--tokens", type=int, default=400, help="with --replay: of an answer")
    parser.add_argument("--text", default="markov:0.9", help="with --replay: markov:CHANCE")
    parser.add_argument("--table-mb", type=float, default=64, help="with --replay: of the lookahead table")
    parser.add_argument("--fills", type=int, default=10, help="with --replay: of the table by other outputs")
    parser.add_argument("--tasks", default="", help="with --replay: the demo model's, such as copy,json")
    parser.add_argument("--count", type=int, default=40, help="with --tasks: questions of each")
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.replay:
        try:
            replay_all(arguments)
        except ValueError as error:
            parser.error(str(error))
        return
    for text in arguments.runs.split(","):
        slots, length = map(int, text.split("x"))
        for kind in TEXTS:
            show(measure(slots, length, kind, "cuda", arguments.lookahead_mb), arguments.json)
