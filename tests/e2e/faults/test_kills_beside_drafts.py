"""Router, supervisor, Redis, engines and mask processes are killed or stopped while requests with drafts
stream.

What is injected: SIGKILL and SIGSTOP of one process after another, under eight clients whose requests have
predictions, grammars or neither, on workers with a lookahead table. A stream may break with its router, and
its client asks again; what came is the beginning of the undisturbed answer, and what came whole is all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.types_pb2 import Grammar
from models.demo_training.evaluate import DEMO_MODEL
from tests.e2e.faults.soak_clients import own_stub
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up, descendants, whole_again
from tests.support.command_lines import command_lines

CLIENTS, REQUESTS = 8, 16
WORKERS = ("prefill-0", "decode-0", "decode-1")
CONFIG = "engine: {speculation: lookup, lookahead_table_mb: 1, numerics: exact, slots: 6}"
# Where the processes of each kind are found: by their command lines.
PROCESSES = {
    "router": "services.router",
    "supervisor": "services.cluster",
    "redis": "valkey-server",
    "engine": "services.worker.engine.main",
    "masks": "services.grammar.process",
}
# A router that stands for longer is started again, and a worker that does is given up.
STRIKES = (
    ("engine", signal.SIGKILL),
    ("router", signal.SIGSTOP),
    ("redis", signal.SIGKILL),
    ("masks", signal.SIGKILL),
    ("router", signal.SIGKILL),
    ("supervisor", signal.SIGSTOP),
    ("engine", signal.SIGSTOP),
    ("redis", signal.SIGSTOP),
    ("engine", signal.SIGKILL),
    ("router", signal.SIGKILL),
)
STOPPED_S = 4.0
Answers = list[tuple[int, ...]]


def requests() -> list[dict[str, Any]]:
    """The fields of requests: text that repeats, and predictions that hold for a part of the output."""
    draw, found = random.Random(5), []
    for number in range(REQUESTS):
        length = draw.choice((3, 20, 200))
        fields: dict[str, Any] = {
            "token_ids": TokenIds(ids=draw.choices(range(3, 400), k=length) * draw.choice((1, 3))),
            "max_tokens": draw.choice((20, 60, 150)),
            "temperature": draw.choice((0.0, 0.7)),
            "seed": number,
            "ignore_eos": True,
        }
        if number % 4 == 3:
            fields |= {"grammar": Grammar(regex="[a-f]{4}( [a-f]{4}){20}"), "ignore_eos": False}
        found.append(fields)
    return found


async def ask(cluster: Cluster, fields: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """The tokens of one request, and how it ended: whole, or the status of its error."""
    tokens: list[int] = []
    async with own_stub(cluster) as stub:
        try:
            async for message in stub.Generate(GenerateRequest(model=MODEL, **fields), timeout=90):
                assert not message.token_ids or message.first_number == len(tokens), "a gap or a repeat"
                tokens += message.token_ids
                if message.finish_reason:
                    return tuple(tokens), "whole"
        except grpc.aio.AioRpcError as error:
            return tuple(tokens), error.code().name
    return tuple(tokens), "silence"


async def client(
    cluster: Cluster, asks: Sequence[dict[str, Any]], truth: Answers, seed: int, over: asyncio.Event
) -> Counter[str]:
    """Asks until `over`; how the requests ended."""
    draw, endings = random.Random(seed), Counter[str]()
    while not over.is_set():
        number = draw.randrange(len(asks))
        tokens, ending = await ask(cluster, asks[number])
        assert tokens == (truth[number] if ending == "whole" else truth[number][: len(tokens)]), number
        endings[ending] += 1
        await asyncio.sleep(0.2 * (ending != "whole"))
    return endings


def struck(cluster: Cluster, kind: str) -> int:
    """The process to strike; the mask process that is meant may be away."""
    commands = command_lines(descendants(cluster.process.pid))
    return max(pid for pid, command in commands.items() if PROCESSES[kind] in command)


async def serves(cluster: Cluster, asks: Sequence[dict[str, Any]]) -> None:
    """Waits until a guided and a free request are answered whole."""
    async with asyncio.timeout(60):
        for fields in (asks[3], asks[0]):
            while (await ask(cluster, fields))[1] != "whole":  # noqa: ASYNC110
                await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_no_token_changes_whatever_is_killed_beside_drafts() -> None:
    asks = requests()
    with baton_up(DEMO_MODEL, "--prefill", "1", "--decode", "2", config=CONFIG) as cluster:
        truth: Answers = []
        for plain in asks:
            tokens, ending = await ask(cluster, {**plain, "max_draft_tokens": 0})
            assert ending == "whole"
            truth.append(tokens)
        for number in range(0, REQUESTS, 2):
            asks[number]["prediction"] = "The value of golden lantern is 9741. " * 4
        over = asyncio.Event()
        clients = [asyncio.create_task(client(cluster, asks, truth, seed, over)) for seed in range(CLIENTS)]
        for kind, number in STRIKES:
            await asyncio.sleep(2)
            pid = struck(cluster, kind)
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                await asyncio.sleep(STOPPED_S)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            await serves(cluster, asks)
        over.set()
        endings = sum(await asyncio.gather(*clients), Counter[str]())
        print(f"\nPROOF kills beside drafts: {dict(endings)}")
        assert endings.keys() <= {"whole", "UNAVAILABLE"}
        assert endings["whole"] > 4 * len(STRIKES)
        reports = await whole_again(cluster, WORKERS, 60)
        assert sum(sum(of.accepted) for report in reports.values() for of in report.drafts) > 0
        await assert_all_free(cluster, 20)
        assert "Traceback" not in cluster.log.read_text()
