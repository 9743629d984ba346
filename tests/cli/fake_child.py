"""A stand-in for a worker or a router: speaks the ready protocol and notes in $FAKE_LOG what happens to it.

    python fake_child.py (worker | router) [refuse|silent|nonsense|dies|gives-up|stubborn|grandchild] …

A router answers Generate with the bytes of its prompt's reverse, one a message, and GetStatus.
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

import grpc.aio

from baton.v1 import router_pb2, router_pb2_grpc, types_pb2


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, workers: list[str]) -> None:
        self._workers = workers

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

    async def AuditCluster(  # noqa: N802
        self, request: router_pb2.AuditClusterRequest, context: object
    ) -> router_pb2.AuditClusterResponse:
        return router_pb2.AuditClusterResponse()

    async def GetStatus(  # noqa: N802
        self, request: router_pb2.GetStatusRequest, context: object
    ) -> router_pb2.GetStatusResponse:
        answer = router_pb2.GetStatusResponse()
        for address in self._workers:
            worker = answer.workers.add(state=router_pb2.WORKER_STATE_READY).worker
            worker.address = address
            worker.identity.name = "prefill-0"
            worker.identity.role = types_pb2.WORKER_ROLE_PREFILL
            worker.audit.block_bytes.append(8192)
            worker.audit.blocks_shipped.append(2)
            worker.audit.bytes_shipped = 16384
        return answer


def note(event: str, name: str) -> None:
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
        log.write(f"{event} {name} {os.getpid()}\n")


def say(message: object) -> None:
    print(json.dumps(message), flush=True)


async def serve(kind: str, config: dict[str, object], traits: set[str]) -> None:
    name = str(config.get("name", kind))
    stop = asyncio.Event()

    def on_signal() -> None:
        note("told", name)
        if "stubborn" not in traits:
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    server = grpc.aio.server()
    if kind == "router":
        workers = config["workers"]
        assert isinstance(workers, list)
        router_pb2_grpc.add_RouterServiceServicer_to_server(FakeRouter(workers), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready = {"grpc": f"127.0.0.1:{port}"} | ({"http": "127.0.0.1:1"} if kind == "router" else {})
    say({"ready": ready})
    print("a stray line on stdout", flush=True)
    if "dies" in traits:
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if "gives-up" in traits:
        say({"error": {"kind": "internal", "message": "the engine ended"}})
        sys.exit(2)
    await stop.wait()
    await server.stop(None)
    note("ended", name)


def main() -> None:
    kind, traits = sys.argv[1], set(sys.argv[2:])
    config = json.load(sys.stdin)
    note("started", str(config.get("name", kind)))
    if "grandchild" in traits:
        child = subprocess.Popen(["sleep", "600"])
        with Path(os.environ["FAKE_LOG"]).open("a", encoding="utf-8") as log:
            log.write(f"started grandchild {child.pid}\n")
    if "refuse" in traits:
        say({"error": {"kind": "invalid", "message": "model.safetensors is missing"}})
        sys.exit(2)
    if "nonsense" in traits:
        print("hello", flush=True)
    if "silent" in traits or "nonsense" in traits:
        signal.pause()
    asyncio.run(serve(kind, config, traits))


if __name__ == "__main__":
    main()
