"""`baton up` as a process, over fake children: what it prints, how it ends, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.base.process_stat import is_running
from services.common.processes.process_tree import descendants
from tests.support.command_lines import command_line

HARNESS = str(Path(__file__).parents[1] / "with_fakes.py")
REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 30.0


class Up:
    """A running `baton up` and the log its children write."""

    def __init__(self, folder: Path, traits: dict[str, list[str]], settings: dict[str, object]) -> None:
        self.log = folder / "children.log"
        self.log.touch()
        self.process = subprocess.Popen(
            [sys.executable, HARNESS, "up", json.dumps(traits), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"FAKE_LOG": str(self.log), "PYTHONPATH": str(REPOSITORY)},
        )

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def finish(self) -> tuple[int, str, str]:
        """Exit code, what is left of stdout, stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def events(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]

    def pids(self) -> list[int]:
        return [int(pid) for event, _, pid in self.events() if event == "started"]

    def order(self, event: str) -> list[str]:
        return [name for what, name, _ in self.events() if what == event]


Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Up] = []

    def start_one(
        *, worker: list[str] | None = None, router: list[str] | None = None, **settings: object
    ) -> Up:
        started.append(Up(tmp_path, {"worker": worker or [], "router": router or []}, settings))
        return started[-1]

    yield start_one
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
        up.process.communicate()


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),  # e2e's clusters end so
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_drains_the_router_first_and_leaves_no_process(
    start: Start, number: signal.Signals, to_group: bool
) -> None:
    up = start(worker=["grandchild"], prefill=2, decode=1)
    line = up.ready_line()
    port = r"127\.0\.0\.1:\d+"
    wanted = rf"READY http=127\.0\.0\.1:1 grpc={port} admin={port} admin_http={port}\n?"
    assert re.fullmatch(wanted, line), line
    assert len(up.pids()) == 7  # three workers, their grandchildren, the router
    (os.killpg if to_group else os.kill)(up.process.pid, number)
    code, out, _ = up.finish()
    assert (code, out) == (0, "")
    assert up.order("ended")[0] == "router"
    assert sorted(up.order("ended")[1:]) == ["decode-0", "prefill-0", "prefill-1"]
    assert [what for what, name, _ in up.events() if name == "prefill-0"] == ["started", "reported", "ended"]
    wait_gone(up.pids())


def test_a_stubborn_child_is_killed(start: Start) -> None:
    up = start(both=1, router=["stubborn"], drain_s=0)
    up.ready_line()
    up.process.terminate()
    assert up.finish()[0] == 0
    assert up.order("ended") == ["both-0"]
    wait_gone(up.pids())


def test_a_second_signal_stops_at_once(start: Start) -> None:
    up = start(both=1, worker=["stubborn"], router=["stubborn"], drain_s=24)
    up.ready_line()
    began = time.monotonic()
    up.process.terminate()
    while not up.order("reported"):
        time.sleep(0.02)
    up.process.terminate()
    up.finish()
    assert time.monotonic() - began < 20
    wait_gone(up.pids())


def wait_until(up: Up, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert up.process.poll() is None, f"it ended with code {up.process.returncode}: {up.events()}"
        assert time.monotonic() < deadline, up.events()
        time.sleep(0.02)


@pytest.mark.parametrize(
    "traits",
    [pytest.param(["dies-once"], marks=pytest.mark.slow), ["dies-once", "refuses-second"]],
    ids=" ".join,
)
def test_a_router_that_dies_is_started_again_at_the_same_place(start: Start, traits: list[str]) -> None:
    up = start(both=1, router=traits)
    found = re.search(r"grpc=127\.0\.0\.1:(\d+) ", up.ready_line())
    assert found is not None
    port = found[1]
    wait_until(up, lambda: bool(up.order(f"at-{port}")))
    (again,) = [pid for event, _, pid in up.events() if event == f"at-{port}"]
    wait_until(up, lambda: ["workers", again] in [[event, pid] for event, _, pid in up.events()])
    up.process.terminate()
    code, out, err = up.finish()
    assert (code, out) == (0, ""), "READY is one line"
    assert up.order("started").count("both-0") == 1
    assert up.order("started").count("router") == len(traits) + 1
    assert err.count("restarting the router") == len(traits)
    wait_gone(up.pids())


def test_a_router_that_keeps_dying_ends_it_and_is_named(start: Start) -> None:
    up = start(both=1, router=["dies"], router_restarts=2)
    assert up.ready_line().startswith("READY ")
    code, out, err = up.finish()
    assert (code, out) == (1, "")
    assert up.order("started").count("router") == 3
    lines = [line for line in err.splitlines() if line.startswith("baton: ")]
    assert lines[-2].startswith("baton: error: router (pid ")
    assert lines[-2].endswith("was killed by SIGKILL; stopping")
    wait_gone(up.pids())


@pytest.mark.parametrize(
    "traits",
    [pytest.param(["dies"], marks=pytest.mark.slow), ["dies-once", "silent-second"]],
    ids=" ".join,
)
def test_a_signal_while_the_router_is_started_again(start: Start, traits: list[str]) -> None:
    up = start(both=1, router=traits)
    assert up.ready_line().startswith("READY ")
    wait_until(up, lambda: up.order("started").count("router") >= 2)
    up.process.terminate()
    code, out, _ = up.finish()
    assert (code, out) == (0, "")
    wait_gone(up.pids())


def test_the_embedded_redis_is_restarted_and_each_start_of_the_router_is_informed(start: Start) -> None:
    up = start(both=1, router=["dies-once"])
    assert up.ready_line().startswith("READY ")
    os.kill(redis_of(up), signal.SIGKILL)
    wait_until(
        up, lambda: up.order("started").count("router") == 2 and "1" in up.order("store-restarts")[-1:]
    )
    os.kill(redis_of(up), signal.SIGKILL)
    wait_until(up, lambda: up.order("store-restarts")[-1:] == ["2"])
    pids = [*up.pids(), redis_of(up)]
    up.process.terminate()
    code, _, err = up.finish()
    assert code == 0
    assert "the embedded Redis was killed by SIGKILL" in err
    wait_gone(pids)


def test_a_worker_that_dies_is_restarted_and_the_router_is_informed(start: Start) -> None:
    up = start(both=1, worker=["dies-once"])
    assert up.ready_line().startswith("READY ")
    deadline = time.monotonic() + LIMIT_S
    while len(up.order("workers")) < 3:
        assert time.monotonic() < deadline, up.events()
        time.sleep(0.02)
    first, gone, second = up.order("workers")[:3]
    assert gone == "none"
    assert first != second
    up.process.terminate()
    assert up.finish()[0] == 0
    assert up.order("started").count("both-0") == 2
    assert up.order("restart-1") == ["both-0"], "the worker's restarts are a metric"
    wait_gone(up.pids())


def test_a_worker_that_was_replaced_is_not_started_again(start: Start) -> None:
    up = start(both=1, worker=["replaced"])
    assert up.ready_line().startswith("READY ")
    deadline = time.monotonic() + LIMIT_S
    while "none" not in up.order("workers"):
        assert time.monotonic() < deadline, up.events()
        time.sleep(0.02)
    time.sleep(1.0)  # a start would be due at once
    up.process.terminate()
    assert up.finish()[0] == 0
    assert up.order("started").count("both-0") == 1
    wait_gone(up.pids())


def redis_of(up: Up) -> int:
    (pid,) = [pid for pid in descendants(up.process.pid) if "valkey" in " ".join(command_line(pid))]
    return pid


def test_configurations_are_in_no_process_list_and_a_killed_parent_takes_all_along(start: Start) -> None:
    up = start(prefill=1, decode=1)
    assert up.ready_line().startswith("READY ")
    urls = set(up.order("state"))
    assert len(urls) == 1, "router and workers share one Redis"
    (url,) = urls
    password = urlsplit(url).password
    assert password
    for pid in (up.process.pid, *descendants(up.process.pid)):
        assert password not in " ".join(command_line(pid))
        assert password not in Path(f"/proc/{pid}/environ").read_text(errors="replace")
    pids = [*up.pids(), redis_of(up)]
    up.process.kill()
    _, out, err = up.finish()
    assert password not in out + err
    wait_gone(pids)


def test_a_worker_that_ends_before_all_serve_stops_everything(start: Start) -> None:
    code, out, err = start(both=1, worker=["gives-up"]).finish()
    assert (code, out) == (1, "")
    assert "exited with code 2: the engine ended" in err


@pytest.mark.parametrize("who", ["worker", pytest.param("router", marks=pytest.mark.slow)])
def test_a_refusal_is_one_line_and_code_2(start: Start, who: str) -> None:
    up = start(prefill=1, decode=1, **{who: ["refuse"]})
    code, out, err = up.finish()
    assert (code, out) == (2, "")
    assert [line for line in err.splitlines() if "error" in line] == [
        line for line in err.splitlines() if line.endswith(": model.safetensors is missing")
    ]
    assert err.count("error: ") == 1
    wait_gone(up.pids())


@pytest.mark.parametrize(
    ("trait", "timeout_s", "message"),
    [
        ("silent", 0.3, "was not ready in 0.3 s"),
        pytest.param("nonsense", 20, "wrote 'hello' instead of ready", marks=pytest.mark.slow),
    ],
)
def test_a_child_that_never_serves_is_named(start: Start, trait: str, timeout_s: float, message: str) -> None:
    up = start(both=1, worker=[trait], start_timeout_s=timeout_s)
    code, out, err = up.finish()
    assert (code, out) == (1, "")
    assert message in err
    wait_gone(up.pids())


# Over real children: tests/e2e/faults/one_pair/test_stopping.py.
@pytest.mark.slow
def test_a_signal_while_starting_stops_it(start: Start) -> None:
    up = start(worker=["silent"])
    while len(up.pids()) < 2:
        time.sleep(0.02)
    up.process.terminate()
    assert up.finish()[0] == 0
    wait_gone(up.pids())


def test_no_redis_where_none_is_wanted_and_closed_pipes_are_no_error(start: Start) -> None:
    up = start(both=1, state={"redis_url": "none"})
    assert up.process.stdout is not None
    assert up.process.stderr is not None
    up.process.stdout.close()
    up.process.stderr.close()
    deadline = time.monotonic() + LIMIT_S
    while "router" not in up.order("started") or len(up.order("state")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    assert up.process.poll() is None
    assert not any("valkey" in " ".join(command_line(pid)) for pid in descendants(up.process.pid))
    assert up.order("state") == ["none", "none"]
    up.process.terminate()
    assert up.process.wait(LIMIT_S) == 0
    wait_gone(up.pids())
