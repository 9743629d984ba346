"""Calls for one GPU while a kernel of another runs: those that launch a step do not wait for it. Prints of
others whether they do. To be run with CUDA_MODULE_LOADING=EAGER, as `make prove-gpus` does."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from baton.device.cuda_runtime import cuda_runtime
from baton.device.cuda_source import CudaFunction, cached_source
from baton.device.peer_memory import enable_peer_access
from baton.engine.parallel.exchange_source import Constants
from tests.support.gpu_sleep import sleep_on_stream

pytestmark = pytest.mark.multigpu

# Of the GPU's clock, at up to 2 GHz: half a second and more.
CYCLES = 1_000_000_000
SIZE = 1 << 20


class Calls:
    """Calls that are made while the second GPU is the current one, by name; `launches`: those of a step."""

    def __init__(self) -> None:
        self.words = torch.zeros(SIZE, device="cuda:1")
        self.pinned = torch.ones(SIZE, pin_memory=True)
        self.x, self.out = (torch.zeros(256, 256, dtype=torch.bfloat16, device="cuda:1") for _ in range(2))
        self.stream = torch.cuda.Stream(1)  # type: ignore[no-untyped-call]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.words.add_(1)
        self.spare = cuda_runtime().allocate(SIZE)
        self.launches: dict[str, Callable[[], object]] = {
            "a kernel": lambda: self.words.add_(1),
            "a graph": self.graph.replay,
            "a product": self.multiply,
            "an event": self.record,
            "zeros": self.words.zero_,
            "a copy from the host": lambda: self.words.copy_(self.pinned, non_blocking=True),
        }
        self.others: dict[str, Callable[[], object]] = {
            "a product on a new stream": self.multiply_elsewhere,
            "cudaMalloc": lambda: cuda_runtime().allocate(SIZE),
            "cudaFree": lambda: cuda_runtime().call("cudaFree", self.spare),
            "pinned memory": lambda: torch.empty(64 * SIZE, pin_memory=True),
            "a module": load_module,
        }

    def multiply(self) -> None:
        torch.mm(self.x, self.x, out=self.out)

    def multiply_elsewhere(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream(1)):  # type: ignore[no-untyped-call]
            self.multiply()

    def record(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(self.stream)


def load_module() -> None:
    major, minor = torch.cuda.get_device_capability()
    code = cached_source(Constants(2, 4096, False, 512).source, f"sm_{major}{minor}")
    CudaFunction(code, "begin_step", 0)


def waits(call: Callable[[], object]) -> tuple[bool, float]:
    """Returns whether a call for the second GPU, and the work that it enqueues there, ends after a kernel
    that runs on the first, and the milliseconds until the call returned."""
    stream = torch.cuda.Stream(0)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        sleep_on_stream(CYCLES)
        slept = stream.record_event()
    with torch.cuda.device(1):
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
        torch.cuda.current_stream().synchronize()
    waited = bool(slept.query())
    slept.synchronize()
    return waited, took * 1e3


def test_a_launch_does_not_wait_for_another_gpu() -> None:
    enable_peer_access([0, 1])
    with torch.cuda.device(1):
        calls = Calls()
        for call in calls.launches.values():
            call()
        load_module()
    torch.cuda.synchronize(1)
    found = {name: waits(call) for name, call in (calls.launches | calls.others).items()}
    for name, (waited, ms) in found.items():
        print(f"\nPROOF {name}: {ms:.3f} ms beside another GPU's kernel, waits for it: {waited}")
    assert not any(found[name][0] for name in calls.launches)
