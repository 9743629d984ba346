"""`baton ray supervise` on a real local Ray: start, lost workers, a lost supervisor, a lost head, drain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from services.cluster.on_ray.ray_node import free_ports
from services.common.processes.run_folder import RunFolder
from tests.cluster.on_ray.ray_nodes import HEAD_HOST, RayNodes, ray_nodes
from tests.e2e.support.prometheus_names import group_page, series_of
from tests.e2e.support.redis_server import RedisServer
from tests.support.checkpoints import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SECRET = "secret-of-a-cluster-on-ray"
WITHIN_S = 150.0
# From the notice of a lost node until its workers serve elsewhere: 15 s where the cores are free.
AGAIN_S = 15.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
BATON = (sys.executable, "-m", "services.cli.main")
HOST = "127.0.0.9"
ROOM = {"baton-prefill": 1, "baton-decode": 1}


@dataclass
class Supervisor:
    process: subprocess.Popen[str]
    url: str
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=5, verify=False)

    def answers(self, path: str, status: int = 200) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.get(path).status_code == status
        return False

    def metric(self, line: str) -> float:
        return next(
            float(text.split()[-1]) for text in self.get("/metrics").text.splitlines() if line in text
        )


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as started:
        started.start_head("pod-a", {"baton-prefill": 1, "baton-decode": 1})
        yield started


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def config(nodes: RayNodes, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("config"), nodes, redis)


def written(folder: Path, nodes: RayNodes, redis: RedisServer) -> Path:
    """The file of the command, with secrets in files."""
    model = FAMILIES[0].make(folder)
    (folder / "cluster-secret").write_text(f"{SECRET}\n")
    (folder / "redis-url").write_text(redis.url)
    (port,) = free_ports(1)
    settings = {
        "model": str(model),
        "served_model_name": "m",
        "cluster_secret_file": str(folder / "cluster-secret"),
        "state": {"namespace": "test", "redis_url_file": str(folder / "redis-url")},
        "supervision": {"ray_address": nodes.address},
        "engine": {"device": "cpu", "dtype": "float64", "slots": 4, "kv_blocks": 65},
        "worker": {"admin_http_port": port},
        "drain_s": 10,
    }
    (folder / "supervisor.yaml").write_text(json.dumps(settings))
    return folder / "supervisor.yaml"


@contextlib.contextmanager
def supervising(nodes: RayNodes, config: Path, log: Path) -> Iterator[Supervisor]:
    port = json.loads(config.read_text())["worker"]["admin_http_port"]
    with log.open("a") as output:
        process = subprocess.Popen(
            (*BATON, "ray", "supervise", "--config", str(config)),
            env=nodes.environment | {"BATON_HOST": HOST, "BATON_NAME": "pod-supervisor"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )
    try:
        yield Supervisor(process, f"http://{HOST}:{port}", log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(WITHIN_S) == 0, log.read_text()[-3000:]
            finally:
                process.kill()


@pytest.fixture
def supervisor(nodes: RayNodes, config: Path, tmp_path: Path) -> Iterator[Supervisor]:
    with supervising(nodes, config, tmp_path / "log") as started:
        until(lambda: started.answers("/ready"), started)
        yield started


def until(condition: Callable[[], object], supervisor: Supervisor) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert supervisor.process.poll() is None, supervisor.log.read_text()[-3000:]
        assert time.monotonic() < deadline, supervisor.log.read_text()[-3000:]
        time.sleep(0.1)


def workers(nodes: RayNodes, pod: str) -> dict[str, int]:
    return RunFolder(nodes.run_folder(pod)).workers()


def test_start_loss_of_a_worker_and_drain(nodes: RayNodes, supervisor: Supervisor) -> None:
    assert supervisor.answers("/health")
    running = workers(nodes, "pod-a")
    assert set(running) == {"pod-a-prefill-0", "pod-a-decode-0"}
    os.kill(running["pod-a-decode-0"], signal.SIGKILL)
    until(lambda: supervisor.answers("/ready", 503), supervisor)
    assert "decode" in supervisor.get("/ready").json()["reason"]
    assert supervisor.answers("/health")
    until(lambda: supervisor.answers("/ready"), supervisor)
    assert supervisor.metric('restarts_total{group="pod-supervisor",model="m",worker="decode-0"}') == 1
    assert series_of(supervisor.get("/metrics").text) == series_of(group_page())
    again = workers(nodes, "pod-a")
    assert again["pod-a-prefill-0"] == running["pod-a-prefill-0"]
    assert again["pod-a-decode-0"] != running["pod-a-decode-0"]
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(WITHIN_S) == 0
    assert workers(nodes, "pod-a") == {}


def test_a_supervisor_that_was_killed_is_followed_by_one_that_adopts(
    nodes: RayNodes, config: Path, supervisor: Supervisor, tmp_path: Path
) -> None:
    running = workers(nodes, "pod-a")
    supervisor.process.kill()
    supervisor.process.wait(WITHIN_S)
    with supervising(nodes, config, tmp_path / "second") as second:
        until(lambda: second.answers("/ready"), second)
        assert workers(nodes, "pod-a") == running
        assert second.log.read_text().count("worker_adopted") == 2


def test_no_secret_reaches_ray(nodes: RayNodes, config: Path, supervisor: Supervisor) -> None:
    """Neither what Ray logs and keeps in its folder, nor arguments and variables of any process."""
    password = (config.parent / "redis-url").read_text().split("@")[0].rpartition(":")[2]
    found = []
    files = [
        *nodes.folder.rglob("*"),
        *Path("/proc").glob("[0-9]*/cmdline"),
        *Path("/proc").glob("[0-9]*/environ"),
    ]
    for file in files:
        with contextlib.suppress(OSError):
            content = file.read_bytes() if file.is_file() else b""
            found += [file for secret in (SECRET, password) if secret.encode() in content]
    # RedisServer's own arguments have no password; nothing else may have it either.
    assert not found


def test_a_node_that_stops_gives_its_workers_to_another(nodes: RayNodes, supervisor: Supervisor) -> None:
    before = workers(nodes, "pod-a")
    stop = subprocess.run(
        (*BATON, "ray", "stop-workers", "--within", "30"),
        env=os.environ | {"BATON_RUN_DIR": str(nodes.run_folder("pod-a"))},
        timeout=WITHIN_S,
        check=False,
    )
    assert stop.returncode == 0
    assert before
    assert workers(nodes, "pod-a") == {}
    until(lambda: "worker_waits_for_room" in supervisor.log.read_text(), supervisor)
    assert workers(nodes, "pod-a") == {}
    nodes.start("127.0.0.4", "pod-b", {"baton-prefill": 1, "baton-decode": 1})
    until(lambda: supervisor.answers("/ready"), supervisor)
    assert set(workers(nodes, "pod-b")) == {"pod-b-prefill-0", "pod-b-decode-0"}


def test_the_workers_of_a_lost_node_serve_again_elsewhere(tmp_path: Path, redis: RedisServer) -> None:
    """Ray counts the node as alive for longer than that takes."""
    with ray_nodes() as own:
        own.start_head("pod-head", {"baton-none": 1})
        own.start("127.0.0.4", "pod-a", ROOM)
        config = written(tmp_path, own, redis)
        with supervising(own, config, tmp_path / "log") as supervisor:
            until(lambda: supervisor.answers("/ready"), supervisor)
            assert set(workers(own, "pod-a")) == {"pod-a-prefill-0", "pod-a-decode-0"}
            assert workers(own, "pod-head") == {}
            own.start("127.0.0.5", "pod-b", ROOM)
            own.freeze("127.0.0.4")
            until(lambda: "worker_hung" in supervisor.log.read_text(), supervisor)
            noticed = time.monotonic()
            until(lambda: supervisor.answers("/ready"), supervisor)
            assert time.monotonic() - noticed < AGAIN_S
            assert set(workers(own, "pod-b")) == {"pod-b-prefill-0", "pod-b-decode-0"}
            log = supervisor.log.read_text()
            assert [log.count(event) for event in ("worker_hung", "node_silent", "worker_exited")] == [
                2,
                1,
                2,
            ]
            assert "Traceback" not in log
            assert "action_failed" not in log


def test_workers_and_their_supervisor_outlive_a_head_that_others_wait_for(
    tmp_path: Path, redis: RedisServer
) -> None:
    """The setup is that of fault tolerance of Ray's control store. The start of a head beside running nodes
    needs another machine: `ray start --head` refuses where it finds processes of the same cluster."""
    with ray_nodes() as own:
        own.variables["RAY_gcs_rpc_server_reconnect_timeout_s"] = "600"
        own.start_head("pod-head", {})
        own.start("127.0.0.4", "pod-a", ROOM)
        config = written(tmp_path, own, redis)
        with supervising(own, config, tmp_path / "log") as supervisor:
            until(lambda: supervisor.answers("/ready"), supervisor)
            running = workers(own, "pod-a")
            own.kill(HEAD_HOST)
            time.sleep(10)
            assert supervisor.answers("/ready"), "workers do not need the head"
            assert workers(own, "pod-a") == running
            os.kill(running["pod-a-decode-0"], signal.SIGKILL)
            until(lambda: supervisor.answers("/ready", 503), supervisor)
            supervisor.process.send_signal(signal.SIGTERM)
            assert supervisor.process.wait(WITHIN_S) == 0
            assert workers(own, "pod-a") == {}


def test_a_head_without_fault_tolerance_ends_the_supervisor_whose_next_start_begins_anew(
    tmp_path: Path, redis: RedisServer
) -> None:
    with ray_nodes() as own:
        own.variables["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
        own.start_head("pod-head", {})
        own.start("127.0.0.4", "pod-a", ROOM)
        config = written(tmp_path, own, redis)
        with supervising(own, config, tmp_path / "log") as supervisor:
            until(lambda: supervisor.answers("/ready"), supervisor)
            own.kill(HEAD_HOST)
            assert supervisor.process.wait(WITHIN_S) == 1
            # Whichever notices first: Ray within this process, or the watch of its node.
            log = supervisor.log.read_text()
            assert "The program will terminate" in log or "baton: error: " in log
        own.kill("127.0.0.4")
        assert workers(own, "pod-a") == {}
        own.start_head("pod-head", {})
        own.start("127.0.0.4", "pod-a", ROOM)
        with supervising(own, config, tmp_path / "second") as supervisor:
            until(lambda: supervisor.answers("/ready"), supervisor)
            assert set(workers(own, "pod-a")) == {"pod-a-prefill-0", "pod-a-decode-0"}
