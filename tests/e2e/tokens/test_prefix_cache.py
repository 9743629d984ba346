"""A cluster's answers do not depend on its caches: prompts that begin alike, a token around every block's
boundary, packed and in chunks, from every tier, against transformers in float64."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.v1.router_pb2 import RequestTrace, Usage
from tests.e2e.support.cluster import Answer, Cluster, assert_all_free, baton_up
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

TOKENS = 6
ROUNDS = 3


@dataclass(frozen=True)
class Setting:
    """Workers, and how prompts are cut."""

    workers: tuple[str, ...]
    block: int
    chunk: int

    @property
    def flags(self) -> list[str]:
        cut = ["--block-tokens", str(self.block), "--chunk-tokens", str(self.chunk)]
        return [*self.workers, *cut, "--dtype", "float64", "--numerics", "exact"]


ONE_AND_ONE, TWO_AND_TWO = ("--prefill", "1", "--decode", "1"), ("--prefill", "2", "--decode", "2")
BOTH = ("--both", "1")
REDUCED = Setting(ONE_AND_ONE, 5, 17)
FULL = (
    Setting(BOTH, 16, 24),
    *(
        Setting(workers, block, chunk)
        for workers in (ONE_AND_ONE, TWO_AND_TWO, BOTH, ("--both", "2"))
        for block, chunk in ((5, 3), (7, 64), (16, 256))
    ),
)


@pytest.mark.slow
async def test_tokens_are_the_same_from_every_tier(tmp_path: Path) -> None:
    await prove(REDUCED, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("setting", FULL, ids=str)
async def test_tokens_are_the_same_from_every_tier_in_any_cut(setting: Setting, tmp_path: Path) -> None:
    await prove(setting, 12, tmp_path)


async def test_a_conversation_goes_on_where_it_was_and_finds_its_earlier_turns(
    cluster: Cluster, model: Path
) -> None:
    await converse(cluster, model, ONE_AND_ONE)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [TWO_AND_TWO, ("--both", "2")], ids=str)
async def test_so_it_does_where_there_are_more_workers(workers: tuple[str, ...], tmp_path: Path) -> None:
    FAMILIES[0].make(tmp_path, seed=11)
    with baton_up(tmp_path, *Setting(workers, 5, 17).flags) as cluster:
        await converse(cluster, tmp_path, workers)


async def converse(cluster: Cluster, model: Path, workers: tuple[str, ...]) -> None:
    """Each turn is the one before, its answer and a few words more; then another conversation. Prefill finds
    what it has computed; decode has cached the answers too, and is sent only the rest."""
    both = workers == ("--both", "2")
    before = (await cluster.reports()).values()
    conversations = await talk_twice(cluster)
    reports = (await cluster.reports()).values()
    (block,) = {report.load.block_tokens for report in reports}
    reference = load_reference(model)
    block_bytes = sum(next(iter(reports)).block_bytes)
    stayed = 0
    for turns in conversations:
        for prompt, answer in turns:
            greedy_matches(reference, prompt, answer.token_ids)
        for (earlier, last), (prompt, answer) in itertools.pairwise(turns):
            if workers_of(answer) != workers_of(last):
                continue  # where it was seemed busier: on a machine that is
            stayed += 1
            written = len(earlier) + len(last.token_ids) - 1
            known = written if both else len(earlier)
            assert usage_of(answer).cached_tokens == known // block * block
            new = -(-len(prompt) // block) - written // block
            assert trace_of(answer).kv_bytes_shipped == (0 if both else new * block_bytes)
    assert stayed == 6 if workers == ONE_AND_ONE else stayed >= 4

    def grown(count: str) -> int:
        then, now = (sum(int(getattr(report, count)) for report in of) for of in (before, reports))
        return now - then

    shipped = sum(trace_of(answer).kv_bytes_shipped for turns in conversations for _, answer in turns)
    assert shipped == grown("bytes_shipped") == grown("bytes_received")
    assert (grown("bytes_resident") > 0) == (not both)


async def talk_twice(cluster: Cluster) -> list[list[tuple[list[int], Answer]]]:
    """Two conversations of four turns: the prompt and the answer of each."""
    draw = random.Random(3)
    async with cluster.stub() as stub:

        async def talk() -> list[tuple[list[int], Answer]]:
            turns: list[tuple[list[int], Answer]] = []
            conversation: list[int] = []
            for _ in range(4):
                conversation = conversation + [draw.randrange(VOCAB_SIZE) for _ in range(13)]
                answer = await cluster.generate(
                    stub, conversation, temperature=0.0, max_tokens=9, ignore_eos=True
                )
                turns.append((conversation, answer))
                conversation = conversation + answer.token_ids
                # The report of its output is on its way to the engine.
                await assert_all_free(cluster, within_s=5)
            return turns

        return [await talk(), await talk()]


def workers_of(answer: Answer) -> tuple[str, str]:
    trace = trace_of(answer)
    return trace.prefill_worker, trace.decode_worker


async def prove(setting: Setting, blocks: int, folder: Path) -> None:
    """A device with room for a few prompts, a host with room for a few more, a disk for all of them."""
    FAMILIES[0].make(folder, seed=11)
    prompts = make_prompts(setting.block, blocks)
    longest = max(map(len, prompts)) + TOKENS
    room = 3 * -(-longest // setting.block)
    config = (
        f"engine: {{kv_blocks: {room}, slots: 4, prefix_host_mb: 1, prefix_disk_dir: {folder / 'disk'}}}\n"
    )
    fixed = {"engine.reserve_output_tokens": TOKENS}
    with baton_up(folder, *setting.flags, config=config, fixed=fixed) as cluster:
        async with cluster.stub() as stub:
            answers = [await one_round(cluster, stub, prompts) for _ in range(ROUNDS)]
            await assert_all_free(cluster, within_s=5)
            reports = await cluster.reports()
    reference = load_reference(folder)
    for of_prompt in zip(prompts, *answers, strict=True):
        prompt, *reported = of_prompt
        assert len({tuple(answer.token_ids) for answer in reported}) == 1, "a hit and a miss differ"
        greedy_matches(reference, prompt, reported[0].token_ids)
    seen = [report.prefixes for report in reports.values()]
    assert sum(one.evicted_blocks for one in seen) > 0
    assert sum(one.device_hits for one in seen) > 0
    assert sum(one.host_hits + one.disk_hits for one in seen) > 0
    computed = sum(report.prompt_tokens_run for report in reports.values())
    found = sum(one.hit_tokens for one in seen)
    assert computed + found >= ROUNDS * sum(map(len, prompts))  # a prompt whose ticket was refused ran again
    reported_tokens = 0
    for prompt, answer in zip(prompts * ROUNDS, itertools.chain(*answers), strict=True):
        cached = usage_of(answer).cached_tokens
        assert cached % setting.block == 0
        assert cached < len(prompt)
        reported_tokens += cached
    assert 0 < reported_tokens <= found
    assert not any(one.disk_corrupt for one in seen)
    for report in (report for name, report in reports.items() if name.startswith("decode")):
        assert report.blocks_resident > 0
        assert report.prefixes.evicted_blocks > 0


async def one_round(cluster: Cluster, stub: RouterServiceAsyncStub, prompts: list[list[int]]) -> list[Answer]:
    """Four at once, so that several are packed into a step."""
    turn = asyncio.Semaphore(4)

    async def one(prompt: list[int]) -> Answer:
        async with turn:
            return await cluster.generate(stub, prompt, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    return await asyncio.gather(*map(one, prompts))


def trace_of(answer: Answer) -> RequestTrace:
    assert answer.last is not None
    return answer.last.trace


def usage_of(answer: Answer) -> Usage:
    assert answer.last is not None
    return answer.last.usage


def make_prompts(block: int, blocks: int) -> list[list[int]]:
    """Prefixes of one text that end a token around every boundary, as they are and with an end of their own;
    and texts of no common beginning, which push out what is cached."""
    draw = random.Random(block)
    text = [draw.randrange(VOCAB_SIZE) for _ in range(block * blocks + 1)]
    lengths = sorted({n * block + off for n in range(1, blocks + 1) for off in (-1, 0, 1)} - {0})
    prompts = [text[:length] for length in lengths]
    prompts += [text[:length] + [draw.randrange(VOCAB_SIZE) for _ in range(block + 1)] for length in lengths]
    prompts += [[draw.randrange(VOCAB_SIZE) for _ in text] for _ in range(4)]
    draw.shuffle(prompts)
    return prompts
