"""An engine whose loop is stepped by the test, and its front, which the test simulates."""

from __future__ import annotations

import itertools
import json
import socket
from pathlib import Path
from typing import Any, Literal

from baton.base.errors import ErrorKind
from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.shared_memory.output_ring import Finish, Record
from baton.v1.decode_pb2 import ReserveRequest, Ticket
from baton.v1.engine_pb2 import EngineCommand, EngineEvent, SlotEndedCommand
from baton.v1.prefill_pb2 import PrefillRequest
from baton.v1.types_pb2 import Attempt, Limits, Sampling
from baton.v1.worker_pb2 import GetAuditRequest
from services.common.config.transfer import KVWire, TransferConfig, Transport
from services.common.config.worker import EngineConfig, WorkerConfig
from services.common.engine.channel import EngineEnd
from services.common.engine.launch import EngineLaunch
from services.common.engine.rings import worker_rings
from services.worker.engine.assembly import build_engine
from services.worker.engine.startup.model_loader import load
from tests.engine.local_engine import CONFIG

SLOTS = 2


class SteppedEngine:
    """The engine, the front's end of its socket, and the reader of its ring."""

    def __init__(
        self,
        folder: Path,
        role: Literal["prefill", "decode", "both"] = "both",
        prefix_secret: str = "",
        transport: Transport = "auto",
        *,
        both_receives: bool = False,
        kv_wire: KVWire = "native",
        incarnation: str = "ab" * 16,
        checkpoint: Path | None = None,
        **engine: Any,
    ) -> None:
        """Random weights, in `folder`, where no `checkpoint` is given."""
        model = checkpoint or folder
        if checkpoint is None:
            (folder / "config.json").write_text(json.dumps(CONFIG))
        settings = {
            "device": "cpu",
            "dtype": "float32",
            "slots": SLOTS,
            "block_tokens": 4,
            "kv_blocks": 33,
            "weights": "random" if checkpoint is None else "file",
            "chunk_tokens": 8,
        }
        config = WorkerConfig(
            name=f"{role}-0",
            role=role,
            model=str(model),
            prefix_secret=prefix_secret,
            transfer=TransferConfig(transport=transport, both_receives=both_receives, kv_wire=kv_wire),
            engine=EngineConfig(**{**settings, **engine}),
        )
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._front = ours
        rings = worker_rings(config.engine)
        memory = SharedMemory.create("stepped", rings.size)
        self.ring, self.heartbeat = rings.reader(memory), rings.heartbeat(memory)
        self.progress = rings.progress(memory)
        self.stepped = Wakeup()
        launch = EngineLaunch(
            worker=config, incarnation=incarnation, started_ns=1, channel_fd=0, memory_fd=0,
            stepped_fd=self.stepped.fileno(),
        )  # fmt: skip
        self.model = load(str(model), config.engine)
        self.engine = build_engine(launch, self.model, EngineEnd(self._theirs), memory)
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[EngineEvent] = []
        self.records: list[Record] = []
        # Output by slot and generation, which is reported when a sequence ends.
        self._emitted: dict[tuple[int, int], list[int]] = {}
        self.turn()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.turn()
            self.read()

    def send(self, **command: Any) -> int:
        number = next(self._ids)
        self.write(EngineCommand(id=number, **command))
        return number

    def write(self, command: EngineCommand) -> None:
        payload = command.SerializeToString()
        self._front.sendall(len(payload).to_bytes(4, "little") + payload)

    def ask(self, **command: Any) -> EngineEvent:
        number = self.send(**command)
        self.turn()
        return next(event for event in self.events if event.id == number)

    def of(self, number: int) -> list[str]:
        return [event.WhichOneof("event") or "" for event in self.events if event.id == number]

    def failure(self, number: int) -> tuple[ErrorKind, str]:
        (event,) = [e for e in self.events if e.id == number and e.HasField("failed")]
        return ErrorKind(event.failed.kind), event.failed.message

    def run_out(self) -> None:
        """Turns until there is nothing to do."""
        for _ in range(500):
            if not self.play():
                return
        raise AssertionError("the engine does not come to rest")

    @property
    def transfers(self) -> int:
        """Outgoing transfers that have not ended."""
        return sum(link.live_transfers for link in self.engine.prefill.sender.links)

    @property
    def receiving(self) -> int:
        """Incoming transfers that have not ended."""
        receiver = self.engine.decode.receiver
        return 0 if receiver is None else sum(link.live_transfers for link in receiver.links)

    def play(self) -> bool:
        """One turn, and the front's part in it: each ended slot is reported. False where there was
        nothing to do."""
        busy = self.engine.turn()
        self.read()
        for record in self.ring.read():
            self.records.append(record)
            slot, generation = record.slot, record.generation
            emitted = self._emitted.setdefault((slot, generation), [])
            emitted += [record.token] * record.has_token
            if record.finish is not Finish.NONE:
                ended = SlotEndedCommand(slot=slot, generation=generation, token_ids=emitted)
                self.send(slot_ended=ended)
                busy = True
        return busy

    def assert_free(self) -> None:
        report = self.ask(report=GetAuditRequest()).report
        assert report.integrity_error == ""
        assert (report.load.free_slots, report.load.free_blocks) == (SLOTS, report.load.blocks)
        assert (report.live_tickets, report.load.queued_prefills, report.pinned_blocks) == (0, 0, 0)

    def read(self) -> None:
        try:
            self._buffer += self._front.recv(1 << 20)
        except BlockingIOError:
            return
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "little")
            if len(self._buffer) < 4 + length:
                return
            self.events.append(EngineEvent.FromString(self._buffer[4 : 4 + length]))
            self._buffer = self._buffer[4 + length :]

    def close(self) -> None:
        self.engine.close()
        self._front.close()
        self._theirs.close()


def reserve(number: int = 1, *, name: bytes = b"a", tokens: int = 9, most: int = 4, ttl: int = 60_000) -> Any:
    attempt = Attempt(request_id=name * 16, number=number)
    request = ReserveRequest(
        attempt=attempt, router_id=b"r" * 16, token_count=tokens, max_tokens=most, ttl_ms=ttl
    )
    return request


def prefill(
    ticket: Ticket | None, /, *, name: bytes = b"a", tokens: int = 9, most: int = 4, **fields: Any
) -> Any:
    request = PrefillRequest(
        attempt=Attempt(request_id=name * 16, number=1),
        token_ids=range(3, 3 + tokens),
        prompt_length=tokens,
        sampling=Sampling(temperature=0, top_p=1),
        limits=Limits(max_tokens=most),
        ticket=ticket,
    )
    request.MergeFrom(PrefillRequest(**fields))
    return request
