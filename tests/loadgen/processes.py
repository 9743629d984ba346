"""A fake server in a process of its own, and the loadgen command as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadgen.cli import main
from tests.loadgen.fake_server import Behaviour


@dataclass(frozen=True)
class Served:
    """Addresses of gRPC and HTTP, and where each server logs what it emitted once it has ended."""

    grpc: str
    http: str
    logs: tuple[Path, ...]

    def emitted(self) -> dict[str, list[float]]:
        """The times of each request's tokens, by request id."""
        return {line["id"]: line["emitted"] for line in self._lines()}

    def prompts(self) -> dict[str, int]:
        """The checksum of each request's prompt, by request id."""
        return {line["id"]: line["prompt"] for line in self._lines()}

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for log in self.logs for line in log.read_text().splitlines()]


Serve = Callable[[Behaviour], contextlib.AbstractContextManager[Served]]


@contextlib.contextmanager
def served(behaviour: Behaviour, folder: Path, count: int = 1, cpus: Sequence[int] = ()) -> Iterator[Served]:
    """Runs a server while its context lasts, or several that share their ports; logs go to `folder`. Each has
    one of `cpus` to itself, if there are any."""
    logs = tuple(folder / f"emitted-{number}.jsonl" for number in range(count))
    wanted = asdict(behaviour) | {"share_ports": count > 1}
    with contextlib.ExitStack() as running:
        urls: dict[str, str] = {}
        for number, log in enumerate(logs):
            cpu = cpus[number] if cpus else None
            ports = [int(url.rpartition(":")[2]) for url in urls.values()]
            own = {"log": str(log), "ports": ports or [0, 0], "cpu": cpu}
            urls = running.enter_context(_server(wanted | own))
        yield Served(urls["grpc"], urls["http"], logs)


@contextlib.contextmanager
def _server(wanted: dict[str, Any]) -> Iterator[dict[str, str]]:
    command = [sys.executable, "-m", "tests.loadgen.fake_server", json.dumps(wanted)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        urls: dict[str, str] = json.loads(process.stdout.readline())
        try:
            yield urls
        finally:
            process.communicate(timeout=60)


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        document: dict[str, Any] = json.loads(line)
        return document


# For what a test on a busy machine is not about: the generator may lag.
MAY_LAG = ("--max-lag-ms", "60000", "--max-read-lag-ms", "60000")


def loadgen(*arguments: str) -> Done:
    """Runs it to its end, in this process, which has loaded it; its generator has processes of its own."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Done(code, out.getvalue(), err.getvalue())


def loadgen_process(*arguments: str, timeout_s: float) -> Done:
    """The same in a process of its own, for programs that measure."""
    command = [sys.executable, "-m", "loadgen", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    return Done(done.returncode, done.stdout, done.stderr)
