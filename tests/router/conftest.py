"""A router in this process before fake workers, and a byte-level tokenizer made on the spot."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.state.embedded import EmbeddedServer
from baton.tls.server import ServerTls
from baton.v1.admin_pb2_grpc import AdminServiceStub
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import WorkerRole
from services.common.config.router import RouterConfig
from services.router.app import Router
from services.router.lifecycle import request_traces
from services.router.workers import directory
from tests.router.fake_model import VOCAB
from tests.router.fake_workers import FakeCluster, FakeWorker
from tests.support.kept_spans import KeptSpans
from tests.support.waiting import until as until

EOS = 256
SPECIAL = 257
MODEL = "fake"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}{% if mood is defined %}[{{ mood }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 and 257 are special; ids up to VOCAB have no text."""
    alphabet = byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    return tokenizer


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@dataclass
class Site:
    """A running router, its fakes, and clients of its public and its admin gRPC port."""

    router: Router
    cluster: FakeCluster
    stub: Any
    admin: Any
    addresses: dict[str, str]

    def worker(self, name: str) -> FakeWorker:
        return self.cluster.workers[name]

    async def generate(self, request: GenerateRequest, timeout: float = 10) -> list[GenerateResponse]:
        return [response async for response in self.stub.Generate(request, timeout=timeout)]

    async def quiet(self) -> None:
        """Waits until nothing is held anywhere; fails with what still is."""
        try:
            await until(lambda: self.not_released() == {}, 20)
        except TimeoutError:
            raise AssertionError(f"not released: {self.not_released()}") from None

    def not_released(self) -> dict[str, int]:
        """The number of resources that are still held, by kind."""
        held = {
            **self.cluster.ledger(),
            "requests": self.router.dispatcher.running,
            "waiting": self.router.queue.waiting,
            "cancels": self.router.cancels.pending,
            "claimed": sum(worker.claimed_slots for worker in self.router.directory.workers),
            "reserved": sum(worker.reserved_tokens for worker in self.router.directory.workers),
            "queued": sum(worker.queued_tokens for worker in self.router.directory.workers),
            "outputs": sum(len(worker.outputs) for worker in self.router.directory.workers),
        }
        return {name: count for name, count in held.items() if count}


SiteMaker = Callable[..., contextlib.AbstractAsyncContextManager[Site]]


@pytest.fixture
def site(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> SiteMaker:
    """`async with site(prefill=1, decode=1, both=0, **RouterConfig)`. Its heart beats fast, since tests wait
    for workers that were unreachable."""
    monkeypatch.setattr(directory, "HEARTBEAT_S", 0.1)

    @contextlib.asynccontextmanager
    async def make(
        prefill: int = 1,
        decode: int = 1,
        both: int = 0,
        slots: int = 8,
        worker_tls: ServerTls | None = None,
        **settings: Any,
    ) -> AsyncIterator[Site]:
        cluster = FakeCluster.like(model_folder)
        async with contextlib.AsyncExitStack() as stack:
            roles = (
                ("prefill", WorkerRole.WORKER_ROLE_PREFILL, prefill),
                ("decode", WorkerRole.WORKER_ROLE_DECODE, decode),
                ("both", WorkerRole.WORKER_ROLE_BOTH, both),
            )
            for kind, role, count in roles:
                for index in range(count):
                    worker = FakeWorker(f"{kind}-{index}", role, cluster, slots=slots)
                    worker.tls = worker_tls
                    await stack.enter_async_context(worker.serving())
            workers = tuple(worker.address for worker in cluster.workers.values())
            stack.push_async_callback(asyncio.sleep, 0)
            yield await stack.enter_async_context(_routed(model_folder, cluster, workers, settings))

    return make


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    """The recorded spans of this test's routers, for which traces are on."""
    spans = KeptSpans()
    monkeypatch.setattr(request_traces, "configured_recorder", lambda *_: spans.recorder)
    return spans


@contextlib.asynccontextmanager
async def _routed(
    folder: Path, cluster: FakeCluster, workers: tuple[str, ...], settings: dict[str, Any]
) -> AsyncIterator[Site]:
    config = RouterConfig(
        model=str(folder),
        served_model_name=MODEL,
        workers=workers,
        **{"http_port": 0, "grpc_port": 0, "drain_s": 0.5, **settings},
    )
    router = Router(config)
    addresses = await router.start()
    try:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with (
            grpc.aio.insecure_channel(addresses["grpc"], options=options) as channel,
            grpc.aio.insecure_channel(addresses["admin"], options=options) as admin,
        ):
            if workers and "pool" not in settings:
                await asyncio.wait_for(router.readiness.wait(ready=True), 5)
            yield Site(router, cluster, RouterServiceStub(channel), AdminServiceStub(admin), addresses)
    finally:
        await router.stop(config.drain_s)


def ids_request(ids: list[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """A greedy request by token ids."""
    fields = {"temperature": 0.0, "ignore_eos": True, **fields}
    return GenerateRequest(model=MODEL, token_ids=TokenIds(ids=ids), max_tokens=max_tokens, **fields)


def tokens_of(responses: list[GenerateResponse]) -> list[int]:
    """All ids of a stream, whose numbers must have no gap and no repeat."""
    ids: list[int] = []
    for response in responses:
        assert response.first_number == len(ids)
        ids += response.token_ids
    return ids


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    """A Redis of this test alone."""
    started = await EmbeddedServer.start()
    yield started
    await started.stop()
