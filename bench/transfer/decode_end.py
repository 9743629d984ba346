"""The receiving process of `bench.transfer --decode`: a decode engine, and a receiver into its own
KV cache.

    python -m bench.transfer.decode_end SETTING      `Setting` as JSON

Writes {"endpoints"}, then answers each line of stdin, until that closes:

    {"steps": n, "arrivals": b}   a window: activates a new batch, decodes until it is full and warm, writes
                                  {"begun"}; n steps later the window's figures
    {"digest"}                    of all bytes of the transfer that ended last, and which that was

Transfers are expected always, except in windows without arrivals. One loop turns both as a worker's engine
does: links, a decode step, and a wait where neither had anything to do.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.base.parent_death import die_with_parent
from baton.base.process_tuning import keep_freed_memory, sharpen_timers
from baton.device.nvidia_libraries import ENVIRONMENT
from baton.device.wakeup import Wakeup
from bench.case import BLOCK_TOKENS, SPARE, DecodeCase, EngineSize
from bench.decode.clocks import BEGUN, ENDED, ROWS
from bench.shapes import Precision
from bench.transfer.ends import nccl_links_for, receiver_of
from kvtransfer.receiver.events import Committed, Withdrawn
from kvtransfer.transports.listen_config import ListenConfig

if TYPE_CHECKING:
    from baton.device.streams.link_device import LinkDevice
    from baton.engine.memory.kv_cache import KVCache
    from bench.decode.engine import DecodeEngine, StepLines
    from kvtransfer.device.blocks import DeviceSink

# Transfers expected at once, which bounds those in flight; each has its own blocks, and so do as many that
# have ended.
EXPECTED = 4
_SETS = 2 * EXPECTED
# Warm-up steps with the full batch before a window.
_WARM = 32
# As an engine's (services/worker/engine/process.py).
_PIECES_A_TURN = 16
_PIECES_BETWEEN_LAYERS = 1
_IDLE_S = 0.05
_RING_FULL_S = 0.001
_POLL_SOON_S = 0.00002
WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Setting:
    """`device`: cpu or cuda:N. `steps`: those of the longest window."""

    shape: str
    dtype: str
    batch: int
    context: int
    steps: int
    transport: str
    device: str

    @property
    def case(self) -> DecodeCase:
        return DecodeCase(self.shape, Precision(self.dtype), self.batch, self.context, "greedy", "fast")

    @property
    def blocks(self) -> int:
        """Blocks of one transfer: the KV of one sequence's prompt."""
        return -(-self.context // BLOCK_TOKENS)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.case.token_bytes

    @property
    def size(self) -> EngineSize:
        """Sequences are admitted over several steps, and two steps are queued after a window's last."""
        output = _WARM + self.steps + 2 * SPARE
        return EngineSize(self.batch, self.context + output + 1, _SETS * self.blocks)


class SpareBlocks:
    """Unused blocks of the engine's KV cache, in random order, in sets of as many as a transfer has; a set
    keeps its contents until all others have been used again."""

    def __init__(self, cache: KVCache, spare: tuple[int, ...], blocks: int) -> None:
        """`spare`: unused blocks of the cache's only group. ValueError where it has several."""
        if len(cache.groups) != 1:
            raise ValueError(f"a cache of {len(cache.groups)} groups")
        places = random.Random(1).sample(spare, len(spare))
        self._cache = cache
        self._free = deque(places[at : at + blocks] for at in range(0, len(places), blocks))
        self._places: dict[int, list[int]] = {}
        self._last: list[int] = []
        # The last complete transfer.
        self.last = 0

    def take(self, transfer: int) -> None:
        """Assigns the least recently used set to a transfer."""
        self._places[transfer] = self._free.popleft()

    def give_back(self, transfer: int, *, whole: bool) -> None:
        """Returns the set of a transfer that has ended; `whole`: with all its bytes."""
        places = self._places.pop(transfer)
        self._free.append(places)
        if whole:
            self.last, self._last = transfer, places

    def place(self, transfer_id: int, group: int, ordinal: int) -> int:
        return self._places[transfer_id][ordinal]

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        self._cache.write_block(group, self.place(transfer_id, group, ordinal), offset, data)

    def digest(self) -> str:
        """The digest of all bytes of `last`."""
        size = self._cache.layout.groups[0].block_bytes
        found = hashlib.sha256()
        for place in self._last:
            found.update(self._cache.read_block(0, place, 0, size))
        return found.hexdigest()


class DecodingEnd:
    """The engine and its receiver. All calls come from one thread."""

    def __init__(
        self, setting: Setting, engine: DecodeEngine, device: LinkDevice | None, wait: Callable[[float], Any]
    ) -> None:
        """`device`: of the KV cache, where transfers may be written. `wait` is called with the longest time
        in s that an idle iteration may wait."""
        self.setting = setting
        self.engine = engine
        self.wakeup = Wakeup()
        self._wait = wait
        (spare,) = engine.model.pools.allocate(_SETS * setting.blocks * BLOCK_TOKENS)
        self._spare = SpareBlocks(engine.model.cache.ranks[0], spare, setting.blocks)
        sink = self._device_sink(device)
        self.receiver = receiver_of(self._spare, setting.block_bytes, self.wakeup.set, sink)
        nccl = nccl_links_for(setting.transport, None if sink is None else sink.blocks)
        listening = self.receiver.listen(ListenConfig("127.0.0.1", transport=setting.transport, nccl=nccl))
        self.endpoints = [(one.transport, one.address) for one in listening]
        self._expected: set[int] = set()
        self._next = 1
        self._lines: StepLines | None = None

    def _device_sink(self, device: LinkDevice | None) -> DeviceSink | None:
        from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
        from kvtransfer.device.movers import warm

        if device is None:
            return None
        blocks = DeviceBlocks(device, self.engine.model.cache.ranks[0].storage)
        if device.tensors_on.type == "cuda":
            warm(blocks)
        return DeviceSink(blocks, self._spare.place, steps_run=lambda: self.engine.loop.has_work)

    def turn(self) -> None:
        """One iteration: polls the links, runs a step, and waits where there was neither. RuntimeError where
        a transfer fails."""
        self.wakeup.clear()
        events = self.receiver.poll(_PIECES_A_TURN)
        for event in events:
            if isinstance(event, Withdrawn):
                raise RuntimeError(f"transfer {event.transfer_id} failed: {event.message}")
            if isinstance(event, Committed):
                self._take(event.transfer_id)
        begun = time.monotonic_ns()
        stepped = self.engine.advance(self._between_layers)
        if self._lines is not None:
            self._lines.turned(begun)
        if not (events or stepped):
            self._wait(self._poll_s())

    def _between_layers(self) -> None:
        """Receives pieces between the layers of a step that the host computes; a device's own steps are never
        interrupted."""
        self.receiver.progress(_PIECES_BETWEEN_LAYERS)

    def _poll_s(self) -> float:
        if self.receiver.busy_poll:
            return 0.0
        if self.receiver.poll_soon:
            return _POLL_SOON_S
        return _RING_FULL_S if self.engine.loop.has_work else _IDLE_S

    def _take(self, transfer: int) -> None:
        """A transfer is complete; another is expected before it is acknowledged."""
        self._expected.remove(transfer)
        self._spare.give_back(transfer, whole=True)
        self._expect_one()
        self.receiver.transfers.acknowledge(transfer)

    def _expect_one(self) -> None:
        self._spare.take(self._next)
        self.receiver.transfers.expect(self._next, [self.setting.blocks])
        self._expected.add(self._next)
        self._next += 1

    def expect(self, arrivals: bool) -> None:
        """Starts or stops expecting transfers. Numbers of expected transfers that have not begun are kept for
        later."""
        while arrivals and len(self._expected) < EXPECTED:
            self._expect_one()
        while not arrivals and self._expected:
            self._next -= 1
            self._expected.remove(self._next)
            self.receiver.transfers.forget(self._next)
            self._spare.give_back(self._next, whole=False)

    def digest(self) -> dict[str, Any]:
        return {"transfer": self._spare.last, "digest": self._spare.digest()}

    def window(self, steps: int, begun: Callable[[], None]) -> dict[str, Any]:
        """Runs one window; `begun` is called when the batch is full and warmed up. The figures of the steps
        and transfers."""
        from bench.decode.engine import StepLines

        engine, batch = self.engine, self.setting.batch
        self._lines = StepLines(engine)
        for index in range(batch):
            engine.admit(self.setting.case, index, engine.size.tokens - self.setting.context)
        warm = engine.loop.tokens_decoded + batch * _WARM
        self._turn_until(lambda: engine.loop.tokens_decoded >= warm)
        first, counters = engine.ended_steps, self.receiver.counters
        transfers, received, at = counters.transfers_committed, counters.bytes_received, time.monotonic()
        begun()
        self._turn_until(lambda: engine.ended_steps >= first + steps)
        found = {
            "seconds": time.monotonic() - at,
            "transfers": counters.transfers_committed - transfers,
            "bytes": counters.bytes_received - received,
            "on_device": self.receiver.poll_soon,
            "clock": self._lines.clock,
        }
        engine.empty()
        lines, self._lines = self._lines.of(first, steps), None
        rows = sorted(set(lines[:, ROWS].tolist()))
        if len(lines) != steps or rows != [batch]:
            raise RuntimeError(f"{len(lines)} steps of {rows} rows, not {steps} of {batch}")
        gaps = lines[1:, BEGUN] - lines[:-1, ENDED]
        return {**found, "step_ns": np.diff(lines[:, ENDED]).tolist(), "gap_ns": gaps.tolist()}

    def _turn_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WINDOW_S
        while not done():
            self.turn()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {WINDOW_S:g} s")

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


def engine_of(setting: Setting) -> DecodeEngine:
    """An engine whose front is a process of its own. SystemExit where the GPU has too little memory."""
    import torch

    from bench.decode.engine import DecodeEngine
    from bench.decode.front import Front

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if setting.device != "cpu":
        torch.cuda.set_device(torch.device(setting.device))
        lacking = setting.size.lacking(setting.case, torch.cuda.mem_get_info()[0])
        if lacking is not None:
            sys.exit(f"bench.transfer.__main__: {lacking}")
    engine = DecodeEngine(setting.case, setting.size, Front, device=setting.device)
    engine.first_token(setting.case)
    return engine


def link_device_of(setting: Setting) -> LinkDevice | None:
    """The device that transfers are written to; None where bytes come through the host."""
    if setting.device == "cpu" or setting.transport == "grpc":
        return None
    import torch

    from baton.device.streams.cuda_link_device import CudaLinkDevice

    return CudaLinkDevice(torch.device(setting.device))


def main() -> None:
    die_with_parent()
    os.environ.update(ENVIRONMENT)  # as an engine is started
    keep_freed_memory()
    sharpen_timers()
    setting = Setting(**json.loads(sys.argv[1]))
    selector = selectors.SelectSelector()  # as an engine's: epoll's waits are whole milliseconds
    end = DecodingEnd(setting, engine_of(setting), link_device_of(setting), selector.select)
    selector.register(end.wakeup, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    gc.collect()
    gc.freeze()  # as an engine does: a look at all that was loaded would hold up the steps
    end.expect(True)
    _report({"endpoints": end.endpoints})
    while _answer(end, selector):
        end.turn()
    end.close()


def _answer(end: DecodingEnd, selector: selectors.BaseSelector) -> bool:
    """Answers a request, if there is one; False once stdin is closed."""
    if sys.stdin not in [key.fileobj for key, _ in selector.select(0)]:
        return True
    line = sys.stdin.readline()
    if not line:
        return False
    question = json.loads(line)
    if "digest" in question:
        _report(end.digest())
        return True
    end.expect(question["arrivals"])
    figures = end.window(question["steps"], lambda: _report({"begun": True}))
    end.expect(True)
    _report(figures)
    return True


def _report(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
