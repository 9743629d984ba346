"""Processes of `pytest -n` that are forks of the one that hands out tests and has imported them: each would
take seconds to import them otherwise."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO
from execnet.xspec import XSpec

# Importing them starts threads, which a fork would be without. Each process imports them for itself.
START_THREADS = ("helm_python", "pyarrow")


def import_tests(modules: Sequence[str]) -> None:
    """Imports tests before the forks. A module that fails is imported again by each process, and reported."""
    apart = [name for name in START_THREADS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(apart))  # type: ignore[arg-type]  # importing them fails
    for name in modules:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)
    for name in apart:
        del sys.modules[name]


def fork_processes(count: int) -> None:
    """Forks processes, which execnet takes in place of the first `count` that it would start."""
    ready: list[ForkedProcess] = []
    for _ in range(count):
        ready.append(ForkedProcess(ready))
    start = gateway_io.create_io

    def create_io(spec: XSpec, execmodel: ExecModel) -> Popen2IO:
        return ready.pop(0).begin(execmodel) if ready and spec.popen else start(spec, execmodel)

    gateway_io.create_io = create_io  # type: ignore[assignment]


class ForkedProcess(Popen2IO):
    """A fork, with pipes to its standard input and from its standard output."""

    def __init__(self, earlier: Sequence[ForkedProcess]) -> None:
        its_input, self.to_it = os.pipe()
        self.from_it, its_output = os.pipe()
        of_others = [end for other in (*earlier, self) for end in (other.to_it, other.from_it)]
        self.process = multiprocessing.get_context("fork").Process(
            target=serve, args=(its_input, its_output, of_others)
        )
        with warnings.catch_warnings():
            # Threads of OpenBLAS, which starts them anew in a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        os.close(its_input)
        os.close(its_output)

    def begin(self, execmodel: ExecModel) -> ForkedProcess:
        """Opens the pipes for execnet."""
        super().__init__(os.fdopen(self.to_it, "wb"), os.fdopen(self.from_it, "rb"), execmodel)
        return self

    def wait(self) -> int | None:
        """Waits for the process's end; its exit code."""
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def serve(its_input: int, its_output: int, of_others: Sequence[int]) -> None:
    """Runs what execnet sends, as a Python that execnet starts does."""
    for end in of_others:
        os.close(end)
    os.dup2(its_input, 0)
    os.dup2(its_output, 1)
    os.close(its_input)
    os.close(its_output)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})
