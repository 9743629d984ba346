"""Greedy output through a real cluster is what transformers chooses, token for token, in float64.

Every prompt goes through both APIs. Afterwards the ledger must agree: what was computed where, which
blocks crossed, and that nothing is held.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tokenizers import Tokenizer

from baton.v1.router_pb2 import RequestTrace
from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import Answer, Cluster, assert_all_free, baton_up
from tests.e2e.support.completions import complete
from tests.support.checkpoints import END_ID, FAMILIES, MIXTURES, VOCAB_SIZE, Case
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

AT_ONCE = 16


@dataclass(frozen=True)
class Topology:
    """The number of workers of each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def flags(self) -> list[str]:
        counts = {"--prefill": self.prefill, "--decode": self.decode, "--both": self.both}
        return [word for flag, count in counts.items() for word in (flag, str(count))]

    def __str__(self) -> str:
        return f"both-{self.both}" if self.both else f"{self.prefill}+{self.decode}"


@dataclass(frozen=True)
class Cut:
    """Sizes into which prompts are cut: blocks and chunks, and pieces and windows of their KV."""

    block_tokens: int
    chunk_tokens: int
    piece_bytes: int
    window_pieces: int

    @property
    def flags(self) -> list[str]:
        return ["--block-tokens", str(self.block_tokens), "--chunk-tokens", str(self.chunk_tokens)]

    @property
    def fixed(self) -> dict[str, int]:
        """The values that are no settings."""
        return {"transfer.piece_bytes": self.piece_bytes, "transfer.window_pieces": self.window_pieces}

    @property
    def edges(self) -> list[int]:
        """Prompt lengths at which an off-by-one would show."""
        sizes = (self.block_tokens, self.chunk_tokens)
        return sorted({1, *(size + off for size in sizes for off in (-1, 0, 1))} - {0})


# Small windows, so that the longer transfers stream through them several times.
CUTS = (
    Cut(block_tokens=5, chunk_tokens=17, piece_bytes=4096, window_pieces=4),
    Cut(block_tokens=16, chunk_tokens=64, piece_bytes=8192, window_pieces=2),
    Cut(block_tokens=64, chunk_tokens=256, piece_bytes=4096, window_pieces=8),
    Cut(block_tokens=7, chunk_tokens=3, piece_bytes=5000, window_pieces=3),
    Cut(block_tokens=16, chunk_tokens=256, piece_bytes=16384, window_pieces=4),
)
TOPOLOGIES = (Topology(prefill=2, decode=2), Topology(both=1), Topology(prefill=1, decode=1))


@dataclass(frozen=True)
class Size:
    """The part of the proof that is run."""

    prompts: int
    longest: int
    max_tokens: int


# In make test on the cluster of tests/e2e/operations/test_separation.py.
REDUCED = Size(prompts=8, longest=300, max_tokens=16)
FULL = Size(prompts=50, longest=700, max_tokens=64)


@dataclass(frozen=True)
class Ask:
    """One prompt and what may end its output."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES[:2], ids=str)
@pytest.mark.parametrize(("number", "case"), list(enumerate([*FAMILIES, *MIXTURES])), ids=str)
async def test_every_family_fifty_prompts(
    number: int, case: Case, topology: Topology, tmp_path: Path
) -> None:
    cut = CUTS[(number + topology.both) % 5]
    await prove(case, topology, cut, FULL, tmp_path)


async def prove(case: Case, topology: Topology, cut: Cut, size: Size, folder: Path) -> None:
    """Runs one cluster and judges all that came out of it."""
    case.make(folder, seed=11)
    flags = [*topology.flags, *cut.flags, "--dtype", "float64", "--numerics", "exact"]
    with baton_up(folder, *flags, fixed=cut.fixed) as cluster:
        await judge(cluster, folder, cut, size)


async def judge(cluster: Cluster, folder: Path, cut: Cut, size: Size) -> None:
    """Asks a cluster of the folder's model that has served nothing yet, and judges all that comes of it."""
    asks = make_asks(cut, size)
    async with cluster.stub() as stub, cluster.http() as client:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        answers = await ask_both_apis(cluster, stub, client, asks, tokenizer)
        await assert_all_free(cluster, within_s=5)
        reports, roles = await cluster.reports(), await cluster.roles()
    reference = load_reference(folder)
    for ask, answer in zip(asks, answers, strict=True):
        greedy_matches(reference, ask.prompt, answer.token_ids)
    check_work(reports, roles, asks, answers)
    if set(roles.values()) == {"both"}:
        for report in reports.values():
            assert report.handoffs_local == report.handoffs_committed > 0
            assert report.bytes_shipped == report.bytes_received == report.blocks_received == 0
            assert not report.links
    else:
        check_shipping(reports, asks, answers, cut)


def make_asks(cut: Cut, size: Size) -> list[Ask]:
    """Prompts of the lengths where cuts fall, the longest, and lengths between; seeded."""
    draw = random.Random(repr(cut))
    lengths = [length for length in cut.edges if length <= size.longest] + [size.longest]
    lengths += [draw.randint(1, size.longest) for _ in range(size.prompts - len(lengths))]
    return [
        Ask(
            prompt=[draw.randrange(VOCAB_SIZE) for _ in range(length)],
            max_tokens=draw.randint(2, size.max_tokens),
            ignore_eos=number % 3 != 0,
        )
        for number, length in enumerate(lengths)
    ]


async def ask_both_apis(
    cluster: Cluster,
    stub: RouterServiceAsyncStub,
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    tokenizer: Tokenizer,
) -> list[Answer]:
    """Every prompt over gRPC and over HTTP, 16 at once; text, counts and endings checked."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, ask: Ask) -> Answer:
        fields = {"temperature": 0.0, "max_tokens": ask.max_tokens, "ignore_eos": ask.ignore_eos}
        async with turn:
            answer = await cluster.generate(stub, ask.prompt, **fields)
        async with turn:
            completion = await complete(client, ask.prompt, stream=number % 2 == 0, **fields)
        count = len(answer.token_ids)
        choice = completion.only
        assert choice.token_ids == answer.token_ids, "the APIs disagree"
        assert choice.text == answer.text == tokenizer.decode(answer.token_ids)
        assert choice.finish == answer.finish == expected_finish(ask, answer.token_ids)
        assert completion.usage.pop("prompt_tokens_details")["cached_tokens"] < len(ask.prompt)
        assert completion.usage == {
            "prompt_tokens": len(ask.prompt),
            "completion_tokens": count,
            "total_tokens": len(ask.prompt) + count,
        }
        return answer

    return await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))


def expected_finish(ask: Ask, output: Sequence[int]) -> str:
    """ "stop" after the model's end token, which then is the only one and the last; else "length"."""
    if not ask.ignore_eos and END_ID in output:
        assert output.index(END_ID) == len(output) - 1
        return "stop"
    assert len(output) == ask.max_tokens
    return "length"


def trace_of(answer: Answer) -> RequestTrace:
    assert answer.last is not None
    return answer.last.trace


def check_work(
    reports: dict[str, IntegrityReport], roles: dict[str, str], asks: Sequence[Ask], answers: Sequence[Answer]
) -> None:
    """Prompts ran on prefill's side and tokens were decoded on decode's, each once; two APIs, so twice."""
    for name, report in reports.items():
        if roles[name] == "decode":
            assert report.prompts_run == report.prompt_tokens_run == 0, name
        if roles[name] == "prefill":
            assert report.tokens_decoded == report.decode_steps == 0, name
    assert sum(report.prompts_run for report in reports.values()) == 2 * len(asks)
    computed = sum(report.prompt_tokens_run + report.prefixes.hit_tokens for report in reports.values())
    assert computed == 2 * sum(len(ask.prompt) for ask in asks)  # or found, since a API knew it already
    decoded = sum(len(answer.token_ids) - 1 for answer in answers)
    assert sum(report.tokens_decoded for report in reports.values()) == 2 * decoded
    handed_off = sum(len(answer.token_ids) > 1 for answer in answers)
    assert sum(report.handoffs_committed for report in reports.values()) == 2 * handed_off
    for answer in answers:
        trace = trace_of(answer)
        assert trace.attempts == 1
        assert roles[trace.prefill_worker] in ("prefill", "both")
        assert roles[trace.decode_worker] in ("decode", "both")
    if len(asks) > 2 * AT_ONCE:
        assert all(report.prompts_run or report.tokens_decoded for report in reports.values()), (
            "an idle worker"
        )


def check_shipping(
    reports: dict[str, IntegrityReport], asks: Sequence[Ask], answers: Sequence[Answer], cut: Cut
) -> None:
    """Asserts that bytes are whole blocks, as many as the prompts have, without those that decode had from
    the other API, and that all sent blocks arrived."""
    senders = [report for report in reports.values() if report.bytes_shipped]
    block_bytes = list(next(iter(reports.values())).block_bytes)
    for report in reports.values():
        assert list(report.block_bytes) == block_bytes
        assert report.bytes_shipped == sum(map(int.__mul__, report.blocks_shipped, block_bytes))
    sizes = [math.ceil(len(ask.prompt) / cut.block_tokens) for ask in asks]
    handed_off = [
        (size, answer) for size, answer in zip(sizes, answers, strict=True) if len(answer.token_ids) > 1
    ]
    for size, answer in handed_off:  # of the API that came first
        assert trace_of(answer).kv_bytes_shipped == size * sum(block_bytes)
    # A prompt whose first token ends it may have sent some blocks already.
    for group in range(len(block_bytes)):
        shipped = sum(report.blocks_shipped[group] for report in senders)
        shipped += sum(report.blocks_resident // len(block_bytes) for report in reports.values())
        assert 2 * sum(size for size, _ in handed_off) <= shipped <= 2 * sum(sizes)
    for report in reports.values():
        assert report.bytes_resident == report.blocks_resident // len(block_bytes) * sum(block_bytes)
    sent = sum(report.bytes_shipped for report in senders)
    assert sent == sum(report.bytes_received for report in reports.values())
    blocks = sum(sum(report.blocks_shipped) for report in senders)
    assert blocks == sum(report.blocks_received for report in reports.values())
    assert max(sizes) * sum(block_bytes) > cut.piece_bytes * cut.window_pieces, "no transfer tried the window"
    assert not any(report.checksum_failures or report.dropped_unknown for report in reports.values())
