"""The exchange among the devices of one worker within a step, as the host sees it.

    first device      begin ─ … product ─ reduce ─ product ─ reduce … ─ head ─ end ─ sample, finish
                        │ rows                ║                ║                ▲
    follower          begin ─ … product ─ reduce ─ product ─ reduce … ─ head ─ end   its part of the logits

A step is the same nodes in the same order on every device: `begin`, a fixed number of sums, `end`. Each is
enqueued, or captured, on that device's one stream for all that communicates. How devices wait for one
another, and why no wait lasts, is in `exchange.cu`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory
from baton.engine.kernels.fusion import Norm
from baton.engine.parallel.exchange_layout import (
    MOST_RANKS,
    RECORD_WORDS,
    SOLO_AT,
    STEPS_AT,
    Argument,
    BeginArguments,
    EndArguments,
    ExchangeShape,
    Ranks,
    ReduceArguments,
)
from baton.engine.parallel.exchange_source import Constants, threads_of

_LOG = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""Seconds that a device waits for another."""

# Blocks that copy logits, and threads of the nodes that begin and end a step.
_COPYING_BLOCKS = 64
_THREADS = 256


class RankDevice(Protocol):
    """One of a worker's devices, as the exchange uses it."""

    threads: int | None
    """Threads of a block of the sums; None: by their width."""

    def allocate(self, size: int) -> Tensor:
        """Zeroed bytes that all of the worker's devices may load and store, at the same address on each."""

    def map_host(self, memory: SharedMemory) -> int:
        """The address of host memory on all devices."""

    def launch(
        self, constants: Constants, kernel: str, blocks: int, threads: int, arguments: Sequence[Argument]
    ) -> None:
        """Enqueues a kernel of `exchange.cu`, compiled with these constants."""

    def synchronize(self) -> None:
        """Blocks until all enqueued work has ended."""


@dataclass(frozen=True, slots=True)
class ExchangeTimeout:
    """A wait that ended at its deadline. `layer`: None where a step begins or ends. `peer_step`, `peer_node`:
    the last node whose flag `peer` had set for `rank`. The first rank sets flags at begins and sums, the
    others at sums, and at ends for the first rank alone."""

    rank: int
    peer: int
    step: int
    node: int
    layer: int | None
    waited_s: float
    peer_step: int
    peer_node: int


class ExchangeTimeoutError(RuntimeError):
    """A device waited for another longer than the deadline; the worker's devices compute nothing any more."""

    def __init__(self, timeout: ExchangeTimeout) -> None:
        place = "of no layer" if timeout.layer is None else f"of layer {timeout.layer}"
        super().__init__(
            f"device {timeout.rank} waited {timeout.waited_s:.1f} s for device {timeout.peer}"
            f" at node {timeout.node} {place} in step {timeout.step},"
            f" which was last at node {timeout.peer_node} in step {timeout.peer_step}"
        )
        self.timeout = timeout


class Exchange:
    """Memory, flags and counters of all ranks, and the launches of their nodes. Not thread-safe."""

    def __init__(
        self,
        devices: Sequence[RankDevice],
        shape: ExchangeShape,
        dtype: torch.dtype,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`dtype`: of rows, parts and logits, bfloat16 or float32. ValueError for others."""
        if dtype not in (torch.bfloat16, torch.float32) or dtype.itemsize != shape.element_bytes:
            raise ValueError(f"no exchange of {dtype} in elements of {shape.element_bytes} bytes")
        if len(devices) != shape.ranks or not 2 <= shape.ranks <= MOST_RANKS:
            raise ValueError(f"{len(devices)} devices of {shape.ranks}, 2 to {MOST_RANKS}")
        self.shape = shape
        self._dtype = dtype
        self._devices = tuple(devices)
        self._arenas = [device.allocate(shape.arena_bytes) for device in devices]
        # Arrivals of blocks on each device, behind which the first device has the outcome of a step.
        self._arrived = [device.allocate(4) for device in devices]
        self.whole = devices[0].allocate(4).view(torch.int32)
        """On the first device: 1 where all that the last step computed is right, 0 where the exchange had
        failed before it ended; to be read between `end` and the next step's."""
        # A line for each rank and each that it may have waited for.
        words = shape.ranks * MOST_RANKS * RECORD_WORDS
        memory = SharedMemory.create("baton-exchange", words * 8)
        self._records = memory.region(0, words, "<u8").reshape(shape.ranks, MOST_RANKS, RECORD_WORDS)
        records = devices[0].map_host(memory)
        self._ranks = []
        for rank in range(shape.ranks):
            ranks = Ranks(records=records + rank * self._records.strides[0], rank=rank, nodes=shape.nodes)
            ranks.arenas[: shape.ranks] = [arena.data_ptr() for arena in self._arenas]
            ranks.deadline_ns = round(deadline_s * 1e9)
            self._ranks.append(ranks)

    def part(self, rank: int, node: int) -> Tensor:
        """[rows, width]: where a rank writes its part of a sum, before it enqueues the sum's node."""
        at, shape = self.shape.part_at(node), self.shape
        bytes_ = self._arenas[rank][at : at + shape.part_bytes]
        return bytes_.view(self._dtype).view(shape.rows, shape.width)

    def begin(self, rank: int, rows: Tensor | None) -> None:
        """Enqueues the first node of a step. `rows` [words] int32: on the first device what followers are
        sent, on a follower where it gets them; its first word is the number of rows. None: nothing is sent,
        since the host has given each device its rows."""
        shape = self.shape
        if rows is None:
            begin = BeginArguments(inboxes=shape.inboxes_at)
        elif rows.numel() != shape.words or rows.dtype != torch.int32:
            raise ValueError(f"{rows.numel()} words of {rows.dtype}, not {shape.words} of int32")
        else:
            address = rows.data_ptr()
            begin = BeginArguments(address, address, shape.inboxes_at, shape.words)
        self._launch(rank, self._constants(rank), "begin_step", 1, begin)

    def reduce(
        self,
        rank: int,
        node: int,
        hidden: Tensor,
        post_norm: Norm | None = None,
        norm: tuple[Norm, Tensor] | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """Enqueues a sum: hidden [R, width] += all ranks' parts of it, normed first by `post_norm`; and, with
        `norm`, the next norm of that into its tensor [R, width], or with `scales` [R] float32 its codes in
        e4m3. ValueError for what does not fit."""
        rows, width = hidden.shape
        shape = self.shape
        if rows > shape.rows or width != shape.width or hidden.dtype is not self._dtype:
            raise ValueError(f"{tuple(hidden.shape)} {hidden.dtype} is not of {shape}")
        out = hidden if norm is None else norm[1]
        if out.shape != hidden.shape or out.dtype is not (
            self._dtype if scales is None else torch.float8_e4m3fn
        ):
            raise ValueError(f"norm into {tuple(out.shape)} {out.dtype}")
        norms = [one for one in (post_norm, norm and norm[0]) if one is not None]
        kinds = {one.gain.dtype for one in norms}
        if len(kinds) > 1 or not kinds <= {self._dtype, torch.float32}:
            raise ValueError(f"gains of {kinds}")
        constants = replace(
            self._constants(rank),
            post_norm=post_norm is not None,
            norm=norm is not None,
            codes=scales is not None,
            wide_gains=bool(kinds - {self._dtype}),
        )
        arguments = ReduceArguments(parts=shape.part_at(node), hidden=hidden.data_ptr(), node=node)
        if post_norm is not None:
            arguments.post_gains, arguments.post_eps = post_norm.gain.data_ptr(), post_norm.eps
        if norm is not None:
            arguments.gains, arguments.eps = norm[0].gain.data_ptr(), norm[0].eps
            arguments.normed = out.data_ptr()
        if scales is not None:
            arguments.scales = scales.data_ptr()
        self._launch(rank, constants, "reduce_rows", rows, arguments, constants.threads)

    def end(self, rank: int, part: Tensor, logits: Tensor, column: int) -> None:
        """Enqueues the last node of a step: a rank's `part` [R, n] of the logits goes to columns `column` on
        of `logits` [R, vocabulary], plain memory of the first device, which waits for all and then says in
        `whole` whether they are right. No rows where the step has no logits."""
        size = part.element_size()
        end = EndArguments(
            part=part.data_ptr(),
            logits=logits.data_ptr(),
            arrived=self._arrived[rank].data_ptr(),
            whole=self.whole.data_ptr(),
            rows=part.shape[0],
            part_bytes=part.shape[1] * size,
            row_bytes=logits.shape[1] * size,
            part_at=column * size,
            node=self.shape.last_node,
        )
        self._launch(rank, self._constants(rank), "end_step", _COPYING_BLOCKS, end)

    @contextmanager
    def solo(self) -> Iterator[None]:
        """Lets every device run alone while the context is open: no node waits for another device or touches
        its memory, and sums are of its own parts. For first launches and captures, which a device makes for
        itself.

        All devices are idle when it begins and when it ends; counters and flags are equal afterwards.
        """
        self._set(SOLO_AT, 1)
        try:
            yield
        finally:
            self._set(SOLO_AT, 0)
            self.set_steps(max(int(self._word(rank, STEPS_AT)) for rank in range(self.shape.ranks)))

    def set_steps(self, steps: int) -> None:
        """Makes all devices, which must be idle, have done `steps` steps."""
        self._set(STEPS_AT, steps)
        for rank in range(self.shape.ranks):
            self._set(self.shape.flag_at(rank), steps * self.shape.nodes + self.shape.last_node)

    def timeouts(self) -> list[ExchangeTimeout]:
        """Waits that ended at their deadline, first those of the earliest node, as the devices have noted
        them in the host's memory: asks no device."""
        found: list[ExchangeTimeout] = []
        if not self._records[..., -1].any():
            return found
        for rank, peers in enumerate(self._records):
            for peer, (step, node, waited_ns, reached, noted) in enumerate(peers.tolist()):
                if noted:
                    layer = (node - 1) // 2 if 1 <= node <= self.shape.sums else None
                    last = divmod(reached, self.shape.nodes)
                    found.append(ExchangeTimeout(rank, peer, step, node, layer, waited_ns / 1e9, *last))
        return sorted(found, key=lambda one: (one.step, one.node))

    def check(self) -> None:
        """Logs the first wait that ended at its deadline, where one has, and raises ExchangeTimeoutError."""
        for timeout in self.timeouts()[:1]:
            _LOG.error("exchange_timeout", extra=asdict(timeout))
            raise ExchangeTimeoutError(timeout)

    def _constants(self, rank: int) -> Constants:
        shape, floats = self.shape, self._dtype is torch.float32
        threads = self._devices[rank].threads or threads_of(shape.width, shape.element_bytes, shape.ranks)
        return Constants(shape.ranks, shape.width, floats, threads)

    def _launch(
        self,
        rank: int,
        constants: Constants,
        kernel: str,
        blocks: int,
        arguments: Argument,
        threads: int = _THREADS,
    ) -> None:
        self._devices[rank].launch(constants, kernel, blocks, threads, (self._ranks[rank], arguments))

    def _word(self, rank: int, at: int) -> Tensor:
        self._devices[rank].synchronize()
        return self._arenas[rank][at : at + 8].view(torch.int64)[0].cpu()

    def _set(self, at: int, value: int) -> None:
        for device, arena in zip(self._devices, self._arenas, strict=True):
            device.synchronize()
            arena[at : at + 8].view(torch.int64).fill_(value)
            device.synchronize()
