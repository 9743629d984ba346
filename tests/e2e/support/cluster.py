"""A real cluster for tests: `baton up` as a child process, and clients of its public and admin ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import grpc
import grpc.aio
import httpx

from baton.base.parent_death import tied
from baton.base.process_stat import is_running
from baton.base.python_module import python_module
from baton.v1.admin_pb2 import (
    AdminServiceGetAuditRequest,
    AdminServiceGetStatusRequest,
    AdminServiceGetStatusResponse,
    WorkerReport,
)
from baton.v1.admin_pb2_grpc import AdminServiceStub
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import FinishReason, WorkerRole
from baton.v1.worker_pb2 import IntegrityReport
from bench.processes import first_gpu
from services.common.processes.process_tree import descendants as descendants
from services.common.rpc.internal_rpc import internal_channel
from tests.e2e.support import fixed_values

if TYPE_CHECKING:  # the class is in the stub file only
    from baton.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

START_S = 90.0
STOP_S = 35.0
# From a kill until the worker serves again, where others work on the same two cores.
AGAIN_S = 60.0
MODEL = "test-model"
# The secret of every cluster and single worker here, so that a test can call a worker itself.
CLUSTER_SECRET = "the secret of a test's cluster"


@dataclass(slots=True)
class Answer:
    """One whole request, as a client saw it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: GenerateResponse | None = None

    @property
    def finish(self) -> str:
        assert self.last is not None
        return FinishReason.Name(self.last.finish_reason).removeprefix("FINISH_REASON_").lower()


@dataclass(slots=True)
class Cluster:
    """A running cluster, started by `baton up`."""

    process: subprocess.Popen[str]
    grpc_address: str
    http_address: str
    admin_address: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.http_address}"

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[RouterServiceAsyncStub]:
        """The public gRPC service; one channel for all calls inside."""
        async with grpc.aio.insecure_channel(self.grpc_address) as channel:
            yield RouterServiceStub(channel)

    async def generate(self, stub: RouterServiceAsyncStub, prompt: Sequence[int], **fields: Any) -> Answer:
        """Streams one request to its end and checks what holds for every stream."""
        request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=list(prompt)), **fields)
        answer = Answer()
        async for message in stub.Generate(request, timeout=120):
            assert answer.last is None, "a message after the last"
            if message.token_ids:
                assert message.first_number == len(answer.token_ids), "a gap or a repeat"
            answer.token_ids += message.token_ids
            answer.text += message.text
            if message.finish_reason:
                answer.last = message
        assert answer.last is not None, "the stream ended without a finish reason"
        assert answer.last.usage.completion_tokens == len(answer.token_ids)
        assert answer.last.usage.prompt_tokens == len(prompt)
        return answer

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[AdminServiceAsyncStub]:
        """Yields a stub of the admin gRPC service."""
        async with grpc.aio.insecure_channel(self.admin_address) as channel:
            yield AdminServiceStub(channel)

    async def status(self, **fields: Any) -> AdminServiceGetStatusResponse:
        """The full status; `fields` are those of its request."""
        async with self.admin() as admin:
            return await admin.GetStatus(AdminServiceGetStatusRequest(**fields), timeout=10)

    async def workers(self) -> list[WorkerReport]:
        """Every worker's identity, address and report."""
        async with self.admin() as admin:
            return list((await admin.GetAudit(AdminServiceGetAuditRequest(), timeout=10)).workers)

    async def reports(self) -> dict[str, IntegrityReport]:
        """Every worker's report, by name."""
        workers = await self.workers()
        assert all(not worker.error for worker in workers), workers
        return {worker.identity.name: worker.report for worker in workers}

    async def roles(self) -> dict[str, str]:
        return {
            worker.identity.name: WorkerRole.Name(worker.identity.role).removeprefix("WORKER_ROLE_").lower()
            for worker in await self.workers()
        }

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=120, verify=False)


def leaks(report: IntegrityReport) -> list[str]:
    """The resources that an idle worker still holds; empty where all are free."""
    load = report.load
    found = []
    for name, value in (
        ("slots", load.slots - load.free_slots),
        ("blocks", load.blocks - load.free_blocks),
        ("queued prefills", load.queued_prefills),
        ("pinned blocks", report.pinned_blocks),
        ("live tickets", report.live_tickets),
    ):
        if value:
            found.append(f"{value} {name}")
    for link in report.links:
        home = link.free_pieces if link.sending else link.credited_pieces
        if link.live_transfers or link.quarantined_pieces or home != link.window_pieces:
            found.append(f"link to {link.peer.name}: {link}")
    if report.integrity_error:
        found.append(report.integrity_error)
    return found


def worker_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker of a test's cluster, past its router. It sends no pings, so that it outlasts a
    front that a test stops."""
    return internal_channel(address, [], CLUSTER_SECRET)


# A look at all workers and the pause after it take about this long on idle cores.
_LOOK_S = 0.06


async def assert_all_free(cluster: Cluster, within_s: float) -> None:
    """Fails unless every worker holds nothing `within_s` seconds from now.

    A look that takes longer than on idle cores counts as one of `_LOOK_S`: the workers that answer late are
    those that would release, and had as little of the cores for that.
    """
    passed_s = 0.0
    while True:
        found = {name: leaks(report) for name, report in (await cluster.reports()).items()}
        if not any(found.values()):
            return
        assert passed_s < within_s, f"still held after {within_s} s: {found}"
        await asyncio.sleep(0.05)
        passed_s += _LOOK_S


WITHOUT_RAY = os.environ.get("BATON_TEST_RAY", "none")
BATON = python_module("services.cli.main")
# Names of modules that are files in the folder where clusters run, as users may have them there.
LOCAL_MODULES = (
    "queue",
    "logging",
    "json",
    "asyncio",
    "grpc",
    "ray",
    "torch",
    "tokenizers",
    "redis",
    "services",
)


@contextlib.contextmanager
def baton_up(
    model: Path,
    *flags: str,
    config: str = "",
    program: Sequence[str] = BATON,
    ray: str = WITHOUT_RAY,
    every_gpu: bool = False,
    secret: str = CLUSTER_SECRET,
    fixed: Mapping[str, object] | None = None,
) -> Iterator[Cluster]:
    """Starts a cluster on free ports and stops it, checking that it ends well and leaves no process. Without
    Ray, unless a test is about that (`ray`: an address; empty: the default): it is supervised alike, and
    ready seconds earlier. It sees one GPU, or `every_gpu` there is. `fixed`: values by path for what is no
    setting."""
    options: Any = {"ray": ray, "every_gpu": every_gpu, "secret": secret, "fixed": fixed}
    with starting_up(model, *flags, config=config, program=program, **options) as (process, log):
        ready = _ready(process, log)
        yield Cluster(process, ready["grpc"], ready["http"], ready["admin"], log)


@contextlib.contextmanager
def starting_up(
    model: Path,
    *flags: str,
    config: str = "",
    program: Sequence[str] = BATON,
    ray: str = WITHOUT_RAY,
    every_gpu: bool = False,
    secret: str = CLUSTER_SECRET,
    fixed: Mapping[str, object] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`baton_up` that does not wait for READY: the process, and the file that its logs go to."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        if fixed and program == BATON:
            program = fixed_values.PROGRAM
        arguments = [*program, "up", "--model", str(model)]
        arguments += ["--served-model-name", MODEL, "--http-port", "0", "--grpc-port", "0"]
        arguments += [*(("--ray-address", ray) if ray else ()), *flags]
        if config:
            (Path(folder) / "baton.yaml").write_text(config)
            arguments += ["-c", str(Path(folder) / "baton.yaml")]
        # Programs of these tests are found by the folder that they are started in.
        here = _with_modules(Path(folder) / "here") if program == BATON else None
        with log.open("w") as stderr:
            process = subprocess.Popen(
                tied(arguments),  # tests that are ended leave no cluster
                cwd=here,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env={
                    **os.environ,
                    **({} if every_gpu else first_gpu()),
                    "OMP_NUM_THREADS": "1",
                    "BATON_CLUSTER_SECRET": secret,
                    fixed_values.VARIABLE: json.dumps(
                        {path: str(one) for path, one in (fixed or {}).items()}
                    ),
                },
            )
        try:
            yield process, log
        finally:
            children = descendants(process.pid)
            asked_to_end = process.poll() is None
            if asked_to_end:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            finally:
                left = [pid for pid in children if is_running(pid)]
            assert process.stdout is not None
            with process.stdout:  # left open it would fail another test too
                assert not asked_to_end or process.returncode == 0, log.read_text()[-4000:]
                assert process.stdout.read() == "", "something was written to stdout beside READY"
                assert not left, f"processes left: {left}\n{log.read_text()[-4000:]}"
                run = [] if here is None else [file.name for file in here.glob("*.run")]
                assert not run, f"modules of the current folder were run: {run}"


def _with_modules(folder: Path) -> Path:
    """A new folder with modules that say that they were run, and fail."""
    folder.mkdir()
    for name in LOCAL_MODULES:
        (folder / f"{name}.py").write_text("open(__file__ + '.run', 'w').close()\nraise SystemExit(1)\n")
    return folder


def _ready(process: subprocess.Popen[str], log: Path) -> dict[str, str]:
    """The addresses of the READY line."""
    assert process.stdout is not None
    line = _read_line(process.stdout, START_S)
    if not line.startswith("READY "):
        raise AssertionError(f"no READY but {line!r}, exit code {process.poll()}\n{log.read_text()[-4000:]}")
    return dict(part.split("=", 1) for part in line.split()[1:])


def _read_line(stream: IO[str], timeout_s: float) -> str:
    """One line, or "" at the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(timeout_s) else ""


async def eventually(what: Callable[[], bool], within_s: float) -> None:
    """Waits until a call of `what` returns true."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.02)


async def whole_again(
    cluster: Cluster, names: Collection[str], within_s: float
) -> dict[str, IntegrityReport]:
    """Waits until all these workers answer, and no other; their reports."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(AssertionError, grpc.aio.AioRpcError):
                reports = await cluster.reports()
                if set(reports) == set(names):
                    return reports
            await asyncio.sleep(0.05)


async def serves_again(
    cluster: Cluster, stub: RouterServiceAsyncStub, prompt: Sequence[int], within_s: float
) -> float:
    """Asks until a short request is answered whole; the seconds that took."""
    began = time.monotonic()
    while True:
        try:
            request = GenerateRequest(
                model=MODEL, token_ids=TokenIds(ids=prompt), max_tokens=3, temperature=0, ignore_eos=True
            )
            await _to_end(stub.Generate(request, timeout=within_s))
            break
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.05)
    took = time.monotonic() - began
    assert took < within_s
    return took


async def _to_end(call: AsyncIterable[object]) -> None:
    async for _ in call:
        pass
