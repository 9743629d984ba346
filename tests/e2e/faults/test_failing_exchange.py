"""A worker of several devices, one of which does not come to the exchange: the worker ends, its streams go on
elsewhere without a wrong token, and those of other workers notice nothing.

What is injected, by a signal to the engine: see `failing_exchange`. On GPUs each of 20 rounds has one of
them, to be run as `make prove-gpus` does.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from baton.base.process_stat import is_running
from tests.e2e.faults.interrupted import Stream, asked, freeze, right
from tests.e2e.faults.two_pairs.test_lost_workers import all_free
from tests.e2e.support import failing_exchange, own_engine
from tests.e2e.support.cluster import baton_up, eventually
from tests.e2e.support.failing_exchange import LATE, NEVER
from tests.e2e.support.workers import Loose, Worker, all_started_again, loose_workers
from tests.support.checkpoints import make_checkpoint
from tests.support.host_kernels import needs_compiler

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

DEADLINE_S = 2.0
# Of logits in float32 on a GPU and on a CPU. Of 100,000 tokens two led by less: 1.08e-5 and 8.2e-6.
ROUNDING = 5e-5
ROUNDS = 20
WORKER = (*own_engine.program(failing_exchange.__name__), "worker")
VICTIM, OTHER = "decode-0", "decode-1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", seed=8, num_attention_heads=4, num_key_value_heads=2
    )


def workers_on(model: Path, engine: dict[str, Any], each: dict[str, dict[str, Any]]) -> Any:
    """A prefill worker and two decode workers, the first of which has two devices; `each`: engine settings of
    one by its name."""
    engine = {"dtype": "float32", "numerics": "exact", "chunk_tokens": 16, **engine}
    divided = {VICTIM: {"tensor_parallel": 2, "slots": 2}, OTHER: {"slots": 8}}
    sections = {name: {"engine": engine | own | each.get(name, {})} for name, own in divided.items()}
    sections |= {"prefill-0": {"engine": engine | each.get("prefill-0", {})}}
    return loose_workers(
        model,
        "prefill",
        "decode",
        "decode",
        proxied=True,
        worker_program=WORKER,
        each=sections,
        engine=engine,
    )


@dataclass
class Round:
    """Streams, and the tasks that read them."""

    streams: list[Stream]
    runs: list[asyncio.Task[None]]

    async def cancel_one(self) -> None:
        """Cancels one stream, whose client goes away."""
        del self.streams[-1]
        run = self.runs.pop()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def on_both(loose: Loose, stub: RouterServiceAsyncStub, seed: str, tokens: int, most: int) -> Round:
    """Begins streams and returns them once they have `tokens` tokens each, some of them on the victim, while
    the other worker has as many slots free. Streams are begun for all slots, and some are cancelled; where
    these were the victim's, all are, and others are begun."""
    for attempt in range(5):
        streams = asked(10, seed=f"{seed} {attempt}")
        found = Round(streams, [asyncio.create_task(stream.run(stub, most)) for stream in streams])
        await eventually(partial(all_as_old, streams, tokens), 120)
        while (busy := await running_on(loose, VICTIM))[0] > 0:
            if (await running_on(loose, OTHER))[1] >= busy[0]:
                return found
            await found.cancel_one()
            await asyncio.sleep(0.2)
        while found.runs:
            await found.cancel_one()
        await all_free(loose.workers.values(), 5.0)
    raise AssertionError(f"{VICTIM} had no stream")


def all_as_old(streams: list[Stream], tokens: int) -> bool:
    return all(len(stream.tokens) > tokens for stream in streams)


async def running_on(loose: Loose, name: str) -> tuple[int, int]:
    """Slots of a worker that are in use, and those that are free."""
    load = (await loose.workers[name].report()).load
    return load.slots - load.free_slots, load.free_slots


async def gone_after_s(loose: Loose, engine_pid: int, within_s: float, streams: Sequence[Stream]) -> float:
    """Waits until both of the victim's processes have ended; seconds that took. Where they go on, the error
    says which, how far the streams were when it began, and what was logged last."""
    began, worker = time.monotonic(), loose.workers[VICTIM]
    before = [len(stream.tokens) for stream in streams]
    try:
        await eventually(lambda: worker.front.poll() is not None and not is_running(engine_pid), within_s)
    except AssertionError as error:
        ended = worker.front.poll() is not None
        runs = f"front ended: {ended}, engine {engine_pid} runs: {is_running(engine_pid)}"
        came = f"tokens before {before}, now {[len(stream.tokens) for stream in streams]}"
        lines = loose.cluster.log.read_text().splitlines()
        last = "\n".join(line for line in lines if "request_ended" not in line)[-3000:]
        raise AssertionError(f"{runs}, {came}\n{last}") from error
    return time.monotonic() - began


def last_error(worker: Worker) -> dict[str, str]:
    """The last report of an ended worker's front."""
    assert worker.front.stdout is not None
    (line,) = [line for line in worker.front.stdout.read().splitlines() if '"error"' in line]
    return dict(json.loads(line)["error"])


async def failed_once(model: Path, loose: Loose, fault: signal.Signals, seed: str, most: int) -> float:
    """One fault, from streams on both workers to the end of all; seconds until the victim was gone."""
    victim = loose.workers[VICTIM]
    engine_pid = (await victim.report()).engine_pid
    async with loose.cluster.stub() as stub:
        found = await on_both(loose, stub, seed, tokens=3, most=most)
        os.kill(engine_pid, fault)
        gone_s = await gone_after_s(loose, engine_pid, 60, found.streams)
        await asyncio.gather(*found.runs)
    right(model, found.streams)
    attempts = [stream.attempts for stream in found.streams]
    assert set(attempts) == {1, 2}, attempts
    assert attempts.count(2) <= 2, "the other worker's streams began again"
    error = last_error(victim)
    assert error["cause"] == "exchange"
    assert "device 0 waited" in error["message"]
    assert "for device 1 at node" in error["message"]
    await all_free([one for name, one in loose.workers.items() if name != VICTIM], 5.0)
    return gone_s


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides what GPUs there are from the processes that a test starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("no_gpu")
async def test_ranks_of_a_cpu(model: Path) -> None:
    with workers_on(model, {}, {}) as loose:
        gone_s = await failed_once(model, loose, NEVER, "ranks of a CPU", most=40)
        print(f"\nPROOF gone after {gone_s:.2f} s, from the start of the step that failed")
        log = loose.cluster.log.read_text()
        assert log.count("exchange_timeout") == 1
        assert "engine_failed" not in log


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("fault", [NEVER, LATE])
async def test_prompts_on_ranks_of_a_cpu(model: Path, fault: signal.Signals) -> None:
    """The only prefill worker ends while it computes a prompt, and gives no token of it; it is started again,
    and gives them then."""
    program = own_engine.program(failing_exchange.__name__)
    flags = ("--prefill-tensor-parallel", "2", "--slots", "2", "--dtype", "float32", "--numerics", "fast")
    with baton_up(model, *flags, program=program, every_gpu=True) as cluster:
        engine_pid = (await cluster.reports())["prefill-0"].engine_pid
        async with cluster.stub() as stub:
            for fails in (False, True):
                if fails:
                    os.kill(engine_pid, fault)
                streams = asked(2, seed=f"prompts {fails}")
                await asyncio.gather(*(stream.run(stub, 6) for stream in streams))
                right(model, streams)
                before, engine_pid = engine_pid, (await cluster.reports())["prefill-0"].engine_pid
                assert (engine_pid != before) == fails
        log = cluster.log.read_text()
    assert log.count("exchange_timeout") == 1
    assert "engine_failed" not in log


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("no_gpu")
async def test_the_supervisor_counts(model: Path) -> None:
    """The only decode worker ends, and is started again: its stream goes on there."""
    program = own_engine.program(failing_exchange.__name__)
    flags = ("--decode-tensor-parallel", "2", "--slots", "2", "--dtype", "float32", "--numerics", "exact")
    with baton_up(model, *flags, program=program, every_gpu=True) as cluster:
        engine_pid = (await cluster.reports())[VICTIM].engine_pid
        (stream,) = asked(1, seed="counted")
        async with cluster.stub() as stub:
            run = asyncio.create_task(stream.run(stub, 20))
            await eventually(partial(all_as_old, [stream], 3), 60)
            os.kill(engine_pid, LATE)
            await run
        right(model, [stream])
        assert stream.attempts == 2
        assert (await cluster.reports())[VICTIM].engine_pid != engine_pid
        (address,) = [
            worker.metrics_address
            for worker in (await cluster.status()).workers
            if worker.worker.identity.name == VICTIM
        ]
        async with httpx.AsyncClient(timeout=10, verify=False) as client:
            text = (await client.get(f"http://{address}/metrics")).text
    for name in ("exchange_timeouts_total", "restarts_total"):
        (value,) = re.findall(rf"^baton_worker_{name}{{.*}} (\S+)$", text, re.MULTILINE)
        assert float(value) == 1, name


@pytest.fixture(scope="module")
def on_gpus(model: Path) -> Iterator[Loose]:
    """On two GPUs, of which the two of the victim are each one of the other workers' too."""
    engine = {"device": "cuda", "kv_blocks": 600, "gpu_workers": 2, "gpu_memory": 0.5}
    places = {"prefill-0": (0,), VICTIM: (0, 1), OTHER: (1,)}
    each = {name: {"device_indexes": indexes} for name, indexes in places.items()}
    with workers_on(model, engine, each) as loose:
        yield loose


@pytest.mark.multigpu
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_an_exchange_that_fails_on_gpus(model: Path, on_gpus: Loose, number: int) -> None:
    """The exchange fails by turns: a device never comes, or it sleeps."""
    await all_started_again(on_gpus)
    victim = on_gpus.workers[VICTIM]
    engine_pid = (await victim.report()).engine_pid
    async with on_gpus.cluster.stub() as stub:
        # A worker's first prompts may compile for seconds, in which the victim's streams would end.
        await asyncio.gather(*(stream.run(stub, 30) for stream in asked(10, seed=f"first {number}")))
        found = await on_both(on_gpus, stub, f"round {number}", tokens=20, most=900)
        began = time.monotonic()
        os.kill(engine_pid, (NEVER, LATE)[number % 2])
        gone_s = await gone_after_s(on_gpus, engine_pid, 2 * DEADLINE_S + 10, found.streams)
        await asyncio.gather(*found.runs)
    right(model, found.streams, ROUNDING)
    again = [stream for stream in found.streams if stream.attempts == 2]
    assert 1 <= len(again) <= 2
    assert {stream.attempts for stream in found.streams} == {1, 2}
    silent_s = max(stream.longest_gap_s for stream in again)
    unharmed_s = max(stream.longest_gap_s for stream in found.streams if stream.attempts == 1)
    print(f"\nPROOF round {number}: gone {gone_s:.2f} s, silent {silent_s:.2f} s, others {unharmed_s:.2f} s")
    assert gone_s <= DEADLINE_S + 5
    assert silent_s <= DEADLINE_S + 1
    assert time.monotonic() - began < 60
    assert last_error(victim)["cause"] == "exchange"
    await all_free([one for name, one in on_gpus.workers.items() if name != VICTIM], 5.0)


@pytest.mark.multigpu
@pytest.mark.timeout(600)
async def test_an_engine_on_gpus_that_is_stopped_past_the_deadline(model: Path, on_gpus: Loose) -> None:
    """The engine ends or goes on, and no token is wrong."""
    await all_started_again(on_gpus)
    victim = on_gpus.workers[VICTIM]
    engine_pid = (await victim.report()).engine_pid
    async with on_gpus.cluster.stub() as stub:
        found = await on_both(on_gpus, stub, "stopped", tokens=20, most=1500)
        freeze(engine_pid)
        await asyncio.sleep(DEADLINE_S * 1.3)
        if is_running(engine_pid):
            os.kill(engine_pid, signal.SIGCONT)
        await asyncio.gather(*found.runs)
    right(model, found.streams, ROUNDING)
    print(f"\nPROOF stopped for {DEADLINE_S * 1.3:.1f} s: the worker runs: {victim.front.poll() is None}")
    await all_free([one for one in on_gpus.workers.values() if one.front.poll() is None], 5.0)
