"""A stand-in for a worker or a router: speaks the ready protocol and notes in $FAKE_LOG what happens to it.

    python fake_child.py (worker | router) [refuse|silent|nonsense|dies|dies-once|gives-up|stubborn|
                                            grandchild|replaced|refuses-second|silent-second] …

A worker dies, or reports that it was replaced, once it was asked who it is. A router notes the lists of
workers that it receives; it answers Generate with the bytes of its prompt's reverse, one a message, and
GetStatus. The traits of the second start do not hold for the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio

from baton.v1 import (
    admin_pb2,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self) -> None:
        self.workers: list[str] = []

    async def follow(self) -> None:
        """Follows the list of workers on stdin."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            message = json.loads(line)
            if "workers" in message:
                self.workers[:] = message["workers"]
                note("workers", "|".join(self.workers) or "none")
            if "store_restarts" in message:
                note("store-restarts", str(message["store_restarts"]))

    async def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        ids = list(request.text.encode()) or list(request.token_ids.ids) or [65]
        for number in range(request.max_tokens):
            token = ids[-1 - number % len(ids)]
            yield router_pb2.GenerateResponse(first_number=number, token_ids=[token], text=chr(token))
        yield router_pb2.GenerateResponse(
            finish_reason=types_pb2.FINISH_REASON_LENGTH,
            usage=router_pb2.Usage(prompt_tokens=len(ids), completion_tokens=request.max_tokens),
            trace=router_pb2.RequestTrace(
                prefill_worker="prefill-0", decode_worker="decode-0", attempts=1, kv_bytes_shipped=16384
            ),
        )

    async def ListModels(  # noqa: N802
        self, request: router_pb2.ListModelsRequest, context: object
    ) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse()

    async def GetStatus(  # noqa: N802
        self, request: router_pb2.GetStatusRequest, context: object
    ) -> router_pb2.GetStatusResponse:
        return router_pb2.GetStatusResponse()


def add_admin(server: grpc.aio.Server, workers: list[str]) -> None:
    """AdminService's GetStatus, and nothing else of it."""

    async def get_status(
        request: admin_pb2.AdminServiceGetStatusRequest, context: object
    ) -> admin_pb2.AdminServiceGetStatusResponse:
        answer = admin_pb2.AdminServiceGetStatusResponse(grpc_address="127.0.0.1:1")
        for address in workers:
            worker = answer.workers.add(state=admin_pb2.WORKER_STATE_READY).worker
            worker.address = address
            worker.identity.name = "prefill-0"
            worker.identity.role = types_pb2.WORKER_ROLE_PREFILL
            worker.report.block_bytes.append(8192)
            worker.report.blocks_shipped.append(2)
            worker.report.bytes_shipped = 16384
        return answer

    handler = grpc.unary_unary_rpc_method_handler(
        get_status,
        request_deserializer=admin_pb2.AdminServiceGetStatusRequest.FromString,
        response_serializer=admin_pb2.AdminServiceGetStatusResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler("baton.v1.AdminService", {"GetStatus": handler})
    server.add_generic_rpc_handlers((handlers,))


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.met = asyncio.Event()

    async def Describe(  # noqa: N802
        self, request: worker_pb2.DescribeRequest, context: object
    ) -> worker_pb2.DescribeResponse:
        self.met.set()
        return worker_pb2.DescribeResponse(identity=types_pb2.WorkerIdentity(incarnation=b"i" * 16))

    async def GetAudit(  # noqa: N802
        self, request: worker_pb2.GetAuditRequest, context: object
    ) -> worker_pb2.GetAuditResponse:
        return worker_pb2.GetAuditResponse(report=worker_pb2.IntegrityReport(front_pid=os.getpid()))


def starts(name: str) -> int:
    """The number of starts of the child so far, this one included."""
    lines = Path(os.environ["FAKE_LOG"]).read_text(encoding="utf-8").splitlines()
    return sum(line.startswith(f"started {name} ") for line in lines)


def note(event: str, name: str) -> None:
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
        log.write(f"{event} {name} {os.getpid()}\n")


def say(message: object) -> None:
    print(json.dumps(message), flush=True)


async def serve(kind: str, config: dict[str, object], traits: set[str]) -> None:
    name = str(config.get("name", kind))
    stop = asyncio.Event()

    def on_signal() -> None:
        note("reported", name)
        if "stubborn" not in traits:
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    server = grpc.aio.server()
    router, worker = FakeRouter(), FakeWorker()
    if kind == "router":
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
        add_admin(server, router.workers)
    else:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port(f"127.0.0.1:{config.get('grpc_port', 0)}")
    if port == config.get("grpc_port"):
        note(f"at-{port}", name)
    await server.start()
    ready = {"grpc": f"127.0.0.1:{port}"}
    if kind == "router":  # one server plays all of its ports
        ready |= {"http": "127.0.0.1:1", "admin": f"127.0.0.1:{port}", "admin_http": "127.0.0.1:2"}
    say({"ready": ready})
    print("a stray line on stdout", flush=True)
    following = asyncio.create_task(router.follow()) if kind == "router" else None
    if "dies" in traits or ("dies-once" in traits and starts(name) == 1):
        if kind == "worker":
            await worker.met.wait()
        await asyncio.sleep(0.5)  # READY is printed meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    if "replaced" in traits:
        await worker.met.wait()
        await asyncio.sleep(0.5)  # READY is printed meanwhile
        say({"error": {"kind": "conflict", "message": "a newer one has registered"}})
        sys.exit(2)
    if "gives-up" in traits:
        say({"error": {"kind": "internal", "message": "the engine ended"}})
        sys.exit(2)
    await stop.wait()
    if following is not None:
        following.cancel()
    await server.stop(None)
    note("ended", name)


def main() -> None:
    kind, traits = sys.argv[1], set(sys.argv[2:])
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        config = json.loads(stdin.readline())
    note("started", str(config.get("name", kind)))
    note("state", (config.get("state") or {}).get("redis_url", "none"))
    if config.get("restarts"):
        note(f"restart-{config['restarts']}", str(config["name"]))
    if "grandchild" in traits:
        child = subprocess.Popen(["sleep", "600"])
        with Path(os.environ["FAKE_LOG"]).open("a", encoding="utf-8") as log:
            log.write(f"started grandchild {child.pid}\n")
    second = starts(str(config.get("name", kind))) == 2
    if "refuse" in traits or ("refuses-second" in traits and second):
        say({"error": {"kind": "invalid", "message": "model.safetensors is missing"}})
        sys.exit(2)
    if "nonsense" in traits:
        print("hello", flush=True)
    if "silent" in traits or "nonsense" in traits or ("silent-second" in traits and second):
        signal.pause()
    asyncio.run(serve(kind, config, traits))


if __name__ == "__main__":
    main()
