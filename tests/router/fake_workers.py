# ruff: noqa: N802 (gRPC names its methods so)
"""Workers without an engine: real gRPC servers before the arithmetic of `fake_model`.

A `FakeWorker` plays prefill, decode or both. `Behaviour` makes it fail in a chosen way, a chosen
number of times. `ledger` counts what is held: everything in it is 0 when nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from baton.model_spec.model_files import TokenizerFiles
from baton.tls.server import ServerTls
from baton.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.v1.types_pb2 import WorkerIdentity, WorkerRole
from baton.v1.worker_pb2 import DescribeResponse
from services.common.rpc.grpc_server import GrpcServer
from services.router.request.limits import WorkerLimits
from tests.router.behaviour import Behaviour
from tests.router.fake_decode import FakeDecode
from tests.router.fake_model import VOCAB
from tests.router.fake_prefill import FakePrefill


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """One worker; `async with worker.serving()` runs it."""

    def __init__(
        self,
        name: str,
        role: WorkerRole.ValueType,
        cluster: FakeCluster,
        slots: int = 8,
        fingerprint: bytes = b"same",
        max_context: int = 256,
        limits: worker_pb2.WorkerLimits | None = None,
    ) -> None:
        """`limits`: those that it describes; None: no more than its context, as older workers."""
        self.identity = WorkerIdentity(name=name, incarnation=secrets.token_bytes(16), role=role)
        self.behaviour = Behaviour()
        self.limits = limits
        enforced = WorkerLimits.of(DescribeResponse(max_context_tokens=max_context, limits=limits))
        self.decode = FakeDecode(self.identity, slots, self.behaviour, enforced)
        self.prefill = FakePrefill(cluster.decode_of, self.decode, self.behaviour, enforced)
        self._cluster = cluster
        self.fingerprint = fingerprint
        self._max_context = max_context
        # The pool and the weight format that it reports.
        self.pool = worker_pb2.Pool(
            model="fake",
            checkpoint=b"c",
            tokenizer=cluster.tokenizer,
            kv_format="float32/16/native",
            numerics="exact",
        )
        self.weight_format = "float32"
        self.step_costs = worker_pb2.StepCosts()
        self.tls: ServerTls | None = None
        self.address = ""

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeWorker]:
        """Runs the worker until the context ends."""
        server = GrpcServer(["baton.v1.WorkerService"], tls=self.tls)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server.server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self.prefill, server.server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.decode, server.server)
        self.address = await server.start("127.0.0.1", port)
        self._cluster.workers[self.identity.name] = self
        stepping = asyncio.create_task(self.decode.run_steps())
        try:
            yield self
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)
            await server.stop(0)

    def ledger(self) -> dict[str, int]:
        """The numbers of resources that are held now."""
        return {"slots": self.decode.used_slots, "prefills": self.prefill.running}

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Any
    ) -> worker_pb2.DescribeResponse:
        if self.behaviour.over:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no engine")
        if self.behaviour.deaf:
            await asyncio.Event().wait()
        return worker_pb2.DescribeResponse(
            identity=self.identity,
            fingerprint=self.fingerprint,
            max_context_tokens=self._max_context,
            vocab_size=VOCAB,
            load=worker_pb2.Load(
                slots=self.decode.slots,
                free_slots=self.decode.slots - self.decode.used_slots - self.behaviour.other_router_slots,
                blocks=1000,
                free_blocks=1000,
                block_tokens=16,
                step_costs=self.step_costs,
            ),
            process_id=self.behaviour.process_id,
            process_space=self.behaviour.process_space,
            cache_dtype="float32",
            draining=self.behaviour.draining,
            pool=self.pool,
            weight_format=self.weight_format,
            limits=self.limits,
        )

    async def GetAudit(
        self, request: worker_pb2.GetAuditRequest, context: Any
    ) -> worker_pb2.GetAuditResponse:
        return worker_pb2.GetAuditResponse(
            report=worker_pb2.IntegrityReport(prompts_run=len(self.prefill.prompts))
        )


class FakeCluster:
    """The fakes of one test, which hand over to each other by a call."""

    def __init__(self, tokenizer: bytes = b"") -> None:
        """`tokenizer`: the digest that its workers report."""
        self.tokenizer = tokenizer
        self.workers: dict[str, FakeWorker] = {}

    @classmethod
    def like(cls, folder: Path) -> FakeCluster:
        """A cluster whose workers report the tokenizer of this model's folder."""
        return cls(TokenizerFiles.read(folder).digest)

    def decode_of(self, name: str) -> FakeDecode:
        """The decode side of a worker."""
        return self.workers[name].decode

    def ledger(self) -> dict[str, int]:
        """The sum of the workers' ledgers."""
        ledgers = [worker.ledger() for worker in self.workers.values()]
        return {key: sum(ledger[key] for ledger in ledgers) for key in ("slots", "prefills")}
