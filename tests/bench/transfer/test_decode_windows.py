"""`bench.transfer --decode` on a CPU with a tiny model: transfers, accounting, and what is reported of
them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

import bench.transfer.devices
from baton.base.errors import BatonError
from bench.decode.clocks import ClockReader
from bench.decode.engine import DecodeEngine, StepLines
from bench.transfer.decode_end import EXPECTED, DecodingEnd, Setting, engine_of
from bench.transfer.decode_windows import (
    ALONE,
    KINDS,
    PACED,
    SATURATING,
    Sending,
    TransferWindow,
    due,
    summary_of,
)
from bench.transfer.sending import SendingEnd
from kvtransfer.device.blocks import DeviceBlocks
from tests.bench.decode.test_clocks import Ring
from tests.kvtransfer.support.device_rigs import FakeRig

ROOT = Path(__file__).parents[3]
STEPS = 12


@pytest.mark.slow
def test_as_a_program() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "bench.transfer", "--transport", "grpc", "--decode", "2",
            "--shape", "tiny", "--steps", str(STEPS), "--rounds", "2", "--output-len", "3", "--json",
        ],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case["window"] for case in cases] == list(KINDS)
    for case in cases:
        assert (case["batch"], case["transport"], case["clock"]) == (2, "grpc", "host")
        assert case["steps"] == 2 * STEPS
        assert 0 < case["step_ms_p50"] <= case["step_ms_p99"]
        assert len(case["slowed_percent_rounds"]) == 2
        # 1,024 tokens of 2 layers, 2 planes, 2 heads of 16, in 16 bits.
        assert case["mb"] == pytest.approx(1024 * 2 * 2 * 2 * 16 * 2 / 1e6, abs=1e-3)
    alone, paced, saturating = cases
    assert (alone["transfers"], alone["gb_s"], alone["slowed_percent"]) == (0, 0.0, 0.0)
    assert paced["due_s"] > 0
    assert (alone["compared"], saturating["compared"]) == (0, 2)
    rounds = [word.split()[-2] for word in done.stderr.splitlines() if word.startswith("round")]
    assert rounds == [*KINDS, *reversed(KINDS)]


class Asked:
    """An end in this process, asked by another thread as a process is."""

    def __init__(self, end: DecodingEnd) -> None:
        self.ready_line = {"endpoints": end.endpoints}
        self._end = end
        self._questions: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def send_command(self, word: dict[str, Any]) -> None:
        self._questions.put(word)
        self._end.wakeup.set()

    def receive(self) -> dict[str, Any]:
        return self._answers.get(timeout=60)

    def call(self, question: dict[str, Any]) -> dict[str, Any]:
        self.send_command(question)
        return self.receive()

    def has_line(self, within_s: float) -> bool:
        if self._answers.empty():
            time.sleep(min(max(within_s, 0.0005), 0.002))  # the other thread has the work
        return not self._answers.empty()

    def answer_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._end.turn()
            while not self._questions.empty():
                self._answer(self._questions.get())

    def _answer(self, question: dict[str, Any]) -> None:
        if "digest" in question:
            self._answers.put(self._end.digest())
            return
        self._end.expect(question["arrivals"])
        figures = self._end.window(question["steps"], lambda: self._answers.put({"begun": True}))
        self._end.expect(True)
        self._answers.put(figures)


class FakeBlocks:
    """A sender's pool in a fake device's memory."""

    def __init__(self, rig: FakeRig, count: int, block_bytes: int) -> None:
        drawn = np.random.default_rng(3).integers(0, 256, (count, block_bytes), dtype=np.uint8)
        self._pool = torch.from_numpy(drawn)
        self.blocks = DeviceBlocks(rig.sender, [self._pool])

    def place(self, ordinal: int) -> int:
        return ordinal

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        return self._pool[block, offset : offset + length].numpy().data

    def unpin(self, group: int, block: int) -> None:
        """Does nothing: the blocks have no other user."""


class Between:
    """Both ends between two fake devices; `drive` runs the sender's part in a thread of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = FakeRig(None)  # at once: two threads use it
        self.setting = Setting("tiny", "bf16", 2, 300, STEPS, "ipc", "cpu")
        monkeypatch.setattr(
            bench.transfer.devices,
            "gpu_blocks",
            lambda count, device, block_bytes: FakeBlocks(rig, count, block_bytes),
        )
        self.engine: DecodeEngine = engine_of(self.setting)
        waits = threading.Event().wait
        self.end = DecodingEnd(self.setting, self.engine, rig.receiver, lambda s: waits(min(s, 0.001)))
        self.end.expect(True)

    def drive(self, work: Callable[[Sending, SendingEnd], None], first: int = 1) -> None:
        """Raises what `work` raises. `first`: the number of the first transfer."""
        failed: list[BaseException] = []
        asked = Asked(self.end)

        def run() -> None:
            setting = self.setting
            sender = SendingEnd(
                setting.blocks, device="cuda:0", transport="ipc", block_bytes=setting.block_bytes
            )
            try:
                work(Sending(setting, asked, sender, first), sender)  # type: ignore[arg-type]
            except Exception as error:
                failed.append(error)
            finally:
                sender.close()

        thread = threading.Thread(target=run)
        thread.start()
        asked.answer_until(lambda: not thread.is_alive())
        thread.join()
        if failed:
            raise failed[0]


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    both = Between(monkeypatch)
    yield both
    both.end.close()


def test_between_devices(between: Between) -> None:
    """The measured windows, over a link that writes into the cache. Then the accounting is consistent, and a
    bit that flips in the cache afterwards is found."""
    windows: list[TransferWindow] = []
    setting, end, engine = between.setting, between.end, between.engine

    def work(sending: Sending, sender: SendingEnd) -> None:
        for kind in (PACED, ALONE, ALONE, *[SATURATING] * 5):
            windows.append(sending.window(kind, STEPS, 50.0))
            if windows[-1].receiver["transfers"] and kind == SATURATING:
                break  # a busy machine may have too few steps in a window for a transfer to end
        assert sender.transport == "ipc"
        engine.model.cache.ranks[0].storage[0][:, 7] ^= 1
        with pytest.raises(RuntimeError, match="is not what was sent"):
            sending.compare()

    between.drive(work)
    busy = [window for window in windows if window.kind == SATURATING]
    assert busy[-1].receiver["transfers"] > 0
    assert all(window.compared and window.receiver["on_device"] for window in busy)
    assert all(len(window.receiver["step_ns"]) == STEPS - 1 for window in windows)
    assert [window.receiver["transfers"] for window in windows if window.kind == ALONE] == [0, 0]
    counters = end.receiver.counters
    assert (counters.checksum_failures, counters.dropped_unknown) == (0, 0)
    size = setting.blocks * setting.block_bytes
    assert counters.bytes_received == counters.transfers_committed * size
    assert len(end.receiver.transfers) == EXPECTED
    assert engine.slots.free == setting.batch
    spare = 2 * EXPECTED * setting.blocks
    assert engine.model.pools.free == engine.model.pools.total - spare


def test_a_transfer_that_fails_ends_the_measurement(between: Between) -> None:
    def work(sending: Sending, sender: SendingEnd) -> None:
        sending.window(SATURATING, STEPS)

    with pytest.raises(BatonError, match="expect"):
        between.drive(work, first=99)
    assert between.end.receiver.counters.transfers_committed == 0


def window(kind: str, step_ns: list[int], **more: Any) -> TransferWindow:
    receiver = {"step_ns": step_ns, "gap_ns": [1000] * len(step_ns), "seconds": 2.0, "clock": "gpu"}
    return TransferWindow(
        kind, 7.0, {**receiver, "transfers": 0, "bytes": 0, "on_device": True, **more}, [0.25, 0.75]
    )


def test_slowed_is_against_the_same_round() -> None:
    """The second round's clock is half as fast: by the pooled means paced would be slowed by 15 %."""
    setting = Setting("tiny", "bf16", 2, 1024, 2, "ipc", "cpu")
    paced = [
        window(PACED, [1_100_000] * 2, transfers=3, bytes=10**9),
        window(PACED, [2_400_000] * 2, transfers=5, bytes=3 * 10**9),
    ]
    windows = [window(ALONE, [1_000_000] * 2), *paced, window(ALONE, [2_000_000] * 2)]
    found = summary_of(PACED, windows, setting)
    assert found["slowed_percent_rounds"] == [10.0, 20.0]
    assert found["slowed_percent"] == 15.0
    assert (found["step_ms"], found["step_ms_p50"]) == (1.75, 1.75)
    assert (found["transfers"], found["transfers_s"], found["gb_s"]) == (8, 2.0, 1.0)
    assert (found["transfer_ms_p50"], found["gap_us_p99"]) == (500.0, 1.0)
    assert summary_of(ALONE, windows, setting)["slowed_percent"] == 0.0


def test_paced_is_poisson_and_the_others_are_always_or_never() -> None:
    times = list(islice(due(PACED, 40.0), 4000))
    assert times == list(islice(due(PACED, 40.0), 4000))
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 40, rel=0.05)
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 / 40**2, rel=0.15)
    assert next(due(ALONE, 40.0)) == float("inf")
    assert list(islice(due(SATURATING, 0.0), 3)) == [0.0] * 3


class Clocked:
    """An engine as `StepLines` sees it, whose loop keeps clocks."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.loop = self
        self.tokens_decoded = 0

    @property
    def ended_steps(self) -> int:
        return self._ring.ended

    def clocks(self) -> ClockReader:
        return ClockReader(self._ring, self._ring.ended)

    def lines_of(self, reader: ClockReader) -> Any:
        return reader.finish(self._ring.ended)


def test_lines_by_a_ring_of_clocks_begin_where_they_are_asked_to() -> None:
    ring = Ring()
    ring.run(9)
    lines = StepLines(Clocked(ring))  # type: ignore[arg-type]
    for _ in range(30):
        ring.run(1)
        lines.turned(0)
    assert lines.clock == "gpu"
    assert lines.of(19, 4)[:, 0].tolist() == [1900, 2000, 2100, 2200]
