"""The gRPC channel and stubs of one address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio

from baton.v1.decode_pb2_grpc import DecodeServiceStub
from baton.v1.prefill_pb2_grpc import PrefillServiceStub
from baton.v1.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from baton.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from baton.v1.prefill_pb2_grpc import PrefillServiceAsyncStub
    from baton.v1.worker_pb2_grpc import WorkerServiceAsyncStub


class Peer:
    """The process at an address, whichever incarnations of a worker it has run."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.worker: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        self.prefill: PrefillServiceAsyncStub = PrefillServiceStub(channel)
        self.decode: DecodeServiceAsyncStub = DecodeServiceStub(channel)
