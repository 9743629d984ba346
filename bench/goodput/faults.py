"""An engine dies or freezes under load: requests lost, other tokens, time until latencies are as before.

    python -m bench.goodput faults --arm '2p2d --router-processes 2' --rate 13 --tpot 12
        --faults kill:decode,stop:prefill [--workload 1k-256] [--seconds 60] [--compare 0] [--unstated]
        [--ttft 500] [--attainment 0.9] [--seed 0] [--processes 1] [--shape llama-3.1-8b] [--dtype bf16]
        [--device cuda|cpu] [--out FILE]

--faults SIGNAL:ROLE, one after the other: SIGKILL or SIGSTOP (`kill`, `stop`) for the engine of the first
worker of that role, which its supervisor then starts again; the next fault comes once it is there. --rate is
in requests a second and GPU. Baton is asked over gRPC.

    --seconds   of arrivals by `loadgen run`, which starts 20 s before the fault: the share in time before it,
                the seconds until two successive windows of 5 s have 0.9 of that again, and until the worker
                is there again. 0: not run
    --compare   requests without a prefix cache, greedy: the same once undisturbed, then with each fault in
                their midst. Counts requests that were lost, that have other tokens, and that were placed
                again. Tokens are the same only with `--numerics exact` behind the arm. 0: not run

A line a fault, and with --out one of JSON. Exit code 1: a request was lost, a token differs, or the worker
or its latencies did not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio

from baton.base.process_tuning import batch_wakeups
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import WorkerRole
from bench.goodput.arms import WORKLOADS, Arm
from bench.goodput.points import VOCAB, add_server_options, append, checked, gpus_of
from bench.goodput.runs import Limits, Load, measure
from bench.goodput.servers import MODEL, NotServedError, Setup, Target, serve, until_terminated
from bench.options import program_parser
from bench.processes import worker_reports
from loadgen.analysis.metrics import tpot, ttft
from loadgen.common.record import NO_FAILURE, Outcome, Record

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ROLES = {
    "prefill": WorkerRole.WORKER_ROLE_PREFILL,
    "decode": WorkerRole.WORKER_ROLE_DECODE,
    "both": WorkerRole.WORKER_ROLE_BOTH,
}
# Seconds from the start of loadgen to the fault, and at least from the first arrival.
_FAULT_S, _LEAST_BEFORE_S = 20.0, 5.0
# Seconds of arrivals of which a share in time is taken, and the part of the earlier share that is normal.
_WINDOW_S, _NORMAL_PART = 5.0, 0.9
# The longest that a worker takes to come back; then it is left in peace for so long.
_BACK_S, _POLL_S, _REST_S = 180.0, 0.25, 3.0
_CALL_S = 300.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal, `kill` or `stop`, for the engine of the first worker of a role."""

    signal: str
    role: str

    def __str__(self) -> str:
        return f"{self.signal}:{self.role}"


def parse_faults(text: str) -> list[Fault]:
    """Parses a list such as `kill:decode,stop:prefill`. Raises ValueError."""
    faults = []
    for part in text.split(","):
        name, _, role = part.partition(":")
        if name not in _SIGNALS or role not in _ROLES:
            raise ValueError(f"{part!r} is not SIGNAL:ROLE of {', '.join(_SIGNALS)} and {', '.join(_ROLES)}")
        faults.append(Fault(name, role))
    return faults


def main() -> None:
    parser = program_parser("goodput", __doc__, "faults")
    add_server_options(parser)
    parser.add_argument("--rate", required=True, type=float, help="requests a second and GPU")
    parser.add_argument("--tpot", required=True, type=float, help="limit in ms")
    parser.add_argument("--faults", required=True, type=checked(parse_faults), help="SIGNAL:ROLE,...")
    parser.add_argument("--workload", default="1k-256", choices=sorted(WORKLOADS))
    parser.add_argument("--unstated", action="store_true", help="requests do not state their limits")
    parser.add_argument("--seconds", default=60.0, type=float, help="of arrivals at each fault; 0: none")
    parser.add_argument("--compare", default=0, type=int, help="requests whose tokens are compared")
    arguments = parser.parse_args()
    if 0 < arguments.seconds < _FAULT_S + 2 * _WINDOW_S:
        sys.exit(
            f"bench.goodput faults: --seconds {arguments.seconds:g} is below {_FAULT_S + 2 * _WINDOW_S:g}"
        )
    sys.exit(asyncio.run(until_terminated(run(arguments))))


async def run(arguments: argparse.Namespace) -> int | str:
    """Returns 0 where all faults were borne, else 1, or why they could not be tried."""
    arm, workload = arguments.arm, WORKLOADS[arguments.workload]
    borne = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.compare:
            plain = folder / "plain.yaml"
            plain.write_text("engine: {prefix_cache: false}\n")
            arm = replace(arm, flags=(*arm.flags, "--config", str(plain)))
        setup = Setup(
            arguments.shape, arguments.dtype, arguments.device, workload.tokens + 2, "", folder / "servers",
            protocol="grpc",
        )  # fmt: skip
        try:
            async with serve(arm, setup, gpus_of(arm, arguments)) as target:
                if arguments.compare:
                    borne &= await _compared(arm, arguments, target)
                if arguments.seconds:
                    borne &= await _timed(arm, arguments, target, folder)
        except (NotServedError, TimeoutError, LookupError) as error:
            return f"bench.goodput faults: {arm.name}: {error}"
    return int(not borne)


@dataclass(slots=True)
class Struck:
    """A fault that came: when, on the monotonic clock, and seconds from there until the worker was there
    again."""

    at: float
    back_s: float


async def strike(fault: Fault, admin: str) -> Struck:
    """Sends the signal, and waits for the worker to be there again. Raises LookupError where there is no such
    worker, TimeoutError."""
    reports = await worker_reports(admin)
    victims = [
        worker.report.engine_pid
        for worker in sorted(reports, key=lambda worker: worker.identity.name)
        if worker.identity.role == _ROLES[fault.role] and not worker.error
    ]
    if not victims:
        raise LookupError(f"no worker of role {fault.role}")
    at = time.monotonic()
    os.kill(victims[0], _SIGNALS[fault.signal])
    while time.monotonic() < at + _BACK_S:
        await asyncio.sleep(_POLL_S)
        try:
            now = [worker for worker in await worker_reports(admin) if not worker.error]
        except grpc.aio.AioRpcError:
            continue
        if len(now) == len(reports) and victims[0] not in [one.report.engine_pid for one in now]:
            return Struck(at, time.monotonic() - at)
    raise TimeoutError(f"{fault}: the worker was not back within {_BACK_S:g} s")


@dataclass(slots=True)
class Answer:
    """Tokens of a request, how often it was placed, and why it failed, if it did."""

    token_ids: list[int] = field(default_factory=list)
    attempts: int = 0
    error: str = ""


async def _answers(
    arguments: argparse.Namespace, arm: Arm, address: str, begun: asyncio.Event
) -> list[Answer]:
    """Asks for --compare outputs at Poisson arrivals of --rate, the same ones every time; `begun` is set with
    the middle one."""
    flags = WORKLOADS[arguments.workload].flags
    prompt, output = (int(flags[flags.index(name) + 1]) for name in ("--input-len", "--output-len"))
    draw = random.Random(arguments.seed)
    batch_wakeups()  # as any busy gRPC client would
    async with grpc.aio.insecure_channel(address) as channel:
        stub = RouterServiceStub(channel)

        async def one(ids: list[int]) -> Answer:
            answer = Answer()
            request = GenerateRequest(
                model=MODEL, token_ids=TokenIds(ids=ids), temperature=0, max_tokens=output, ignore_eos=True
            )
            try:
                async for message in stub.Generate(request, timeout=_CALL_S):
                    answer.token_ids += message.token_ids
                    answer.attempts = max(answer.attempts, message.trace.attempts)
            except grpc.aio.AioRpcError as error:
                answer.error = f"{error.code().name}: {error.details()}"
            else:
                if len(answer.token_ids) != output:
                    answer.error = f"{len(answer.token_ids)} tokens instead of {output}"
            return answer

        asked = []
        for number in range(arguments.compare):
            ids = [draw.randrange(VOCAB) for _ in range(prompt)]
            asked.append(asyncio.create_task(one(ids)))
            if number == arguments.compare // 2:
                begun.set()
            await asyncio.sleep(draw.expovariate(arguments.rate * arm.gpus))
        return list(await asyncio.gather(*asked))


async def _compared(arm: Arm, arguments: argparse.Namespace, target: Target) -> bool:
    """True if no request was lost or had other tokens."""
    address = target.url.removeprefix("grpc://")
    undisturbed = await _answers(arguments, arm, address, asyncio.Event())
    lost = [answer.error for answer in undisturbed if answer.error]
    if lost:
        raise LookupError(f"{len(lost)} of {len(undisturbed)} requests failed without a fault: {lost[0]}")
    borne = True
    for fault in arguments.faults:
        begun = asyncio.Event()
        asking = asyncio.create_task(_answers(arguments, arm, address, begun))
        try:
            await begun.wait()
            struck = await strike(fault, target.admin)
            found = compare(undisturbed, await asking)
        finally:
            asking.cancel()
        print(
            f"{arm.name} {fault} at {arguments.rate:g} a second and GPU: {found['lost']} lost, "
            f"{found['wrong']} wrong, {found['again']} run again, of {len(undisturbed)}; worker back in "
            f"{struck.back_s:.1f} s {found['error']}".rstrip(),
            flush=True,
        )
        append(_about(arm, arguments, fault, struck) | found, arguments.out)
        borne &= not found["lost"] and not found["wrong"]
        await asyncio.sleep(_REST_S)
    return borne


def compare(undisturbed: Sequence[Answer], disturbed: Sequence[Answer]) -> dict[str, Any]:
    """Counts requests that failed, that have other tokens, and that were placed more than once."""
    pairs = list(zip(undisturbed, disturbed, strict=True))
    return {
        "requests": len(pairs),
        "lost": sum(bool(one.error) for one in disturbed),
        "wrong": sum(not one.error and one.token_ids != first.token_ids for first, one in pairs),
        "again": sum(one.attempts > 1 for one in disturbed),
        "error": next((one.error for one in disturbed if one.error), ""),
    }


async def _timed(arm: Arm, arguments: argparse.Namespace, target: Target, folder: Path) -> bool:
    """True if no request was lost and attainment came back at every fault."""
    limits = Limits(arguments.ttft, arguments.tpot, arguments.attainment)
    borne = True
    for number, fault in enumerate(arguments.faults):
        load = Load(
            WORKLOADS[arguments.workload], arguments.rate * arm.gpus, arguments.seconds,
            arguments.seed + 1000 * (1 + number), None if arguments.unstated else limits, arguments.processes,
        )  # fmt: skip
        measuring = asyncio.create_task(measure(load, target, folder / f"fault-{number}", VOCAB))
        try:
            await asyncio.sleep(_FAULT_S)
            struck = await strike(fault, target.admin)
            run = await measuring
        finally:
            measuring.cancel()
        at = struck.at - run.about["started_monotonic"]
        before, back_s = recovery(run.records, limits, at)
        lost = [one.outcome for one in run.records if one.outcome not in NO_FAILURE]
        print(
            f"{arm.name} {fault} at {arguments.rate:g} a second and GPU: {len(lost)} of {len(run.records)} "
            f"lost; {before:.1%} in time before, {_NORMAL_PART:g} of that after "
            f"{'more than the run' if back_s is None else f'{back_s:g} s'}; worker back in "
            f"{struck.back_s:.1f} s",
            flush=True,
        )
        found = {
            "requests": len(run.records), "lost": len(lost), "outcomes": sorted(set(lost)),
            "tpot_ms": arguments.tpot, "fault_at_s": round(at, 2), "before": round(before, 4),
            "normal_s": back_s,
        }  # fmt: skip
        append(_about(arm, arguments, fault, struck) | found, arguments.out)
        borne &= not lost and back_s is not None
        await asyncio.sleep(_REST_S)
    return borne


def _about(arm: Arm, arguments: argparse.Namespace, fault: Fault, struck: Struck) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "workload": arguments.workload,
        "rate": arguments.rate,
        "fault": str(fault),
        "worker_back_s": round(struck.back_s, 2),
    }


def recovery(records: Sequence[Record], limits: Limits, fault_s: float) -> tuple[float, float | None]:
    """Returns the share in time of the requests that were due up to 5 s before the fault, and the seconds
    from the fault until two successive windows of 5 s have 0.9 of it: None where the run does not have them.
    Raises LookupError where the fault came in the first 10 s of the run."""
    if fault_s < _LEAST_BEFORE_S + _WINDOW_S:
        raise LookupError(f"the fault came {fault_s:.1f} s after the first arrival: no time before it")
    before = _share(records, limits, 0.0, fault_s - _WINDOW_S)
    if before is None:
        raise LookupError("no request was due before the fault")
    wanted = _NORMAL_PART * before
    last = max(one.scheduled for one in records)
    for second in range(int(last - fault_s - 2 * _WINDOW_S) + 1):
        since = fault_s + second
        shares = [_share(records, limits, at, at + _WINDOW_S) for at in (since, since + _WINDOW_S)]
        if all(share is not None and share >= wanted for share in shares):
            return before, float(second)
    return before, None


def _share(records: Sequence[Record], limits: Limits, since: float, until: float) -> float | None:
    due = [one for one in records if since <= one.scheduled < until]
    return sum(_in_time(one, limits) for one in due) / len(due) if due else None


def _in_time(record: Record, limits: Limits) -> bool:
    first, each = ttft(record), tpot(record)
    return (
        record.outcome == Outcome.OK
        and first is not None
        and first * 1e3 <= limits.ttft_ms
        and (each or 0.0) * 1e3 <= limits.tpot_ms
    )
