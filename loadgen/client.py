"""One request over gRPC, and its record: four raw times and every token's, from which all metrics follow."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc.aio

from baton.v1 import router_pb2, router_pb2_grpc, types_pb2


@dataclass(slots=True)
class Record:
    """One request as the client saw it; times in seconds of one monotonic clock."""

    scheduled: float
    sent: float = 0.0
    # When each token arrived; those of one message share a time.
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    # Empty when the stream ended with a finish reason.
    error: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """Which model is asked for how many tokens; a request fails after `timeout_s`."""

    model: str
    output_length: int
    timeout_s: float


async def send(
    router: router_pb2_grpc.RouterServiceAsyncStub, target: Target, token_ids: list[int], record: Record
) -> None:
    """Sends one greedy request that ignores the end of sequence, and fills `record`. Never raises for a
    failed request, and never sends it again."""
    request = router_pb2.GenerateRequest(
        model=target.model,
        token_ids=router_pb2.TokenIds(ids=token_ids),
        temperature=0,
        max_tokens=target.output_length,
        ignore_eos=True,
    )
    record.sent = time.monotonic()
    finished = False
    try:
        async for response in router.Generate(request, timeout=target.timeout_s):
            record.token_times += [time.monotonic()] * len(response.token_ids)
            finished = finished or response.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
        if not finished:
            record.error = "NO_FINISH"
        elif len(record.token_times) != target.output_length:
            record.error = "WRONG_LENGTH"
    except grpc.aio.AioRpcError as error:
        record.error = error.code().name
    record.ended = time.monotonic()
