"""Decode while sequences arrive and end: a worker's decode side over handoffs that arrive in staging.

A turn is that of a worker's engine: reserve a slot and some of the blocks, scatter, commit, cancel, free
slots whose end the front has read, allocate blocks, enqueue a step. Tickets, slots, allocation and admissions
are a worker's own; of a link only its bytes are simulated, which are scattered from a window on the GPU by a
link's own kernel, as with a GPU-to-GPU transport within a host.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from bench.case import SAMPLINGS, DecodeCase
from bench.decode.churn_plan import Due, Join, StepTime, joins, mean_age, mean_steps, standing
from bench.decode.clocks import figures
from bench.decode.engine import DEADLINE_S, DecodeEngine, Key, first_logprobs
from bench.engine_driver import decode_step
from services.common.engine.attempt_key import AttemptKey

if TYPE_CHECKING:
    from baton.device.streams.link_device import LinkDevice
    from baton.engine.memory.blocks import BlockTables
    from baton.v1.decode_pb2 import TicketBody
    from baton.v1.transfer_pb2 import CommitRecord
    from services.worker.engine.decode.side import DecodeSide

_ROUTER = bytes(16)
_SEED = 1
_TTL_MS = 600_000
# Output tokens that a reservation has blocks for at first: most sequences grow at least once.
RESERVED_OUTPUT = 32
# Steps by which the first pace is set.
_TIMED_STEPS = 20
_IDLE_S = 0.0001


@dataclass(slots=True)
class Counts:
    """Counts and longest host times of one window."""

    joins: int = 0
    cancels: int = 0
    ended: int = 0
    most_waiting: int = 0  # at once, for a slot
    scattered_bytes: int = 0
    # The most that each part of a turn took the host: what exceeds a step may be a gap.
    longest_s: dict[str, float] = field(default_factory=dict)

    def took(self, part: str, since: float) -> float:
        """Records the end of a part of a turn; returns the time."""
        now = time.monotonic()
        self.longest_s[part] = max(self.longest_s.get(part, 0.0), now - since)
        return now


@dataclass(slots=True)
class _Running:
    body: TicketBody
    cancel_at: int | None  # a step, until the cancel was sent


class Churn:
    """Runs sequences on an engine of its own; all calls from one thread."""

    def __init__(self, engine: DecodeEngine, case: DecodeCase, device: LinkDevice | None = None) -> None:
        """`device`: that KV is scattered on; None: the engine's GPU."""
        from baton.engine.memory.host_blocks import HostBlocks
        from baton.v1.types_pb2 import WorkerIdentity
        from kvtransfer.protocol.ticket import TicketSigner
        from services.worker.engine.decode.reserved_slots import ReservedBlockSink
        from services.worker.engine.decode.side import DecodeSide
        from services.worker.engine.decode.ticket_table import TicketTable
        from services.worker.engine.startup.kv_wire_format import WireBlocks

        self._engine = engine
        self._case = case
        self.counts = Counts()
        wire = WireBlocks(engine.model.cache, engine.model.fingerprint)
        self.decode = DecodeSide(
            engine.model,
            engine.loop,
            engine.slots,
            ReservedBlockSink(TicketTable(), wire),
            identity=WorkerIdentity(name="bench", incarnation=bytes(16), rank_count=1),
            signer=TicketSigner(bytes(32)),
            emit=lambda event: None,
            host=HostBlocks(engine.model.cache, 0),
            reserve_output_tokens=RESERVED_OUTPUT,
            prefix_cache=None,
        )
        self._scatter = StagedScatter(engine, self.decode, device)
        self._late: deque[Join] = deque()
        self._arriving: deque[tuple[Join, TicketBody]] = deque()
        self._running: dict[Key, _Running] = {}
        self._tokens = [token % engine.model.config.vocab_size for token in range(case.context)]

    def fill(self, plan: list[Join]) -> None:
        """Admits all sequences of a plan, and waits until they run. Raises TimeoutError."""
        self._late.extend(plan)
        self._turn_until(lambda: not (self._late or self._arriving))

    def turn(self, come: Iterable[Join] = ()) -> None:
        """One turn; `come` are the sequences that arrive now."""
        took, at = self.counts.took, time.monotonic()
        self._late.extend(come)
        self.counts.most_waiting = max(self.counts.most_waiting, len(self._late))
        while self._late and self._engine.slots.free:
            self._reserve(self._late.popleft())
        at = took("reserve", at)
        self._scatter.step()
        at = took("scatter", at)
        while self._arriving and self._scatter.ended(self._arriving[0][1]):  # their bytes come in their order
            self._commit(*self._arriving.popleft())
        at = took("commit", at)
        self._cancel(self._engine.loop.ring.steps)
        for key in self._engine.front.ended():
            del self._running[key]
            self.decode.reserved.slot_ended(*key)
            self.counts.ended += 1
        self.decode.reserved.expire()
        at = took("end", at)
        self.decode.allocation.step()
        at = took("grow", at)
        did = decode_step(self._engine.loop)
        took("step", at)
        if not did:
            time.sleep(_IDLE_S)

    def drain(self) -> None:
        """Cancels all sequences, and waits until every slot is free. Raises TimeoutError."""
        self._late.clear()
        self._turn_until(lambda: not self._arriving)
        for running in self._running.values():
            self.decode.reserved.cancel(AttemptKey.of(running.body.attempt))
        self._turn_until(lambda: not self._running)

    def _turn_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            self.turn()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {DEADLINE_S} s")

    def _reserve(self, join: Join) -> None:
        from baton.v1.decode_pb2 import ReserveRequest, TicketBody
        from baton.v1.types_pb2 import Attempt

        number = (join.number & (1 << 64) - 1).to_bytes(16, "little")
        request = ReserveRequest(
            attempt=Attempt(request_id=number, number=1),
            router_id=_ROUTER,
            token_count=self._case.context,
            max_tokens=join.output,
            ttl_ms=_TTL_MS,
        )
        body = TicketBody.FromString(self.decode.issuer.reserve(request).ticket.body)
        self.counts.scattered_bytes += self._scatter.begin(body)
        self._arriving.append((join, body))

    def _commit(self, join: Join, body: TicketBody) -> None:
        entry = self.decode.tickets.find_transfer(body.transfer_id)
        assert entry is not None, "no ticket here ends before it is committed"
        self.decode.handoffs.commit(body.transfer_id, self._record(join, body))
        at = None if join.cancel_after is None else self._engine.loop.ring.steps + 1 + join.cancel_after
        self._running[entry.reservation.key] = _Running(body, at)
        self.counts.joins += 1

    def _record(self, join: Join, body: TicketBody) -> CommitRecord:
        from baton.v1 import types_pb2
        from baton.v1.transfer_pb2 import CommitRecord
        from services.common.engine.logprobs import logprobs_message

        settings = {"top_p": 1.0, **SAMPLINGS[self._case.sampling], "seed": join.number & 0xFFFFFFFF}
        return CommitRecord(
            attempt=body.attempt,
            token_ids=self._tokens,
            prompt_length=self._case.context,
            first_token_id=join.number * 977 % self._engine.model.config.vocab_size,
            sampling=types_pb2.Sampling(**settings),
            limits=types_pb2.Limits(max_tokens=join.output),
            block_counts=body.block_counts,
            first_logprobs=logprobs_message(first_logprobs()) if "logprobs" in settings else None,
        )

    def _cancel(self, step: int) -> None:
        for running in self._running.values():
            if running.cancel_at is not None and running.cancel_at <= step:
                running.cancel_at = None
                self.decode.reserved.cancel(AttemptKey.of(running.body.attempt))
                self.counts.cancels += 1


def run(
    engine: DecodeEngine, case: DecodeCase, seconds: float, device: LinkDevice | None = None
) -> dict[str, Any]:
    """Joins at the rate that keeps `batch` rows busy on average, for `seconds`, once that many run."""
    churn = Churn(engine, case, device)
    churn.fill(standing(_SEED, case.batch))
    rate = case.batch / mean_steps()
    pace = 1 / _step_seconds(churn, engine)
    reader = engine.clocks()
    before = _Seen.of(engine, churn)
    churn.counts = Counts()
    begun = time.monotonic()
    plan, clock = Due(joins(_SEED, rate)), StepTime(begun, engine.loop.ring.steps, pace)
    while (now := time.monotonic()) < begun + seconds:
        churn.turn(plan.until(clock.at(now, engine.loop.ring.steps)))
        if reader is not None:
            reader.look(engine.ended_steps)
    took, counts = time.monotonic() - begun, churn.counts
    seen = _Seen.of(engine, churn).since(before)
    churn.counts = Counts()
    churn.drain()
    lines = engine.lines_of(reader)
    mean_rows = seen.tokens / max(1, seen.steps)
    return {
        "steps": seen.steps,
        "mean_rows": round(mean_rows, 2),
        "floor_ms": round(case.floor_ms(case.context + mean_age(), engine.read_bytes_s, mean_rows), 3),
        "tokens_s": round(seen.tokens / took),
        **({} if lines is None else figures(lines[: seen.replays])),
        "longest_ms": {part: round(longest * 1e3, 3) for part, longest in counts.longest_s.items()},
        "joins": counts.joins,
        "ended": counts.ended,
        "cancels": counts.cancels,
        "most_waiting": counts.most_waiting,
        "block_grants": seen.grown,
        "stalled_rows": seen.held,
        "scattered_mb_s": round(counts.scattered_bytes / took / 1e6, 3),
    }


@dataclass(frozen=True, slots=True)
class _Seen:
    """The loop's own counters."""

    replays: int
    steps: int
    held: int
    tokens: int
    grown: int

    @classmethod
    def of(cls, engine: DecodeEngine, churn: Churn) -> _Seen:
        ring, grown = engine.loop.ring, churn.decode.allocation.allocations
        return cls(engine.ended_steps, ring.steps, ring.stalled_rows, engine.loop.tokens_decoded, grown)

    def since(self, before: _Seen) -> _Seen:
        return _Seen(*(b - a for a, b in zip(astuple(before), astuple(self), strict=True)))


def _step_seconds(churn: Churn, engine: DecodeEngine) -> float:
    """The initial step time."""
    first, begun = engine.loop.ring.steps, time.monotonic()
    while engine.loop.ring.steps < first + _TIMED_STEPS:
        churn.turn()
    return (time.monotonic() - begun) / (engine.loop.ring.steps - first)


class StagedScatter:
    """Moves the KV of whole prompts into their blocks, like the receiving end of a link between GPUs of a
    host: a staging window on the GPU and the link's kernel, which verifies the checksum as it scatters. The
    bytes are there from the beginning, since a sender's writes would use none of this GPU's multiprocessors,
    unlike a copy within it."""

    def __init__(self, engine: DecodeEngine, decode: DecodeSide, device: LinkDevice | None) -> None:
        """`device`: None: the engine's GPU."""
        from baton.device.streams.cuda_link_device import CudaLinkDevice
        from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
        from kvtransfer.device.movers import warm
        from kvtransfer.device.piece_memory import PieceMemory
        from kvtransfer.device.scatter import DeviceScatter

        device = device or CudaLinkDevice(engine.decoder.device)
        blocks = DeviceBlocks(device, engine.model.cache.ranks[0].storage)
        if engine.decoder.device.type == "cuda":
            warm(blocks)
        sink = DeviceSink(blocks, decode.sink.place, steps_run=lambda: True)
        self._decode = decode
        self._block_bytes = blocks.block_bytes
        self._piece_bytes = sink.piece_bytes
        self._window = PieceMemory(device, sink.window_pieces, sink.piece_bytes)
        self._scatter = DeviceScatter(sink, self._window)
        self._free = list(range(sink.window_pieces))
        self._waiting: deque[tuple[int, int, int, int]] = deque()  # transfer, group, first ordinal, blocks
        self._left: Counter[int] = Counter()
        self._begun = 0

    def begin(self, body: TicketBody) -> int:
        """Begins to fill the ticket's blocks; returns the number of bytes."""
        total = 0
        for group, (blocks, size) in enumerate(
            zip(_blocks(self._decode, body), self._block_bytes, strict=True)
        ):
            total += len(blocks) * size
            most = self._piece_bytes // size
            for ordinal in range(0, len(blocks), most):
                count = min(most, len(blocks) - ordinal)
                self._waiting.append((body.transfer_id, group, ordinal, count))
                self._left[body.transfer_id] += 1
        self.step()
        return total

    def step(self) -> None:
        """The work of one turn of the loop."""
        from kvtransfer.protocol.frames import Piece

        for moved in self._scatter.moved(lambda piece: piece.checksum):
            self._left[moved.piece.transfer] -= 1
            self._free.append(moved.piece.staging)
        while self._waiting and self._free:
            transfer, group, ordinal, blocks = self._waiting.popleft()
            length, index = blocks * self._block_bytes[group], self._free.pop()
            self._scatter.begin(Piece(transfer, group, ordinal, 0, length, index, 0), blocks, blocks)
            self._begun += 1
        self._scatter.start(self._begun)

    def ended(self, body: TicketBody) -> bool:
        """True if all bytes are in their blocks."""
        if self._left[body.transfer_id]:
            return False
        del self._left[body.transfer_id]
        return True


def _blocks(decode: DecodeSide, body: TicketBody) -> BlockTables:
    entry = decode.tickets.find_transfer(body.transfer_id)
    assert entry is not None, "a ticket lives until its blocks have arrived"
    tables = zip(entry.reservation.blocks, body.block_counts, strict=True)
    return tuple(blocks[:count] for blocks, count in tables)
