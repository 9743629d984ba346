"""The leak check after a run: what it reports, and that a check that cannot run is never a passed one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from baton.v1.admin_pb2 import AdminServiceGetStatusResponse
from loadgen.analysis import run_folder
from loadgen.common.settings import TargetSettings
from loadgen.reports.html_run import run_page
from loadgen.reports.markdown import run_markdown
from loadgen.targets import admin_port, leak_check
from loadgen.targets.leak_check import check_leaks, judge
from tests.loadgen.fake_server import Behaviour
from tests.loadgen.processes import MAY_LAG, Serve, loadgen

TARGET = "127.0.0.1:4711"
UNUSED = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak_check, "LIMIT_S", 0.3)
    monkeypatch.setattr(admin_port, "DEFAULT_ADDRESS", UNUSED)


def status(held: int = 0, *, grpc_address: str = TARGET, error: str = "") -> AdminServiceGetStatusResponse:
    """The status of a router with one decode worker that has `held` slots in use."""
    answer = AdminServiceGetStatusResponse(grpc_address=grpc_address)
    worker = answer.workers.add().worker
    worker.identity.name = "decode-0"
    worker.error = error
    if not error:
        worker.report.load.slots, worker.report.load.free_slots = 8, 8 - held
    return answer


@contextlib.contextmanager
def admin_of(answer: AdminServiceGetStatusResponse) -> Iterator[str]:
    """The address of an AdminService that gives this status."""
    server = grpc.server(ThreadPoolExecutor(1))
    data = answer.SerializeToString()
    handler = grpc.unary_unary_rpc_method_handler(lambda asked, context: data)
    named = grpc.method_handlers_generic_handler("baton.v1.AdminService", {"GetStatus": handler})
    server.add_generic_rpc_handlers((named,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_what_is_held() -> None:
    assert judge(status()).held == []
    assert judge(status(held=2)).held == ["decode-0: 2 slots in use"]
    busy = status()
    busy.router.running = 3
    assert judge(busy).held == ["router: 3 requests run"]


def test_a_worker_without_a_report_may_hold_anything() -> None:
    answer = status(error="connection refused")
    found = judge(answer)
    assert (found.held, found.not_checked) == (None, "no counters of decode-0: connection refused")
    answer.workers.append(status(held=1).workers[0])
    assert judge(answer).held == ["decode-0: 1 slots in use"]
    assert judge(AdminServiceGetStatusResponse()).not_checked == "no worker is known"


async def test_an_address_that_is_given_is_asked() -> None:
    for url in (f"grpc://{TARGET}", "http://elsewhere:8000/"):
        for held, found in ((0, []), (1, ["decode-0: 1 slots in use"])):
            with admin_of(status(held)) as admin:
                assert (await check_leaks(TargetSettings(url=url, admin=admin))).held == found


async def test_the_default_port_is_asked_where_it_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    with admin_of(status(held=1)) as admin:
        monkeypatch.setattr(admin_port, "DEFAULT_ADDRESS", admin)
        for url in (f"grpc://{TARGET}", "grpc://localhost:4711"):
            assert (await check_leaks(TargetSettings(url=url))).held == ["decode-0: 1 slots in use"]
        # Another router of this host, or the same port of another host.
        for url in ("grpc://127.0.0.1:4712", "grpc://10.0.0.1:4711"):
            found = await check_leaks(TargetSettings(url=url))
            assert found.held is None
            assert found.not_checked.endswith(f"is not that of {url.removeprefix('grpc://')}")


async def test_a_check_that_cannot_run_is_not_passed() -> None:
    for admin in ("", UNUSED):
        found = await check_leaks(TargetSettings(url=f"grpc://{TARGET}", admin=admin))
        assert (found.held, found.not_checked) == (None, f"no AdminService at {UNUSED}: UNAVAILABLE")


@pytest.mark.parametrize("protocol", [pytest.param("grpc", marks=pytest.mark.slow), "http"])
def test_what_a_run_reports_of_it(serve: Serve, protocol: str, tmp_path: Path) -> None:
    common = ("--model", "m", "--rate", "100", "--num-requests", "6", "--warmup", "0", *MAY_LAG)
    with serve(Behaviour()) as served, admin_of(status()) as free, admin_of(status(held=1)) as leaking:
        cases = {
            free: "leak check: passed",
            leaking: "leak check: FAILED, still held: decode-0: 1 slots in use",
            UNUSED: f"leak check: not checked (no AdminService at {UNUSED}: UNAVAILABLE)",
        }
        if protocol == "http":  # each run is a process of its own, and the check is the same
            del cases[free], cases[UNUSED]
        for number, (admin, words) in enumerate(cases.items()):
            out = tmp_path / str(number)
            done = loadgen("run", getattr(served, protocol), "--admin", admin, *common, "--out", str(out))
            assert words in done.out.splitlines(), done.out + done.err
            run = run_folder.load(out)
            assert f"- {words}" in run_markdown(run).splitlines()
            assert words in run_page(run)
        if protocol == "http":
            return
        # No admin port is given: loopback's default one is not this server's.
        done = loadgen("run", getattr(served, protocol), *common, "--out", str(tmp_path / "none"))
        assert "leak check: not checked (" in done.out
