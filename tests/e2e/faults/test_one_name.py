"""Two workers of one name, each restarted whenever it ends, as service managers do: the newer one has the
name, the older one waits until that has ended, and says who has the name and where."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.support.cluster import CLUSTER_SECRET, START_S
from tests.e2e.support.redis_server import redis_server

# Codes after which the documentation has a worker restarted.
_RESTARTED = (1, 3, 4)
_QUIET_S = 20.0
_COMMAND = (sys.executable, "-m", "baton.cli.main", "worker", "--role", "decode", "--model", "demo")


class Service:
    """A worker `d2` that is started again as a service manager does, after a second, until `stop`."""

    def __init__(self, log: Path, redis_url: str) -> None:
        self._log = log
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
        with self._log.open("ab") as log:
            while not self._stopped.is_set():
                command = [*_COMMAND, "--name", "d2", "--redis-namespace", "one-name", "--host", "127.0.0.1"]
                self._process = subprocess.Popen(
                    command, env=self._environment, stdout=subprocess.DEVNULL, stderr=log
                )
                self.codes.append(self._process.wait())
                if self.codes[-1] not in _RESTARTED:
                    return
                self._stopped.wait(1.0)

    def lines(self, event: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if f"event='{event}'" in line]

    def stop(self) -> None:
        self._stopped.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        self._thread.join(START_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def service(log: Path, redis_url: str) -> Iterator[Service]:
    started = Service(log, redis_url)
    try:
        yield started
    finally:
        started.stop()


def until(true: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + START_S
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


@pytest.mark.slow
def test_two_workers_of_one_name_do_not_take_turns(tmp_path: Path) -> None:
    with redis_server() as redis, service(tmp_path / "old", redis.url) as old:
        until(lambda: len(old.lines("serving")) == 1, (tmp_path / "old").read_text)
        with service(tmp_path / "new", redis.url) as new:
            until(lambda: len(new.lines("serving")) == 1, (tmp_path / "new").read_text)
            (serving,) = new.lines("serving")
            (address,) = re.findall(r"grpc='([^']+)'", serving)
            until(lambda: bool(old.lines("name_taken")), (tmp_path / "old").read_text)
            assert address in old.lines("replaced_by_newer_incarnation")[0]
            time.sleep(_QUIET_S)
            # The old one has left with a code of its own, and neither has been started again for nothing.
            assert (old.codes, new.codes) == ([4], []), (tmp_path / "old").read_text()[-4000:]
            assert (len(old.lines("serving")), len(new.lines("serving"))) == (1, 1)
            taken = old.lines("name_taken")
            assert all(address in line for line in taken)
            pauses = [float(pause) for line in taken for pause in re.findall(r"retry_in_s=([\d.]+)", line)]
            assert pauses == [2.0, 4.0, 8.0, 16.0][: len(pauses)]
            assert len(pauses) >= 3
        # The other has ended: the name is free.
        until(lambda: len(old.lines("serving")) == 2, (tmp_path / "old").read_text)
        assert old.codes == [4, 3]
