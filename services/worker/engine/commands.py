"""The front's commands: what each does, and the event that answers it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import GetHandoffResponse
from baton.v1.engine_pb2 import CanaryCommand, CancelCommand, DoneEvent, EngineCommand, EngineEvent
from baton.v1.types_pb2 import WorkerRole
from services.common.config.types import Role
from services.common.engine.attempt_key import AttemptKey
from services.common.engine.channel import EngineEnd, failed_event
from services.common.observability.logs import get_log
from services.worker.engine.decode.side import DecodeSide
from services.worker.engine.prefill.step_pipeline import PrefillPipeline
from services.worker.engine.reports import EngineReports

_COMMANDS_A_TURN = 64
# Commands that are handled within a decode step: a reservation is what a request waits for before its prompt
# is begun. None of them touches anything that the step reads.
_URGENT = frozenset({"reserve", "slot_ended"})

log = get_log(__name__)


@dataclass(eq=False)
class Commands:
    """Receives, handles and answers the front's commands, in order."""

    channel: EngineEnd
    role: Role
    decode: DecodeSide
    prefill: PrefillPipeline
    reports: EngineReports
    stopping: bool = field(default=False, init=False)
    _received: deque[EngineCommand] = field(default_factory=deque, init=False)

    def handle(self) -> bool:
        """Handles the commands that have arrived, a bounded number; False where there were none. Raises
        ChannelClosedError where the front is gone."""
        self._receive()
        count = len(self._received)
        for _ in range(count):
            self._handle(self._received.popleft())
        return count > 0

    def handle_urgent(self) -> None:
        """Handles the commands that may run within a decode step, up to the first that may not."""
        self._receive()
        while self._received and self._received[0].WhichOneof("command") in _URGENT:
            self._handle(self._received.popleft())

    def _receive(self) -> None:
        self._received += self.channel.receive(_COMMANDS_A_TURN - len(self._received))

    def _handle(self, command: EngineCommand) -> None:
        try:
            event = self._answer(command)
        except BatonError as error:
            # A full worker refuses in normal operation, and the router asks again.
            level = "debug" if error.kind is ErrorKind.OVERLOADED else "warning"
            kind = command.WhichOneof("command")
            getattr(log, level)("command_refused", command=kind, reason=error.message)
            event = failed_event(error)
        if event is not None and command.id:  # commands of id 0 have no answer
            event.id = command.id
            self.channel.send(event)

    def _answer(self, command: EngineCommand) -> EngineEvent | None:
        match command.WhichOneof("command"):
            case "reserve":
                self._require("decode")
                return EngineEvent(reserved=self.decode.issuer.reserve(command.reserve))
            case "prefill":
                self._require("prefill")
                self.prefill.jobs.start(command.id, command.prefill, command.first_token_mask)
                return None
            case "provide_ticket":
                self.prefill.jobs.provide_ticket(command.provide_ticket)
            case "cancel":
                self._cancel(command.cancel)
            case "slot_ended":
                ended = command.slot_ended
                if not self.decode.canary.slot_ended(ended.slot, ended.generation):
                    self.decode.reserved.slot_ended(ended.slot, ended.generation, ended.token_ids)
                return None
            case "canary":
                return self._canary(command.id, command.canary)
            case "report":
                return EngineEvent(
                    report=self.reports.integrity_report(check_pools=not command.report.skip_integrity)
                )
            case "handoff_state":
                state = self.decode.tickets.state(AttemptKey.of(command.handoff_state.attempt))
                return EngineEvent(handoff_state=GetHandoffResponse(state=state))
            case "describe":
                return EngineEvent(load=self.reports.load())
            case "stop":
                self.stopping = True
            case _:
                raise BatonError(ErrorKind.INTERNAL, "the engine was sent an unknown command")
        return EngineEvent(done=DoneEvent())

    def _canary(self, command_id: int, command: CanaryCommand) -> EngineEvent | None:
        if command.side == WorkerRole.WORKER_ROLE_DECODE:
            self._require("decode")
            if command.cancel:
                self.decode.canary.cancel()
            elif command.admit:
                self.decode.canary.admit()
            else:
                crowded = self.decode.allocation.waiting
                return EngineEvent(canary=self.decode.canary.grant(crowded=crowded))
        else:
            self._require("prefill")
            if not command.cancel:
                self.prefill.jobs.start_canary(command_id)
                return None
            self.prefill.jobs.cancel_canary()
        return EngineEvent(done=DoneEvent())

    def _cancel(self, command: CancelCommand) -> None:
        key = AttemptKey.of(command.attempt)
        self.prefill.jobs.cancel(key)
        if not command.prefill_only:
            self.decode.reserved.cancel(key)

    def _require(self, role: Role) -> None:
        if self.role not in (role, "both"):
            raise BatonError(ErrorKind.CONFLICT, f"this worker's role is {self.role}, not {role}")
