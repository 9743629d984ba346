"""n outputs of a prompt, lists of prompts, and what reaches the workers of each."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from baton.base.errors import ErrorKind
from baton.rpc.grpc_errors import from_status
from baton.v1.types_pb2 import LogitBias
from tests.router.conftest import SiteMaker, ids_request, tokens_of
from tests.router.fake_model import expected
from tests.router.http_client import complete, events, http

WHOLE: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.25,
    "top_n_sigma": 1.5,
    "repetition_penalty": 1.5,
    "presence_penalty": -2,
    "frequency_penalty": 2,
    "logit_bias": {"5": -100, "6": 0, "7": 1.5},
    "min_tokens": 3,
    "seed": 11,
}


async def test_every_field_reaches_prefill(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        assert (await complete(client, **WHOLE)).status_code == 200
        biases = [LogitBias(token_id=int(token), bias=bias) for token, bias in WHOLE["logit_bias"].items()]
        await here.generate(ids_request([1, 2, 3], 16, **{**WHOLE, "logit_bias": biases}))
        over_http, over_grpc = here.worker("prefill-0").prefill.requests
        sampling = over_http.sampling
        assert sampling == over_grpc.sampling
        for name in ("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "repetition_penalty", "seed"):
            assert getattr(sampling, name) == WHOLE[name]
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
        # A bias of nothing is none.
        assert {bias.token_id: bias.bias for bias in sampling.logit_bias} == {5: -100, 7: 1.5}
        assert not sampling.HasField("logprobs")
        assert over_http.limits.min_tokens == over_grpc.limits.min_tokens == 3
        await complete(client, repetition_penalty=1)
        assert not here.worker("prefill-0").prefill.requests[-1].sampling.HasField("repetition_penalty")


async def test_choices_are_prompt_major(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        fields = {"prompt": ["ab", "c"], "n": 2, "best_of": 2, "max_tokens": 5, "seed": 2**64 - 1}
        body = (await complete(client, return_token_ids=True, **fields)).json()
        want = [expected(list(text), 5) for text in (b"ab", b"ab", b"c", b"c")]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["token_ids"] for choice in body["choices"]] == want
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 20,
            "total_tokens": 23,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        seeds = sorted(request.sampling.seed for request in here.worker("prefill-0").prefill.requests)
        assert seeds == [0, 0, 2**64 - 1, 2**64 - 1]
        got: dict[int, list[int]] = {index: [] for index in range(4)}
        usage = None
        options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
        async for chunk in events(client, **options, **fields):
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                got[choice["index"]] += choice["token_ids"]
        assert list(got.values()) == want
        assert usage == body["usage"]
        too_many = await complete(client, prompt=["a"] * 256, n=5)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        await here.quiet()


async def test_choices_over_grpc(site: SiteMaker) -> None:
    async with site() as here:
        responses = await here.generate(ids_request([1, 2], 6, n=3, seed=5))
        by_index = {index: [one for one in responses if one.index == index] for index in range(3)}
        for index, answers in by_index.items():
            assert tokens_of(answers) == expected([1, 2], 6)
            assert answers[-1].finish_reason
            assert answers[-1].trace.seed == 5 + index
        # The usage is of all together, and stands at the very end.
        assert [one.HasField("usage") for one in responses] == [False] * (len(responses) - 1) + [True]
        usage = responses[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, 18)
        await here.quiet()


async def test_one_failed_choice_ends_them_all(site: SiteMaker) -> None:
    async with site(slots=4) as here:
        here.worker("decode-0").behaviour.step_s = 0.01
        here.worker("decode-0").behaviour.skip_number = 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.generate(ids_request([1, 2], 100, n=4))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        await here.quiet()


async def test_a_stop_string_counts_from_min_tokens_on(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for prompt in ([first, 5] for first in range(300)):
            output = expected(prompt, 16)
            if all(97 <= token < 123 for token in output[1:3]):
                break
        stop = bytes(output[1:3]).decode()
        fields = {"prompt": prompt, "max_tokens": 16, "stop": [stop], "return_token_ids": True}
        early = (await complete(client, **fields)).json()["choices"][0]
        assert (early["token_ids"], early["finish_reason"]) == (output[:3], "stop")
        late = (await complete(client, min_tokens=3, **fields)).json()["choices"][0]
        assert late["token_ids"][:3] == output[:3]
        assert len(late["token_ids"]) > 3
        assert stop in late["text"]


async def test_a_deadline_frees_everything(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.generate(ids_request([1, 2], 200, n=2), timeout=0.5)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await here.quiet()


async def test_an_error_reports_that_another_output_sent_tokens(site: SiteMaker) -> None:
    """Two outputs need one slot: the second never begins, and its error ends the call."""
    async with site(slots=1, queue_timeout_s=0.3) as here:
        here.worker("decode-0").behaviour.step_s = 0.02
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await here.generate(ids_request([1, 2, 3], 200, n=2))
        metadata = late.value.trailing_metadata()
        error = from_status(late.value.code(), late.value.details(), metadata or ())  # type: ignore[arg-type]
        assert (error.kind, error.tokens_sent) == (ErrorKind.OVERLOADED, True)
        await here.quiet()
