"""The demo model through a cluster: right where `transformers` is right, and wrong with a wrong cache."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.demo_training.conversation import RowMaker
from models.demo_training.evaluate import DEMO_MODEL, Marked, ThroughCluster, Transformers, mark
from models.demo_training.exam import retrieval
from models.demo_training.tasks.turn import Turn
from tests.e2e.support.cluster import Answer, Cluster, assert_all_free, baton_up
from tests.e2e.support.own_engine import program
from tests.e2e.support.wrong_cache import FAULTS, Fault, Harm, harmed

BLOCK_TOKENS = 16
MAKER = RowMaker(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))
AT_ONCE = 4
# 3,000 tokens of prompt on busy cores: slow is not dead.
LONG_TIMEOUTS = "supervision: {hang_timeout_s: 60}\nrouter: {queue_timeout_s: 600}\n"


@dataclass(frozen=True)
class Served:
    """A cluster whose engines harm what they are asked to, how its blocks travel, and the folder with the
    notes of the harm."""

    cluster: Cluster
    transport: str
    faults: Path


@pytest.fixture(scope="module", params=["ipc", pytest.param("grpc", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    faults = tmp_path_factory.mktemp("faults")
    cut = ("--block-tokens", str(BLOCK_TOKENS), "--chunk-tokens", "64")
    flags = ("--dtype", "float32", "--transport", request.param, *cut)
    os.environ[FAULTS] = str(faults)
    try:
        with baton_up(
            DEMO_MODEL, *flags, config=LONG_TIMEOUTS, program=program("tests.e2e.support.wrong_cache")
        ) as cluster:
            yield Served(cluster, request.param, faults)
    finally:
        del os.environ[FAULTS]


REDUCED = {"copy": 1, "arithmetic": 1, "json": 1, "small talk": 2}
FULL = {
    "retrieve-1000": 200,
    "retrieve-3000": 60,
    "copy": 500,
    "arithmetic": 300,
    "json": 500,
    "small talk": 500,
}


def test_a_few_answers_are_transformers_own(served: Served) -> None:
    ours, theirs = both(served, REDUCED)
    for part, one in ours.items():
        assert one.answers == theirs[part].answers, part
        assert one.right == len(one.turns), part


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_scores_are_transformers_own(served: Served) -> None:
    """The marks differ in at most one question of a part, and in 0.2 % of all together."""
    ours, theirs = both(served, FULL)
    differences = [abs(ours[part].right - theirs[part].right) for part in FULL]
    assert max(differences) <= 1
    assert sum(differences) <= 0.002 * sum(FULL.values())


def both(served: Served, counts: dict[str, int]) -> tuple[dict[str, Marked], dict[str, Marked]]:
    through = ThroughCluster(served.cluster.grpc_address)
    reference = Transformers(DEMO_MODEL, "float32", "cpu")
    ours = {part: mark(through, (part,), count)[part] for part, count in counts.items()}
    theirs = {part: mark(reference, (part,), count)[part] for part, count in counts.items()}
    return ours, theirs


@dataclass(frozen=True)
class Size:
    """Prompts of a fault, and their tokens."""

    prompts: int
    context: int


FEW, MANY = Size(2, 200), Size(200, 1000)
FIRST, *OTHERS = Fault
# The faults that make test sees; make prove sees all.
SOME = [FIRST, *(pytest.param(fault, marks=pytest.mark.slow) for fault in OTHERS)]


@pytest.mark.parametrize("fault", [None, *SOME], ids=str)
async def test_a_wrong_block_is_seen(served: Served, fault: Fault | None) -> None:
    await prove_seen(served, fault, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", [None, *Fault], ids=str)
async def test_a_wrong_block_is_seen_on_200_prompts(served: Served, fault: Fault | None) -> None:
    await prove_seen(served, fault, MANY)


@pytest.mark.parametrize("fault", SOME, ids=str)
async def test_the_checksum_turns_a_wrong_block_away(served: Served, fault: Fault) -> None:
    """The same fault with the checks on: the attempt fails, the next one's answer is right."""
    before = await failures(served)
    answers = await ask(served, FEW, fault, checked=True)
    assert share_right(answers) == 1.0
    assert [answer.last.trace.attempts for _, answer in answers if answer.last] == [2] * FEW.prompts
    assert await failures(served) - before == FEW.prompts


async def prove_seen(served: Served, fault: Fault | None, size: Size) -> None:
    """Asserts that with `fault` in the block of the answer at most a fifth is right, and nearly all without
    one."""
    done, before = harmed(served.faults), await failures(served)
    answers = await ask(served, size, fault, checked=False)
    assert harmed(served.faults) - done == (0 if fault is None else size.prompts)
    assert await failures(served) == before, "the checksum was to be off"
    right = share_right(answers)
    assert right >= 0.98 if fault is None else right <= 0.2
    await assert_all_free(served.cluster, 1.0)
    reports = await served.cluster.reports()
    links = [link for report in reports.values() for link in report.links]
    assert [link.transport for link in links] == 2 * [served.transport]


async def ask(served: Served, size: Size, fault: Fault | None, *, checked: bool) -> list[tuple[Turn, Answer]]:
    """Questions about one entry of a list; `fault` befalls every block that holds a digit of the answer."""
    # What was not checked stays cached as if it were right: the same request again is not sent it anew.
    turns = questions(size, seed=0 if fault is None else 1 + fault + 10 * checked)
    gate = asyncio.Semaphore(AT_ONCE)
    async with served.cluster.stub() as stub:
        # Exchanged blocks come from the request before; let there be one.
        await served.cluster.generate(stub, MAKER.prompt(turns[-1].question), temperature=0, max_tokens=2)

        async def one(turn: Turn) -> tuple[Turn, Answer]:
            prompt = MAKER.prompt(turn.question)
            seed = 0 if fault is None else harm_of(fault, prompt, turn, checked=checked).seed
            async with gate:
                return turn, await served.cluster.generate(
                    stub, prompt, temperature=0, max_tokens=40, seed=seed
                )

        return list(await asyncio.gather(*map(one, turns[:-1])))


def questions(size: Size, seed: int) -> list[Turn]:
    """One more than asked for, each about one entry of a list of its own."""
    draw = random.Random(f"wrong cache/{seed}")
    make = retrieval(size.context)
    turns: list[Turn] = []
    while len(turns) <= size.prompts:
        turn = make(draw)
        if turn.answer.count("The value of") == 1:
            turns.append(turn)
    return turns


def harm_of(fault: Fault, prompt: Sequence[int], turn: Turn, *, checked: bool) -> Harm:
    """Damage to the blocks in which the list has the value."""
    key, value = turn.answer.removeprefix("The value of ").removesuffix(".").split(" is ")
    entry = MAKER.encode(f"- {key}: {value}")[1:]
    (start,) = (i for i in range(len(prompt)) if list(prompt[i : i + len(entry)]) == entry)
    last = start + len(entry) - 1
    return Harm(fault, (last - len(value) + 1) // BLOCK_TOKENS, last // BLOCK_TOKENS, checked)


def share_right(answers: Sequence[tuple[Turn, Answer]]) -> float:
    return sum(turn.right(answer.text) for turn, answer in answers) / len(answers)


async def failures(served: Served) -> int:
    """Pieces whose checksum was wrong, so far."""
    return sum(report.checksum_failures for report in (await served.cluster.reports()).values())
