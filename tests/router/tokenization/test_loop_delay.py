"""Reading one request delays the router's event loop, and with it all streams, by 20 ms at most.

A real router process with running streams; its event loop's delay is recorded from before the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from tokenizers import Tokenizer

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import LogitBias, WorkerRole
from tests.router.conftest import MODEL, ids_request
from tests.router.fake_workers import FakeCluster, FakeWorker
from tests.router.test_process import Process, config, ready, start

# The documented limit.
MOST_DELAY_S = 0.020
# A delay counts as far as the router used the processor meanwhile, so a busy machine alone fails no test;
# a try that fails may have been unlucky, three in a row are not.
TRIES = 3
STREAMS = 4
# In the error of a request whose helper process was starved, which is no fault of the loop.
STARVED = "the router's host is busy"
# The model's, which decides how large a body may be, and the workers'.
MODEL_CONTEXT = 1 << 20
CONTEXT = 1 << 17
DEMO = Path(__file__).parents[3] / "baton/demo_model"


@dataclass
class Beating:
    """A router process that records its loop's delays, and clients of it."""

    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    record: Path
    worker: FakeWorker

    def longest_delay_s(self, since: float) -> float:
        """The longest delay that ended since that monotonic time."""
        delays = [tuple(map(float, line.split())) for line in self.record.read_text().splitlines()]
        return max((min(end - begin, cpu) for begin, end, cpu in delays if end > since), default=0.0)

    async def delay_of(self, job: Callable[[], Awaitable[None]]) -> float:
        """The longest delay while the job runs and shortly after; of several tries the best."""
        best = float("inf")
        for _ in range(TRIES):
            await asyncio.sleep(0.1)
            since = time.monotonic()
            await job()
            await asyncio.sleep(0.1)
            best = min(best, self.longest_delay_s(since))
            if best <= MOST_DELAY_S:
                break
        return best


@contextlib.asynccontextmanager
async def beating(folder: Path, **settings: Any) -> AsyncIterator[Beating]:
    """A router for the demo model's tokenizer with a context of a million tokens, and running streams."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, folder)
    document = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "max_position_embeddings": MODEL_CONTEXT}))
    worker = FakeWorker(
        "both-0",
        WorkerRole.WORKER_ROLE_BOTH,
        FakeCluster.like(folder),
        slots=2 * STREAMS,
        max_context=CONTEXT,
    )
    record = folder / "delays"
    record.touch()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(worker.serving())
        process = await start(
            config(folder, [worker.address], **settings),
            sys.executable,
            "-m",
            "tests.router.beating_router",
            str(record),
        )
        stack.push_async_callback(_end, process)
        addresses = await ready(process)
        worker.behaviour.step_s = 0.005
        channel = grpc.aio.insecure_channel(addresses["grpc"], options=[("grpc.max_send_message_length", -1)])
        await stack.enter_async_context(channel)
        http = httpx.AsyncClient(base_url=f"http://{addresses['http']}", timeout=120, verify=False)
        await stack.enter_async_context(http)
        streams = [asyncio.create_task(_stream(channel)) for _ in range(STREAMS)]
        for stream in streams:
            stack.callback(stream.cancel)
        yield Beating(http, channel, record, worker)
        assert not any(stream.done() for stream in streams), "a stream ended"


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _stream(channel: grpc.aio.Channel) -> None:
    async for _ in RouterServiceStub(channel).Generate(ids_request([1, 2], CONTEXT // 2)):
        pass


def post(here: Beating, path: str, body: bytes, status: int) -> Callable[[], Awaitable[None]]:
    """A job: this body is answered with this status, unless the machine is too busy to tokenise it."""

    async def job() -> None:
        response = await here.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == status or STARVED in response.text, response.text[:500]

    return job


def generate(here: Beating, request: GenerateRequest, code: grpc.StatusCode) -> Callable[[], Awaitable[None]]:
    """A job: this message is refused with this code, unless the machine is too busy, as above."""

    async def job() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in RouterServiceStub(here.channel).Generate(request):
                pass
        details = caught.value.details() or ""
        assert caught.value.code() == code or STARVED in details, details

    return job


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}, separators=(",", ":")).encode()


TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
END_ID: int = TOKENIZER.encode("<|end|>", add_special_tokens=False).ids[0]
# Around a value that is a string, and one that is a list.
CALLS = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"KEY": ', "}}\n</tool_call>"),
    "llama3": ('{"name": "f", "parameters": {"KEY": ', "}}"),
    "mistral": ('[TOOL_CALLS][{"name": "f", "arguments": {"KEY": ', "}}]"),
    "mistral_v11": ('[TOOL_CALLS]f[ARGS]{"KEY": ', "}"),
    "qwen3_coder": ("<tool_call>\n<function=f>\n<parameter=KEY>\n", "\n</function>\n</tool_call>"),
}
TYPES = {"text": {"type": "string"}, "list": {"type": "array"}}
# Parameters that lead to themselves, and to one another.
ITSELF = {"p": {"anyOf": [{"$ref": "#/properties/p"}] * 50}}
ONE_ANOTHER = {
    f"p{number}": {"anyOf": [{"$ref": f"#/properties/p{other}"} for other in range(50)]}
    for number in range(50)
}


def with_tool(properties: dict[str, Any], **fields: Any) -> bytes:
    """The body of a chat with a tool."""
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return body(messages=[{"role": "user", "content": "a"}], tools=[tool], **fields)


def repeated(unit: str, size: int) -> str:
    """A text of this size, of a unit."""
    return unit * (size // len(unit))


def writes(
    here: Beating, text: str, most: int, *, calls: int, properties: dict[str, Any] = TYPES
) -> Callable[[], Awaitable[None]]:
    """A job: the model writes a text of at most `most` tokens; the chat has `calls` calls, whole and
    streamed. `properties`: the tool's."""

    async def job() -> None:
        ids = (*TOKENIZER.encode(text, add_special_tokens=False).ids[:most], END_ID)
        behaviour = here.worker.behaviour
        behaviour.script, behaviour.script_step = ids, 32
        for stream in (False, True):
            content = with_tool(properties, max_tokens=len(ids) + 1, stream=stream)
            response = await here.http.post(
                "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 200, response.text[:500]
            assert response.text.count('"name":"f"') == calls, response.text[-500:]
            reason = "tool_calls" if calls else "stop"
            assert f'"finish_reason":"{reason}"' in response.text
        behaviour.script = ()

    return job


def outputs(here: Beating, family: str, size: int) -> dict[str, Callable[[], Awaitable[None]]]:
    """Outputs that are long in ways that parsers of calls may find hard."""
    before, after = CALLS[family]
    quote = "" if family == "qwen3_coder" else '"'
    text = f"{before.replace('KEY', 'text')}{quote}{repeated(' decode temperature', size)}{quote}{after}"
    numbers = f"{before.replace('KEY', 'list')}[{repeated('1, ', size // 8)}1]{after}"
    blanks = repeated(" ", size)
    return {
        f"{family}: a long string": writes(here, text, size, calls=1),
        f"{family}: a long list": writes(here, numbers, size, calls=1),
        f"{family}: blanks": writes(here, "x" + blanks, size // 25, calls=0),
        f"{family}: blanks where a call begins": writes(here, before[:12] + blanks, size // 25, calls=0),
    }


async def assert_no_delay(here: Beating, jobs: dict[str, Callable[[], Awaitable[None]]]) -> None:
    delays = {name: await here.delay_of(job) for name, job in jobs.items()}
    print({name: f"{delay * 1e3:.1f} ms" for name, delay in delays.items()})
    late = {name: f"{delay * 1e3:.1f} ms" for name, delay in delays.items() if delay > MOST_DELAY_S}
    assert not late, late


async def test_large_requests_do_not_delay_the_loop(tmp_path: Path) -> None:
    message = {"role": "user", "content": ""}
    refused = grpc.StatusCode.INVALID_ARGUMENT
    async with beating(tmp_path, tool_calls="qwen3_coder") as here:
        await assert_no_delay(
            here,
            {
                **outputs(here, "qwen3_coder", 10_000),
                "a parameter that leads to itself": writes(
                    here, "<function=f><parameter=p>1</function>", 100, calls=1, properties=ITSELF
                ),
                "parameters that lead to one another": post(
                    here, "/v1/chat/completions", with_tool(ONE_ANOTHER, max_tokens=1), 400
                ),
                "1 MB without a space": post(here, "/v1/completions", body(prompt="x" * 1_000_000), 400),
                "250 KB of words": post(here, "/v1/completions", body(prompt="word " * 50_000), 400),
                "100 KB without a space": post(here, "/v1/completions", body(prompt="x" * 100_000), 200),
                "60 KB of words": post(here, "/tokenize", body(prompt="word " * 12_000), 200),
                "50,000 messages": post(
                    here, "/v1/chat/completions", body(messages=[message] * 50_000, stop=["x"] * 17), 400
                ),
                "1,000 messages without a field": post(
                    here, "/v1/chat/completions", body(messages=[{}] * 1000), 400
                ),
                "100,000 biases": post(
                    here,
                    "/v1/completions",
                    body(prompt="a", logit_bias={str(token): 1 for token in range(100_000)}),
                    400,
                ),
                "400,000 empty objects": post(
                    here, "/v1/completions", b'{"odd":[' + b"{}," * 400_000 + b"{}]}", 400
                ),
                "2 million ids over gRPC": generate(here, ids_request([1000] * 2_000_000), refused),
                "100,000 biases over gRPC": generate(
                    here,
                    ids_request([1], logit_bias=[LogitBias()] * 100_000),
                    refused,
                ),
            },
        )


@pytest.mark.slow
async def test_the_largest_requests_do_not_delay_the_loop(tmp_path: Path) -> None:
    message = {"role": "user", "content": ""}
    refused, exhausted = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
    async with beating(tmp_path) as here:
        await assert_no_delay(
            here,
            {
                "1 MB without a space": post(here, "/v1/completions", body(prompt="x" * 1_000_000), 400),
                "1 MB without a space in a chat": post(
                    here,
                    "/v1/chat/completions",
                    body(messages=[{"role": "user", "content": "x" * 1_000_000}]),
                    400,
                ),
                "a prompt as long as the context": post(
                    here, "/v1/completions", body(prompt="x" * (CONTEXT - 100)), 200
                ),
                "15 MB of words": post(here, "/v1/completions", body(prompt="word " * 3_000_000), 400),
                "15 MB of ids": post(here, "/v1/completions", body(prompt=[1] * 7_500_000), 400),
                "15 MB of nothing": post(here, "/v1/completions", b"[" + b"{}," * 5_000_000 + b"{}]", 400),
                "500,000 messages": post(
                    here, "/v1/chat/completions", body(messages=[message] * 500_000), 400
                ),
                "1.2 million biases": post(
                    here,
                    "/v1/completions",
                    body(prompt="a", logit_bias={str(token): 1 for token in range(1_200_000)}),
                    400,
                ),
                "15 MB to tokenise": post(here, "/tokenize", body(prompt="word " * 3_000_000), 400),
                "15 MB to detokenise": post(here, "/detokenize", body(tokens=[1] * 7_500_000), 400),
                "20 MB": post(here, "/v1/completions", b" " * 20_000_000, 413),
                "30 million ids over gRPC": generate(here, ids_request([1] * 30_000_000), exhausted),
                "16 million ids over gRPC": generate(here, ids_request([1] * 16_000_000), refused),
                "15 MB of words over gRPC": generate(
                    here, GenerateRequest(model=MODEL, text="word " * 3_000_000), refused
                ),
                "5 million biases over gRPC": generate(
                    here,
                    GenerateRequest(
                        model=MODEL, token_ids=TokenIds(ids=[1]), logit_bias=[LogitBias()] * 5_500_000
                    ),
                    refused,
                ),
            },
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", CALLS)
async def test_the_longest_outputs_do_not_delay_the_loop(tmp_path: Path, family: str) -> None:
    async with beating(tmp_path, tool_calls=family, reasoning="think") as here:
        await assert_no_delay(here, outputs(here, family, 400_000))
