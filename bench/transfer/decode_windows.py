"""Transfers into the KV cache of a decode engine that decodes meanwhile: what they cost its steps.

Windows of as many steps each, every one with a new batch, so that contexts are the same in all:

    alone        no transfer is expected
    paced        as many requests come as keep the batch there is: Poisson, batch / (output × a step) a second
    saturating   two transfers are under way all the time

Blocks arrive, but no sequence is admitted: what admissions cost is in `bench.decode --churn`.

A round has one of each, every other round in the opposite order, so that a clock that drifts evenly decides
nothing: `slowed_percent` is the mean of the rounds', each against its own `alone`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from bench.processes import JsonLinesProcess
from bench.transfer.decode_end import EXPECTED, WINDOW_S, Setting
from bench.transfer.ends import WAIT_S, ticket_for
from bench.transfer.sending import SendingEnd

ALONE, PACED, SATURATING = KINDS = "alone", "paced", "saturating"
CONTEXT = 1024
# One is in flight while the other's commit is answered.
_SATURATING = 2
_SEED = 1


@dataclass(slots=True)
class TransferWindow:
    """`receiver`: its figures. `seconds`: of each transfer, from its first push to the acknowledgement
    of its commit. `compared`: whether the bytes of the last one were compared at both ends."""

    kind: str
    rate: float  # of transfers, a second, where they are paced
    receiver: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    compared: bool = False

    @property
    def step_ms(self) -> float:
        return fmean(self.receiver["step_ns"]) / 1e6


class Sending:
    """Sends numbered transfers to a receiver while it runs windows, and compares their bytes."""

    def __init__(self, setting: Setting, end: JsonLinesProcess, sending: SendingEnd, first: int = 1) -> None:
        """`first`: the number of the first transfer."""
        self._setting = setting
        self._end = end
        self._sending = sending
        self._begun: dict[int, float] = {}  # when those were that are under way
        self._next = first

    def window(self, kind: str, steps: int, rate: float = 0.0) -> TransferWindow:
        """Runs one window. BatonError where a transfer fails, RuntimeError where the receiver fails or its
        bytes differ, TimeoutError."""
        found, plan = TransferWindow(kind, rate if kind == PACED else 0.0), due(kind, rate)
        most = _SATURATING if kind == SATURATING else EXPECTED
        self._end.send_command({"steps": steps, "arrivals": kind != ALONE})
        self._end.receive()
        first = self._next
        begun, at, over = time.monotonic(), next(plan), False
        while not over:
            now = time.monotonic() - begun
            while at <= now and len(self._begun) < most:
                self._send()
                at = next(plan)
            wait = min(max(0.0, at - now), WAIT_S) if len(self._begun) < most else WAIT_S
            under_way = bool(self._begun)
            found.seconds += self._take(wait if under_way else 0.0)
            over = self._end.has_line(0.0 if under_way else wait)
            if now > WINDOW_S:
                raise TimeoutError(f"{steps} steps took longer than {WINDOW_S:g} s")
        found.receiver = self._end.receive()
        while self._begun:
            self._take(WAIT_S)
        if self._next > first:
            self.compare()
            found.compared = True
        return found

    def _send(self) -> None:
        number, blocks = self._next, self._setting.blocks
        self._begun[number] = time.monotonic()
        self._sending.send(
            *ticket_for(self._end.ready_line["endpoints"], number, blocks), self._first(number)
        )
        self._next += 1

    def _first(self, transfer: int) -> int:
        """The pool's block that a transfer starts with: its bytes differ from those of the previous transfer
        into the same blocks."""
        return transfer % self._setting.blocks

    def _take(self, wait_s: float) -> list[float]:
        """The times in s of acknowledged transfers."""
        numbers, now = self._sending.answered(wait_s), time.monotonic()
        return [now - self._begun.pop(number) for number in numbers]

    def compare(self) -> None:
        """Raises RuntimeError where the bytes that arrived last are not those sent."""
        answer = self._end.call({"digest": True})
        if answer["digest"] != self._sending.digest(self._first(answer["transfer"])):
            raise RuntimeError(f"what arrived as transfer {answer['transfer']} is not what was sent")


def due(kind: str, rate: float) -> Iterator[float]:
    """Poisson arrival times in s from a window's start; equal for equal rates."""
    if kind == ALONE:
        return itertools.repeat(float("inf"))
    if kind == SATURATING:
        return itertools.repeat(0.0)
    draw = random.Random(_SEED)
    return itertools.accumulate(draw.expovariate(rate) for _ in itertools.count())


def beside_decode(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of each kind of window, over all rounds."""
    on_gpu = arguments.device == "cuda"
    setting = Setting(
        arguments.shape, "bf16", arguments.decode, CONTEXT, arguments.steps, arguments.transport,
        f"cuda:{arguments.peer}" if on_gpu else "cpu",
    )  # fmt: skip
    # Over grpc, bytes come from host memory in any case.
    source = "cuda:0" if on_gpu and arguments.transport != "grpc" else "cpu"
    end = JsonLinesProcess("bench.transfer.decode_end", json.dumps(asdict(setting)))
    try:
        sender = SendingEnd(
            setting.blocks, device=source, transport=arguments.transport, block_bytes=setting.block_bytes
        )
        sending = Sending(setting, end, sender)
        # Warm-up, not counted: opens the link and touches the memory.
        sending.window(SATURATING, max(2, setting.steps // 4))
        if sender.transport != arguments.transport:
            raise RuntimeError(f"the link went over {sender.transport}")
        windows = list(_rounds(sending, setting, arguments.rounds, arguments.output_len))
        sender.close()
    finally:
        end.end()
    return [summary_of(kind, windows, setting) for kind in KINDS]


def _rounds(sending: Sending, setting: Setting, rounds: int, output: int) -> Iterator[TransferWindow]:
    rate = 0.0
    for number in range(rounds):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            print(f"round {number + 1} of {rounds}: {kind} …", file=sys.stderr)
            window = sending.window(kind, setting.steps, rate)
            if kind == ALONE:
                rate = setting.batch / (output * window.step_ms / 1e3)
            yield window


def summary_of(kind: str, windows: list[TransferWindow], setting: Setting) -> dict[str, Any]:
    """The figures of all windows of a kind. A step is measured from end to end, a gap from a step's end to
    the next one's first kernel."""
    alone = [window.step_ms for window in windows if window.kind == ALONE]
    ours = [window for window in windows if window.kind == kind]
    steps = np.concatenate([window.receiver["step_ns"] for window in ours]) / 1e6
    gaps = np.concatenate([window.receiver["gap_ns"] for window in ours]) / 1e3
    slowed = [(window.step_ms / own - 1) * 100 for window, own in zip(ours, alone, strict=True)]
    seconds = sum(window.receiver["seconds"] for window in ours)
    transfers = sum(window.receiver["transfers"] for window in ours)
    took = [each for window in ours for each in window.seconds]
    return {
        "window": kind,
        "clock": ours[0].receiver["clock"],
        "steps": len(ours) * setting.steps,
        "step_ms": round(float(steps.mean()), 4),
        "step_ms_p50": round(float(np.percentile(steps, 50)), 4),
        "step_ms_p99": round(float(np.percentile(steps, 99)), 4),
        "gap_us_p99": round(float(np.percentile(gaps, 99)), 2),
        "slowed_percent": round(fmean(slowed), 2),
        "slowed_percent_rounds": [round(each, 2) for each in slowed],
        "due_s": round(fmean(window.rate for window in ours), 2) or None,
        "transfers": transfers,
        "transfers_s": round(transfers / seconds, 2),
        "gb_s": round(sum(window.receiver["bytes"] for window in ours) / seconds / 1e9, 3),
        "transfer_ms_p50": round(float(np.percentile(took, 50)) * 1e3, 3) if took else None,
        "on_device": ours[0].receiver["on_device"],
        "mb": round(setting.blocks * setting.block_bytes / 1e6, 3),
        "block_bytes": setting.block_bytes,
        "compared": sum(window.compared for window in ours),
    }


def table(cases: list[dict[str, Any]]) -> None:
    """A table of the kinds of windows."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("", *(str(case["window"]) for case in cases))
    for name in cases[0]:
        shown.add_row(name, *(str(case[name]) for case in cases))
    Console().print(shown)
