"""Prompts as long as the model's context take a bounded part of the router's memory, however many come."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import WorkerRole
from tests.router.api.inputs.test_answer_size import forget_peak, peak_bytes
from tests.router.conftest import MODEL, ids_request
from tests.router.fake_workers import FakeCluster, FakeWorker
from tests.router.test_process import config, ready, start

PROMPTS = 8
# Bytes by which a router's memory may grow for each token of a prompt. An id takes four bytes in the request
# that was received and four in the one that is sent to prefill; conversions copy both.
BYTES_A_TOKEN = 32
SLACK_BYTES = 4 << 20


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("text", 32_768),
        *(pytest.param(kind, 131_072, marks=pytest.mark.slow) for kind in ("ids", "text", "grpc")),
    ],
)
async def test_full_contexts(model_folder: Path, tmp_path: Path, kind: str, context: int) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "max_position_embeddings": context}))
    both, tokens = WorkerRole.WORKER_ROLE_BOTH, context - 2
    worker = FakeWorker("both-0", both, FakeCluster.like(folder), slots=PROMPTS, max_context=context)
    async with worker.serving():
        process = await start(config(folder, [worker.address], log_level="error"))
        addresses = await ready(process)
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": 2}
        asked["prompt"] = [7] * tokens if kind == "ids" else "a" * tokens
        async with (
            httpx.AsyncClient(base_url=f"http://{addresses['http']}", timeout=300, verify=False) as client,
            grpc.aio.insecure_channel(addresses["grpc"]) as channel,
        ):
            stub = RouterServiceStub(channel)

            async def one() -> None:
                if kind == "grpc":
                    outputs = [output async for output in stub.Generate(ids_request([7] * tokens, 2))]
                    assert sum(len(output.token_ids) for output in outputs) == 2
                    return
                response = await client.post("/v1/completions", json=asked)
                assert response.status_code == 200, response.text[:500]
                assert response.json()["usage"]["total_tokens"] == context

            await one()
            forget_peak(process.pid)
            before = peak_bytes(process.pid)
            await asyncio.gather(*(one() for _ in range(PROMPTS)))
            grown = peak_bytes(process.pid) - before
        print(f"{kind}: {PROMPTS} prompts of {tokens:,} tokens, router's peak + {grown:,} bytes")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert grown < SLACK_BYTES + BYTES_A_TOKEN * PROMPTS * tokens
