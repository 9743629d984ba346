"""Two models under one served name: a request is answered by one of them, whatever fails or is switched."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from baton.v1.admin_pb2 import SwitchPoolRequest, WorkerState
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from services.common.config.types import Role
from tests.e2e.support.cluster import MODEL, STOP_S, eventually
from tests.e2e.support.workers import Loose, loose_workers
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.reference import greedy_matches, load_reference

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

ENGINE = {"dtype": "float64", "chunk_tokens": 16, "slots": 4}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = [(number * 7) % VOCAB_SIZE for number in range(40)]
# With fake workers: tests/router/placement/test_pools.py.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one shape and tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_checkpoint(folder / name, "qwen2", seed=seed) for name, seed in (("old", 8), ("new", 9))
    }


@pytest.fixture(scope="module")
def rolling(models: dict[str, Path]) -> Iterator[Loose]:
    """Workers in the middle of a rolling upgrade: a pair of each checkpoint."""
    new = {"model": str(models["new"])}
    with loose_workers(
        models["old"], "prefill", "decode", "prefill", "decode",
        each={"prefill-1": new, "decode-1": new},
        engine=ENGINE,
        router={"queue_timeout_s": 3.0},
    ) as loose:  # fmt: skip
        yield loose


async def pool_of(loose: Loose, worker: str) -> str:
    """The id of the pool to which a worker belongs."""
    return {one.worker.identity.name: one.pool for one in (await loose.cluster.status()).workers}[worker]


async def states(loose: Loose) -> dict[str, str]:
    return {
        one.worker.identity.name: WorkerState.Name(one.state).removeprefix("WORKER_STATE_").lower()
        for one in (await loose.cluster.status()).workers
    }


async def switch(loose: Loose, worker: str) -> None:
    """Switches to the pool of that worker."""
    pool = await pool_of(loose, worker)
    async with loose.cluster.admin() as admin:
        await admin.SwitchPool(SwitchPoolRequest(pool=pool), timeout=5)


async def stream(stub: RouterServiceAsyncStub, prompt: list[int], count: int, into: list[int]) -> str:
    """Asks for `count` tokens, collects them; the name of the worker that decoded the last one."""
    request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=prompt), max_tokens=count, **GREEDY)
    worker = ""
    async for message in stub.Generate(request, timeout=60):
        into += message.token_ids
        worker = message.trace.decode_worker or worker
    return worker


def models_of(models: dict[str, Path], prompt: list[int], tokens: list[int]) -> list[str]:
    """The checkpoints that would have written these tokens."""
    found = []
    for name, folder in models.items():
        try:
            greedy_matches(load_reference(folder), prompt, tokens)
        except AssertionError:
            continue
        found.append(name)
    return found


async def test_requests_never_mix_models(models: dict[str, Path], rolling: Loose) -> None:
    """Without any fault, more requests than one worker has slots."""
    prompts = [[number, *PROMPT] for number in range(8)]
    outputs: list[list[int]] = [[] for _ in prompts]
    async with rolling.cluster.stub() as stub:
        runs = (stream(stub, prompt, 20, into) for prompt, into in zip(prompts, outputs, strict=True))
        await asyncio.gather(*runs)
    of = [models_of(models, prompt, tokens) for prompt, tokens in zip(prompts, outputs, strict=True)]
    assert of in ([["old"]] * 8, [["new"]] * 8)


async def test_a_switch_sends_new_requests_to_the_other_model(
    models: dict[str, Path], rolling: Loose
) -> None:
    """A stream that runs meanwhile ends in the model where it began."""
    async with rolling.cluster.stub() as stub:
        await switch(rolling, "decode-0")
        old: list[int] = []
        running = asyncio.create_task(stream(stub, PROMPT, 300, old))
        await eventually(lambda: len(old) >= 20, 10)
        await switch(rolling, "decode-1")
        assert not running.done()
        assert await states(rolling) == {
            "prefill-0": "other_pool", "decode-0": "other_pool", "prefill-1": "ready", "decode-1": "ready",
        }  # fmt: skip
        new: list[int] = []
        assert await stream(stub, PROMPT, 20, new) == "decode-1"
        assert await running == "decode-0"
    assert models_of(models, PROMPT, old) == ["old"]
    assert models_of(models, PROMPT, new) == ["new"]


@dataclass
class Load:
    """Clients that ask one request after the other until `stopping`."""

    loose: Loose
    stopping: bool = False
    # Whether the switch has been answered.
    switched: bool = False
    # Prompt, output and worker of each request, in the order of their ends; and whether it was sent after the
    # switch was answered.
    answers: list[tuple[list[int], list[int], str, bool]] = field(default_factory=list)

    async def client(self, stub: RouterServiceAsyncStub, number: int) -> None:
        """A request that fails raises."""
        for turn in itertools.count():
            prompt, tokens, after = [number, turn % 50, *PROMPT], list[int](), self.switched
            worker = await stream(stub, prompt, 12, tokens)
            self.answers.append((prompt, tokens, worker, after))
            if self.stopping:
                return

    async def after(self, count: int) -> None:
        """Waits for `count` further answers."""
        wanted = len(self.answers) + count
        await eventually(lambda: len(self.answers) >= wanted, 30)


async def upgrade(models: dict[str, Path], loose: Loose, *, stops_old: bool) -> None:
    """The new pool takes over under load; with `stops_old` the old one's workers then get SIGTERM. No request
    fails, each is answered by one model, and by the new one once the switch has been answered."""
    await switch(loose, "decode-0")
    async with loose.cluster.stub() as stub, asyncio.TaskGroup() as clients:
        load = Load(loose)
        for number in range(4):
            clients.create_task(load.client(stub, number))
        await load.after(8)
        await switch(loose, "decode-1")
        load.switched = True
        if stops_old:
            for name in ("prefill-0", "decode-0"):
                front = loose.workers[name].front
                front.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(front.wait, STOP_S) == 0
        await load.after(12)
        load.stopping = True
    assert {worker for *_, worker, after in load.answers if after} == {"decode-1"}
    assert load.answers[0][2] == "decode-0"
    for prompt, tokens, worker, _ in load.answers:
        assert models_of(models, prompt, tokens) == ["old" if worker == "decode-0" else "new"]


async def test_an_upgrade_takes_over_under_load(models: dict[str, Path], rolling: Loose) -> None:
    await upgrade(models, rolling, stops_old=False)


async def test_the_old_workers_of_an_upgrade_are_drained(models: dict[str, Path]) -> None:
    new = {"model": str(models["new"])}
    roles: tuple[Role, ...] = ("prefill", "decode", "prefill", "decode")
    each = {"prefill-1": new, "decode-1": new}
    with loose_workers(models["old"], *roles, each=each, engine=ENGINE) as loose:
        await upgrade(models, loose, stops_old=True)


async def test_workers_that_tokenise_or_compute_otherwise_get_no_work(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """All have the same checkpoint; one has another chat template than the router, one runs in mode fast."""
    template = shutil.copytree(models["old"], tmp_path / "template")
    (template / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    each: dict[str, dict[str, Any]] = {
        "both-1": {"model": str(template)},
        "both-2": {"engine": {**ENGINE, "numerics": "fast"}},
    }
    with loose_workers(models["old"], "both", "both", "both", each=each, engine=ENGINE) as loose:
        assert len({await pool_of(loose, name) for name in loose.workers}) == 3
        first = "both-0" if (await states(loose))["both-0"] == "ready" else "both-2"
        wanted = {name: "ready" if name == first else "other_pool" for name in loose.workers}
        assert await states(loose) == wanted
        async with loose.cluster.stub() as stub:
            asked = [stream(stub, [number, *PROMPT], 10, []) for number in range(8)]
            assert set(await asyncio.gather(*asked)) == {first}
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await switch(loose, "both-1")
            assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_request_ends_with_an_error_where_its_pool_has_gone(
    models: dict[str, Path], rolling: Loose
) -> None:
    """The request's decode worker is killed in the middle: the tokens before it are those of one model, and
    none of another one follow."""
    tokens: list[int] = []
    async with rolling.cluster.stub() as stub:
        asked = asyncio.create_task(stream(stub, PROMPT, 1500, tokens))
        await eventually(lambda: len(tokens) >= 60, 10)
        reports = {name: await rolling.workers[name].report() for name in ("decode-0", "decode-1")}
        (busy,) = (report for report in reports.values() if report.load.free_slots < report.load.slots)
        os.kill(busy.engine_pid, signal.SIGKILL)
        assert not asked.done()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asked
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE, failed.value.details()
    assert len(models_of(models, PROMPT, tokens)) == 1
