"""The typed client, both kinds: results, cancels, deadlines, errors, and that it needs nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

import baton.client
from baton.client import (
    AsyncClient,
    BatonError,
    Client,
    Completion,
    ErrorKind,
    FieldError,
    FinishReason,
    Message,
    Prompt,
    Usage,
)
from baton.client.responses import Reader
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse
from baton.v1.types_pb2 import Choices, Grammar
from tests.router.conftest import Site, SiteMaker, until
from tests.router.fake_model import expected, logprobs_of

PROMPT = [5, 6, 7]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def complete(kind: str, here: Site, prompt: Prompt, **fields: Any) -> Completion:
    """Completes a prompt with either client; the blocking one runs in a thread."""
    address = here.addresses["grpc"]
    if kind == "async":
        async with await AsyncClient.connect(address) as client:
            return await client.complete(prompt, **{**GREEDY, **fields})

    def blocking() -> Completion:
        with Client.connect(address) as client:
            return client.complete(prompt, **{**GREEDY, **fields})

    return await asyncio.to_thread(blocking)


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
async def test_a_whole_result(site: SiteMaker, kind: str) -> None:
    async with site() as here:
        answer = await complete(kind, here, PROMPT, max_tokens=6)
        assert answer.tokens == tuple(expected(PROMPT, 6))
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.usage == Usage(3, 6)
        assert answer.usage.total_tokens == 9
        text = await complete(kind, here, "hé", max_tokens=4, stop="never", n=3, seed=1)
        assert [choice.index for choice in text.choices] == [0, 1, 2]
        assert all(choice.tokens == tuple(expected(list("hé".encode()), 4)) for choice in text.choices)
        assert text.usage == Usage(3, 12)
        ids = {choice.request_id for choice in text.choices}
        assert len(ids) == 3
        assert all(len(bytes.fromhex(one)) == 16 for one in ids)
        traces = [choice.trace for choice in text.choices]
        assert {(one.prefill_worker, one.decode_worker, one.attempts) for one in traces if one} == {
            ("prefill-0", "decode-0", 1)
        }
        assert len({one.seed for one in traces if one}) == 3, "one an output"
        trace = answer.choices[0].trace
        assert trace is not None
        reached = list(trace.stages.values())
        assert reached == sorted(reached)
        assert {"admitted", "first_token", "ended"} <= trace.stages.keys()
        assert 0 < trace.stages["ended"] < 3600
        chat = await complete(kind, here, [Message("user", "hi")], max_tokens=4)
        assert chat.tokens == tuple(expected(list(b"<user>hi\n<assistant>"), 4))
        await here.quiet()


@both
async def test_every_field_is_sent(site: SiteMaker, kind: str) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "logit_bias": {4: -2.0}, "seed": 9, "logprobs": 2,
        "top_n_sigma": 1.5,
    }  # fmt: skip
    async with site() as here:
        answer = await complete(
            kind,
            here,
            PROMPT,
            max_tokens=5,
            min_tokens=2,
            stop=["q"],
            stop_token_ids=[9],
            echo=True,
            **fields,
        )
        (request,) = here.worker("prefill-0").prefill.requests
        biases = fields.pop("logit_bias")
        assert {bias.token_id: bias.bias for bias in request.sampling.logit_bias} == biases
        assert {name: getattr(request.sampling, name) for name in fields} == fields
        assert (request.limits.min_tokens, list(request.limits.stop_token_ids)) == (2, [9])
        (choice,) = answer.choices
        for ids, reported in ((choice.tokens, choice.logprobs), (PROMPT[1:], choice.prompt_logprobs)):
            assert [one.token_id for one in reported] == list(ids)
            assert [one.logprob for one in reported] == [logprobs_of(token, 0).logprob for token in ids]
            assert all(len(one.top) == 2 for one in reported)


@pytest.mark.parametrize(
    ("field", "value", "sent"),
    [
        ("json_schema", {"type": "object"}, Grammar(json_schema='{"type": "object"}')),
        ("json_schema", "true", Grammar(json_schema="true")),
        ("regex", "a+", Grammar(regex="a+")),
        ("choice", ["a", "b"], Grammar(choice=Choices(choices=["a", "b"]))),
        ("grammar", "start: /a/", Grammar(grammar="start: /a/")),
    ],
)
async def test_a_grammar_is_sent(site: SiteMaker, field: str, value: Any, sent: Grammar) -> None:
    async with site() as here:
        await complete("async", here, PROMPT, max_tokens=2, ignore_eos=False, **{field: value})
        (request,) = here.worker("prefill-0").prefill.requests
        assert request.grammar == sent
        with pytest.raises(BatonError, match="only one of"):
            await complete("async", here, PROMPT, **{"regex": "a", "grammar": "b"})


async def test_what_a_delta_says_beside_its_tokens(site: SiteMaker) -> None:
    async with (
        site() as here,
        await AsyncClient.connect(here.addresses["grpc"]) as client,
        client.generate(PROMPT, max_tokens=6, seed=9, **GREEDY) as stream,
    ):
        deltas = [delta async for delta in stream]
    count = 0
    for delta in deltas:
        assert delta.first_number == count
        count += len(delta.tokens)
    assert count == 6
    assert len({delta.request_id for delta in deltas}) == 1
    assert not any(delta.resumable for delta in deltas), "there is no journal"
    assert [delta.trace is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    assert deltas[-1].trace is not None
    assert deltas[-1].trace.seed == 9
    assert Reader(GenerateRequest()).read(GenerateResponse(resumable=True)).resumable


@both
async def test_errors_are_typed(site: SiteMaker, kind: str) -> None:
    async with site() as here:
        with pytest.raises(FieldError) as refused:
            await complete(kind, here, PROMPT, top_p=2.0)
        assert (refused.value.kind, refused.value.param) == (ErrorKind.INVALID, "top_p")
        assert not refused.value.kind.retryable
        with pytest.raises(BatonError) as unfit:
            await complete(kind, here, [-1])
        assert unfit.value.kind is ErrorKind.INVALID
        here.worker("decode-0").behaviour.step_s = 0.05
        with pytest.raises(BatonError) as late:
            await complete(kind, here, PROMPT, max_tokens=200, deadline=0.5)
        assert (late.value.kind, late.value.tokens_sent) == (ErrorKind.DEADLINE, True)
        await here.quiet()
        here.worker("decode-0").behaviour.skip_number = 3
        with pytest.raises(BatonError) as broken:
            await complete(kind, here, PROMPT)
        assert (broken.value.kind, broken.value.tokens_sent) == (ErrorKind.INTERNAL, True)
        here.worker("prefill-0").behaviour.break_prefills = 100
        with pytest.raises(BatonError) as away:
            await complete(kind, here, PROMPT)
        assert (away.value.kind, away.value.tokens_sent) == (ErrorKind.UNAVAILABLE, False)
        assert away.value.kind.retryable
        await here.quiet()


@both
async def test_no_server(kind: str) -> None:
    connecting: Any = AsyncClient.connect("127.0.0.1:1", timeout=0.2)
    if kind == "sync":
        connecting.close()
        connecting = asyncio.to_thread(Client.connect, "127.0.0.1:1", timeout=0.2)
    with pytest.raises(BatonError) as caught:
        await connecting
    assert caught.value.kind is ErrorKind.UNAVAILABLE


async def test_leaving_an_async_stream_cancels(site: SiteMaker) -> None:
    async with site() as here, AsyncClient(here.addresses["grpc"], model="fake") as client:
        decode = here.worker("decode-0")
        decode.behaviour.step_s = 0.02
        async with client.generate(PROMPT, max_tokens=200, **GREEDY) as stream:
            first = await anext(stream)
            assert first.tokens[0] == expected(PROMPT, 1)[0]
        assert [delta async for delta in stream] == []
        await until(lambda: decode.decode.cancels == 1)
        reading = asyncio.create_task(client.complete(PROMPT, max_tokens=200, **GREEDY))
        await until(lambda: decode.decode.used_slots == 1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        await until(lambda: decode.decode.cancels == 2)
        dropped = client.generate(PROMPT, max_tokens=200, **GREEDY)
        await anext(dropped)
        waiting = asyncio.create_task(_drain(dropped))
        await asyncio.sleep(0.05)
        await dropped.aclose()
        await waiting
        await here.quiet()


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_leaving_a_stream_cancels(site: SiteMaker) -> None:
    async with site() as here:
        decode = here.worker("decode-0")
        decode.behaviour.step_s = 0.02

        def leave() -> None:
            with Client(here.addresses["grpc"]) as client:
                assert client.models() == ["fake"]
                with client.generate(PROMPT, max_tokens=200, **GREEDY) as stream:
                    next(stream)
                assert list(stream) == []
                for _ in client.generate(PROMPT, max_tokens=200, **GREEDY):
                    break
                other = client.generate(PROMPT, max_tokens=200, **GREEDY)
                closing = threading.Timer(0.1, other.close)
                closing.start()
                for _ in other:
                    pass
                closing.join()

        await asyncio.to_thread(leave)
        await until(lambda: decode.decode.cancels == 3)
        await here.quiet()


async def test_the_example_of_the_docstring_runs(site: SiteMaker, capsys: pytest.CaptureFixture[str]) -> None:
    doc = baton.client.__doc__ or ""
    start = doc.index("    from baton.client")
    example = textwrap.dedent(doc[start : doc.index("\n`AsyncClient`")])
    assert len(example.split("\n    ")) + example.count("\nwith") <= 12
    async with site() as here:
        program = example.replace("localhost:50051", here.addresses["grpc"])
        assert program != example
        await asyncio.to_thread(exec, program, {})
    lines = capsys.readouterr().out.splitlines()  # a router that stops logs between them
    assert any(line.isdigit() for line in lines)


def test_it_needs_nothing_of_the_server() -> None:
    script = (
        "import sys; import baton.client\n"
        "heavy = {'torch', 'ray', 'services', 'kvtransfer', 'pydantic', 'starlette', 'redis', 'numpy'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
