"""A process on one GPU that executes NCCL commands, for `bench.nccl`.

It receives commands as lines of JSON over a socket and answers each with one line. The process that sends
them may kill, stop or abandon it at any time: nothing here outlives its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.base.parent_death import die_with_parent
from baton.device.nccl import Communicator, Nccl, NcclError, Result
from bench.nccl.beside import Calls, Steps, new_event, new_stream, passed

_MB = 1 << 20
_POLL_S = 20e-6
# Sizes of a hoard's allocations, largest first; what remains is too small for any NCCL buffer.
_HOARD_PAGES = (2048 * _MB, 64 * _MB, 12 * _MB)
_HOARD_LEAVES = 200 * _MB


def _end(link: Communicator, how: str) -> None:
    """Aborts or revokes it."""
    if how == "revoke":
        link.call("ncclCommRevoke", 0)
    else:
        link.abort()


def serve(device: int, channel: socket.socket, log: Path) -> None:
    """The process's main loop: answers commands until the connection closes."""
    die_with_parent()
    os.environ["NCCL_DEBUG_FILE"] = str(log)
    end = End(device, log)
    lines = channel.makefile("rw")
    for line in lines:
        command = json.loads(line)
        try:
            answer = getattr(end, "do_" + command.pop("do"))(**command)
        except Exception as error:  # the next question may still have an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=lines, flush=True)


class End:
    """A GPU, communicators by name with a stream each, and buffers by name."""

    def __init__(self, device: int, log: Path) -> None:
        torch.cuda.set_device(device)
        # Loaded in advance: loading blocks behind a waiting kernel, and `do_end_two` measures launches alone.
        torch.zeros(1 << 20, device="cuda").add_(1).sum().item()
        self._log = log
        self._nccl = Nccl()
        self._links: dict[str, Communicator] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._begins: dict[str, torch.cuda.Event] = {}
        self._events: dict[str, torch.cuda.Event] = {}
        self._buffers: dict[str, Tensor] = {}
        self._side = new_stream()
        self._hoard: list[Tensor] = []
        self._steps: Steps | None = None
        self._calls: Calls | None = None
        self._device = device

    def do_unique_id(self) -> dict[str, Any]:
        return {"id": self._nccl.unique_id().hex(), "version": self._nccl.version}

    def do_connect(self, name: str, id: str, rank: int, ctas: int, blocking: bool = False) -> dict[str, Any]:
        """Creates the communicator; its cost."""
        free, begun = self._free_mb(), time.perf_counter()
        link = self._nccl.communicator(bytes.fromhex(id), rank, 2, max_ctas=ctas, blocking=blocking)
        self._links[name] = link
        self._streams[name] = new_stream()
        state = self._wait_ready(link, 20)
        return {
            "state": state.name,
            "created_s": round(time.perf_counter() - begun, 4),
            "memory_mb": round(free - self._free_mb(), 1),
        }

    def do_buffer(self, name: str, mb: int, value: int) -> dict[str, Any]:
        """Allocates or refills a buffer, without waiting for other work on the device."""
        with torch.cuda.stream(self._side):
            if name not in self._buffers or self._buffers[name].numel() != mb * _MB:
                self._buffers[name] = torch.empty(mb * _MB, dtype=torch.uint8, device="cuda")
            self._buffers[name].fill_(value)
        return {"filled": self._quiet(self._side, 5)}

    def do_register(self, name: str, buffer: str) -> dict[str, Any]:
        """Lets the peer's kernels write this buffer directly."""
        memory = self._buffers[buffer]
        address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
        self._links[name].call("ncclCommRegister", address, size, ctypes.byref(ctypes.c_void_p()))
        return {}

    def do_send(self, name: str, buffer: str, mb: int, times: int = 1) -> dict[str, Any]:
        return self._move(self._links[name].send, name, buffer, mb, times, peer=1)

    def do_receive(self, name: str, buffer: str, mb: int, times: int = 1) -> dict[str, Any]:
        return self._move(self._links[name].receive, name, buffer, mb, times, peer=0)

    def do_wait(self, name: str, within: float) -> dict[str, Any]:
        """Whether the work enqueued last has finished, and the communicator's state."""
        begun = time.perf_counter()
        ended, error = self._ended(name, within)
        try:
            state = self._links[name].state().name
        except NcclError as failed:
            state = str(failed)
        return {
            "ended": ended,
            "after_s": round(time.perf_counter() - begun, 5),
            "cuda_error": error,
            "state": state,
        }

    def do_end(self, name: str, how: str, within: float) -> dict[str, Any]:
        """Aborts or revokes in a thread, and polls the stream meanwhile."""
        link, failed = self._links[name], []

        def call() -> None:
            try:
                _end(link, how)
            except NcclError as error:
                failed.append(str(error))

        thread = threading.Thread(target=call, daemon=True)
        free, begun = self._free_mb(), time.perf_counter()
        thread.start()
        ended, error = self._ended(name, within)
        ended_s = time.perf_counter() - begun
        thread.join(max(0.0, within - ended_s))
        returned_s = time.perf_counter() - begun
        answer = {
            "returned": not thread.is_alive(),
            "returned_s": round(returned_s, 5),
            "stream_ended": ended,
            "stream_ended_s": round(ended_s, 5),
            "cuda_error": error,
            "failed": failed,
        }
        time.sleep(0.2)
        return answer | {"freed_mb": round(self._free_mb() - free, 1)}

    def do_end_two(self, first: str, second: str, how: str, later_s: float) -> dict[str, Any]:
        """Aborts two links whose kernels wait for lost peers, each in a thread, the second `later_s` after
        the first; and the longest time of a kernel launch meanwhile."""
        ended: dict[str, float] = {}
        begun = time.perf_counter()

        def end(name: str, after_s: float) -> None:
            time.sleep(after_s)
            _end(self._links[name], how)
            ended[name] = round(time.perf_counter() - begun, 4)

        for name, after_s in ((first, 0.0), (second, later_s)):
            threading.Thread(target=end, args=(name, after_s), daemon=True).start()
        one = torch.zeros(1, device="cuda")
        longest, launches = 0.0, 0
        with torch.cuda.stream(self._side):
            while len(ended) < 2 and time.perf_counter() - begun < later_s + 5.0:
                at = time.perf_counter()
                one.add_(1)
                longest, launches = max(longest, time.perf_counter() - at), launches + 1
                time.sleep(0.001)
        return {"ended_s": ended, "launches": launches, "longest_launch_s": round(longest, 4)}

    def do_fill(self, buffer: str, value: int) -> dict[str, Any]:
        with torch.cuda.stream(self._side):
            self._buffers[buffer].fill_(value)
        return {"filled": self._quiet(self._side, 5)}

    def do_count(self, buffer: str, value: int) -> dict[str, Any]:
        """How many bytes of the buffer differ from `value`, and the first one's value; in parts that fit
        into what a hoard leaves free."""
        wrong = 0
        first = -1
        with torch.cuda.stream(self._side):
            for part in torch.split(self._buffers[buffer], 8 * _MB):
                other = part != value
                count = int(other.sum())
                if count and first < 0:
                    first = int(part[other.to(torch.uint8).argmax()])
                wrong += count
        return {"other_bytes": wrong, "first_other": first}

    def do_hoard(self, value: int) -> dict[str, Any]:
        """Allocates and fills all free memory of this GPU, so that stray writes can be detected."""
        begun = time.perf_counter()
        torch.cuda.empty_cache()
        for size in _HOARD_PAGES:
            while torch.cuda.mem_get_info()[0] > size + _HOARD_LEAVES:
                try:
                    self._hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        with torch.cuda.stream(self._side):
            for page in self._hoard:
                page.fill_(value)
        filled = self._quiet(self._side, 10)
        total = sum(page.numel() for page in self._hoard)
        return {
            "hoard_gb": round(total / 1e9, 1),
            "filled": filled,
            "took_s": round(time.perf_counter() - begun, 2),
        }

    def do_spoil(self) -> dict[str, Any]:
        """Changes one byte of the hoard, to prove that the check detects it."""
        self._hoard[-1][12345] ^= 0xFF
        return {}

    def do_check_hoard(self, value: int) -> dict[str, Any]:
        """How many allocations of the hoard have changed."""
        changed = 0
        with torch.cuda.stream(self._side):
            for page in self._hoard:
                low, high = torch.aminmax(page)
                changed += int(low) != value or int(high) != value
        return {"pages": len(self._hoard), "changed_pages": changed}

    def do_drop_hoard(self) -> dict[str, Any]:
        self._hoard.clear()
        torch.cuda.empty_cache()
        return {"free_mb": self._free_mb()}

    def do_usable(self) -> dict[str, Any]:
        """Whether this process can still allocate, compute and read back."""
        begun = time.perf_counter()
        stream = new_stream()
        with torch.cuda.stream(stream):
            a = torch.randn(1024, 1024, device="cuda")
            product = a @ a.T
        if not self._quiet(stream, 3):
            return {"usable": False}
        right = bool(torch.allclose(product.cpu(), (a.cpu() @ a.cpu().T), atol=1e-1, rtol=1e-2))
        return {"usable": right, "took_s": round(time.perf_counter() - begun, 4)}

    def do_steps(self, replays: int) -> dict[str, Any]:
        """The time of a decode-like graph while other work runs here."""
        if self._steps is None:
            self._steps = Steps()
        return self._steps.measure(replays)

    def do_begin_steps(self) -> dict[str, Any]:
        if self._steps is None:
            self._steps = Steps()
        self._steps.begin()
        return {}

    def do_end_steps(self) -> dict[str, Any]:
        assert self._steps is not None, "begun before"
        return self._steps.end()

    def do_prepare_calls(self) -> dict[str, Any]:
        self._calls = Calls(self._device)
        return {}

    def do_calls_that_wait(self, name: str, first: int) -> dict[str, Any]:
        """Which CUDA calls block behind the kernel on the link's stream, from the `first` on."""
        assert self._calls is not None, "prepared before there is a kernel to wait for"
        running = not passed(self._events[name])
        return {"kernel_ran": running, "calls": self._calls.make(first, 1.0)}

    def do_paths(self) -> dict[str, Any]:
        """How NCCL reports that it reaches the peer, and its warnings."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        warnings = [line.partition(" WARN ")[2] for line in lines if " WARN " in line]
        return {
            "via": sorted({line.partition(" via ")[2] for line in lines if " via " in line}),
            "warnings": warnings[:3],
        }

    def do_free(self) -> dict[str, Any]:
        return {"free_mb": self._free_mb()}

    # ---------------------------------------------------------------------------------------------

    def _move(
        self,
        call: Callable[[int, int, int, int], None],
        name: str,
        buffer: str,
        mb: int,
        times: int,
        peer: int,
    ) -> dict[str, Any]:
        """Enqueues and returns; `enqueue_us`: until NCCL has passed the last one to CUDA."""
        stream, link = self._streams[name], self._links[name]
        begin, self._events[name] = new_event(), new_event()
        begin.record(stream)
        host = []
        for _ in range(times):
            begun = time.perf_counter()
            call(self._buffers[buffer].data_ptr(), mb * _MB, peer, stream.cuda_stream)
            state = self._wait_ready(link, 5)
            host.append(time.perf_counter() - begun)
        self._events[name].record(stream)
        self._begins[name] = begin
        return {"state": state.name, "enqueue_us": round(1e6 * sorted(host)[len(host) // 2], 1)}

    def do_elapsed(self, name: str, within: float) -> dict[str, Any]:
        """The device time in ms of the work enqueued last."""
        ended, error = self._ended(name, within)
        ms = self._begins[name].elapsed_time(self._events[name]) if ended and error is None else None
        return {"ended": ended, "ms": ms, "cuda_error": error}

    def _ended(self, name: str, timeout: float) -> tuple[bool, str | None]:
        deadline = time.perf_counter() + timeout
        try:
            while not passed(self._events[name]):
                if time.perf_counter() > deadline:
                    return False, None
                time.sleep(_POLL_S)
        except RuntimeError as error:
            return True, str(error).splitlines()[0]
        return True, None

    def _quiet(self, stream: torch.cuda.Stream, timeout: float) -> bool:
        deadline = time.perf_counter() + timeout
        while not stream.query():
            if time.perf_counter() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _wait_ready(self, link: Communicator, timeout: float) -> Result:
        """Polls without a pause at first, since NCCL's time is measured."""
        begun = time.perf_counter()
        while (state := link.state()) is Result.IN_PROGRESS and time.perf_counter() < begun + timeout:
            time.sleep(0 if time.perf_counter() < begun + 1e-3 else _POLL_S)
        return state

    def _free_mb(self) -> float:
        return torch.cuda.mem_get_info()[0] / 1e6
