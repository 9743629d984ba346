"""Devices of a worker that run the exchange's kernels on the host, as the seed says."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory
from baton.engine.parallel.exchange_layout import Argument
from baton.engine.parallel.exchange_source import Constants
from tests.support.host_kernels import host_library

_HOST = Path(__file__).with_name("ranks.cpp")
_KERNELS = (
    "begin_step", "reduce_rows", "end_step", "write_pattern", "check_pattern", "embed", "multiply", "finish",
)  # fmt: skip
THREADS = 8
"""Threads of every block."""
NEVER = -1
Edit = tuple[str, str]
"""A piece of the kernels' source, and what stands there in its place."""


class Work(ctypes.Structure):
    """Argument of the kernels between the nodes, which `ranks.cpp` has."""

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("part", ctypes.c_uint64),
        ("whole", ctypes.c_uint64),
        ("published", ctypes.c_uint64),
        ("number", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_int),
        ("kernel", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("arguments", ctypes.c_char_p),
    )


class Hold(ctypes.Structure):
    """Keeps a rank from going on for `ns`, or `NEVER` lets it: before it starts its launch `at`, or, with
    `within`, when it is to run for the `at`th time."""

    _fields_ = (
        ("rank", ctypes.c_int),
        ("within", ctypes.c_int),
        ("at", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


@dataclass
class HostWorker:
    """Some devices. What is launched on them runs in `run`; `synchronize` runs what is left.

    `residency`: blocks of a device that run at a time. `early`: a launch may start as soon as the one before
    lets it. `edits`: of the kernels' source.
    """

    ranks: int
    seed: int = 0
    residency: int = 2
    early: bool = True
    edits: tuple[Edit, ...] = ()
    jump_ns: int = 500_000_000
    clock_ns: int = 10**9
    devices: list[HostDevice] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = [HostDevice(self, rank) for rank in range(self.ranks)]
        self._launches: list[_Launch] = []
        self._arguments: list[bytes] = []
        self._constants: Constants | None = None

    def add(
        self, rank: int, constants: Constants | None, kernel: str, blocks: int, arguments: Sequence[object]
    ) -> None:
        """Enqueues a launch; one run has sums of one kind."""
        if constants is not None and (self._constants is None or kernel == "reduce_rows"):
            self._constants = constants
        raw = b"".join(bytes(one) for one in arguments)  # type: ignore[call-overload]
        # A null byte in it does not end it: ctypes passes the address.
        self._arguments.append(raw)
        self._launches.append(_Launch(rank, _KERNELS.index(kernel), blocks, THREADS, raw))

    def place(self, rank: int) -> torch.device:
        """The device of a rank's tensors."""
        return torch.device("cpu")

    def run(self, holds: Sequence[Hold] = ()) -> int:
        """Runs all launches; returns how many did not end, of ranks that are held for ever or wait so."""
        if not self._launches:
            return 0
        assert self._constants is not None
        clock = ctypes.c_long(self.clock_ns)
        left = _library(self._constants, self.edits)(
            (_Launch * len(self._launches))(*self._launches), len(self._launches),
            (Hold * len(holds))(*holds), len(holds), self.ranks, ctypes.c_ulong(self.seed), self.residency,
            self.early, ctypes.c_long(THREADS * self.residency * self.ranks * 8),
            ctypes.c_long(self.jump_ns), ctypes.byref(clock),
        )  # fmt: skip
        self.clock_ns = clock.value
        self.seed += 1
        self._launches, self._arguments = [], []
        return left


class HostDevice:
    """A `RankDevice` on the host."""

    threads: int | None = THREADS

    def __init__(self, worker: HostWorker, rank: int) -> None:
        self._worker, self._rank = worker, rank
        self.memory: list[Tensor] = []
        """All that was allocated, the arena first."""

    def allocate(self, size: int) -> Tensor:
        self.memory.append(torch.zeros(size, dtype=torch.uint8))
        return self.memory[-1]

    def map_host(self, memory: SharedMemory) -> int:
        return int(memory.bytes.ctypes.data)

    def launch(
        self, constants: Constants, kernel: str, blocks: int, threads: int, arguments: Sequence[Argument]
    ) -> None:
        # Few blocks show as much as many, but for sums, of which each adds up a row.
        blocks = blocks if kernel == "reduce_rows" else min(blocks, 3)
        self._worker.add(self._rank, constants, kernel, blocks, arguments)

    def synchronize(self) -> None:
        assert self._worker.run() == 0


@cache
def _library(constants: Constants, edits: tuple[Edit, ...]) -> Callable[..., int]:
    source = replace(constants, threads=THREADS).source
    for find, replacement in edits:
        assert source.count(find) == 1, find
        source = source.replace(find, replacement)
    with tempfile.TemporaryDirectory(prefix="baton-exchange-") as name:
        run: Callable[..., int] = host_library(source, _HOST, Path(name)).run
    run.restype = ctypes.c_long  # type: ignore[attr-defined]
    return run
