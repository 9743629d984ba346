"""Two workers of one name, each restarted whenever it ends, as service managers do: the newer one has the
name, the older one waits until that has ended, and says who has the name and where."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.support.cluster import CLUSTER_SECRET, START_S
from tests.e2e.support.redis_server import redis_server

# Codes after which the documentation has a worker restarted.
_RESTARTED = (1, 3, 4)
_QUIET_S = 20.0
_BATON = (sys.executable, "-m", "services.cli.main")
_PLACE = ("--redis-namespace", "one-name", "--host", "127.0.0.1")
_WORKER = ("worker", "--role", "decode", "--model", "demo", "--name", "d2-decode-0", *_PLACE)


class Service:
    """A command that is started again as a service manager does, after a second, until `stop`."""

    def __init__(self, log: Path, redis_url: str, command: Sequence[str]) -> None:
        self.log = log
        self._command = [*_BATON, *command]
        log.touch()
        self._environment = {
            **os.environ,
            "BATON_REDIS_URL": redis_url,
            "BATON_CLUSTER_SECRET": CLUSTER_SECRET,
            "OMP_NUM_THREADS": "1",
        }
        self.codes: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        # A process is killed when the thread that has started it ends; this one lives as long as the service.
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self.log.open("ab") as log:
            while not self._stopped.is_set():
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=log
                )
                self.codes.append(self._process.wait())
                if self.codes[-1] not in _RESTARTED:
                    return
                self._stopped.wait(1.0)

    def lines(self, event: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if f"event='{event}'" in line]

    def stop(self) -> None:
        self._stopped.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        self._thread.join(START_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def service(log: Path, redis_url: str, *command: str) -> Iterator[Service]:
    started = Service(log, redis_url, command)
    try:
        yield started
    finally:
        started.stop()


def until(service: Service, event: str, count: int) -> list[str]:
    """Waits until its log has the event so often."""
    deadline = time.monotonic() + START_S
    while len(lines := service.lines(event)) < count:
        assert time.monotonic() < deadline, service.log.read_text()[-4000:]
        time.sleep(0.05)
    return lines


def pauses(lines: Sequence[str]) -> list[float]:
    return [float(pause) for line in lines for pause in re.findall(r"retry_in_s=([\d.]+)", line)]


@pytest.fixture
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.mark.slow
def test_two_workers_of_one_name_do_not_take_turns(redis_url: str, tmp_path: Path) -> None:
    with service(tmp_path / "old", redis_url, *_WORKER) as old:
        until(old, "serving", 1)
        with service(tmp_path / "new", redis_url, *_WORKER) as new:
            (serving,) = until(new, "serving", 1)
            (address,) = re.findall(r"grpc='([^']+)'", serving)
            until(old, "name_taken", 1)
            assert address in old.lines("replaced_by_newer_incarnation")[0]
            time.sleep(_QUIET_S)
            # The old one has left with a code of its own, and neither has been started again for nothing.
            assert (old.codes, new.codes) == ([4], []), old.log.read_text()[-4000:]
            assert (len(old.lines("serving")), len(new.lines("serving"))) == (1, 1)
            taken = old.lines("name_taken")
            assert all(address in line for line in taken)
            assert len(taken) >= 3
            assert pauses(taken) == [2.0, 4.0, 8.0, 16.0][: len(taken)]
        # The other has ended: the name is free.
        until(old, "serving", 2)
        assert old.codes == [4, 3]


@pytest.mark.slow
def test_a_groups_worker_whose_name_another_one_has_waits(redis_url: str, tmp_path: Path) -> None:
    """The worker's supervisor starts it again, after pauses that double; each start ends before it serves."""
    config = tmp_path / "workers.yaml"
    (tmp_path / "secret").write_text(CLUSTER_SECRET)
    file = {"model": "demo", "cluster_secret_file": str(tmp_path / "secret"), "engine": {"device": "cpu"}}
    config.write_text(json.dumps({**file, "state": {"redis_url": redis_url, "namespace": "one-name"}}))
    group = ("worker", "group", "--prefill", "0", "--decode", "1", "--name", "d2", "--config", str(config))
    with service(tmp_path / "old", redis_url, *group, "--host", "127.0.0.1") as old:
        until(old, "serving", 1)
        with service(tmp_path / "new", redis_url, *_WORKER) as new:
            (serving,) = until(new, "serving", 1)
            (address,) = re.findall(r"grpc='([^']+)'", serving)
            until(old, "worker_start_failed", 3)
            failed = old.lines("worker_start_failed")
            assert pauses(failed) == [2.0, 4.0, 8.0]
            assert all(address in line for line in failed)
            assert (len(old.lines("serving")), len(new.lines("serving"))) == (1, 1)
        until(old, "serving", 2)
    assert old.codes == [0]
