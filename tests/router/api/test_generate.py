"""gRPC Generate through fake workers: tokens, text, usage, trace."""

from __future__ import annotations

import asyncio

from baton.v1.router_pb2 import ListModelsRequest, Stage
from baton.v1.types_pb2 import FinishReason
from services.router.workers.token_stream import BATCH
from tests.router.conftest import SiteMaker, ids_request, tokens_of
from tests.router.fake_decode import BYTES_PER_TOKEN
from tests.router.fake_model import expected
from tests.router.fake_prefill import EXPOSED_NS


async def test_tokens_usage_and_trace(site: SiteMaker) -> None:
    async with site() as here:
        prompt = [5, 6, 7]
        responses = await here.generate(ids_request(prompt, 12, seed=99))
        assert tokens_of(responses) == expected(prompt, 12)
        last = responses[-1]
        assert last.finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 12)
        trace = last.trace
        assert (trace.prefill_worker, trace.decode_worker, trace.attempts) == ("prefill-0", "decode-0", 1)
        assert trace.kv_bytes_shipped == BYTES_PER_TOKEN * 3
        assert trace.handoff_exposed_ns == EXPOSED_NS
        assert trace.seed == 99
        stages = [time.stage for time in trace.stages]
        assert stages == [
            Stage.STAGE_ADMITTED,
            Stage.STAGE_RESERVED,
            Stage.STAGE_PREFILLING,
            Stage.STAGE_FIRST_TOKEN,
            Stage.STAGE_HANDED_OFF,
            Stage.STAGE_DECODING,
            Stage.STAGE_ENDED,
        ]
        offsets = [time.offset_ns for time in trace.stages]
        assert offsets == sorted(offsets)
        assert all(not response.finish_reason for response in responses[:-1])
        await here.quiet()


async def test_first_token_ends_the_request(site: SiteMaker) -> None:
    async with site() as here:
        responses = await here.generate(ids_request([5, 6, 7], 1))
        assert tokens_of(responses) == expected([5, 6, 7], 1)
        assert responses[-1].trace.kv_bytes_shipped == 0
        assert responses[-1].trace.handoff_exposed_ns == 0
        await here.quiet()


async def test_role_both_serves_alone(site: SiteMaker) -> None:
    async with site(prefill=0, decode=0, both=1) as here:
        responses = await here.generate(ids_request([1, 2], 6))
        assert tokens_of(responses) == expected([1, 2], 6)
        trace = responses[-1].trace
        assert trace.prefill_worker == trace.decode_worker == "both-0"
        await here.quiet()


async def test_many_at_once_use_every_worker(site: SiteMaker) -> None:
    async with site(prefill=2, decode=2) as here:
        prompts = [[index, index + 1, 3] for index in range(40)]
        answers = await asyncio.gather(*(here.generate(ids_request(prompt, 20)) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert tokens_of(answer) == expected(prompt, 20)
        for name in ("prefill-0", "prefill-1"):
            assert here.worker(name).prefill.prompts
        for name in ("decode-0", "decode-1"):
            assert here.worker(name).decode.reserves
            assert not here.worker(name).prefill.prompts
            assert here.worker(name).decode.most_slots_used <= 8
        await here.quiet()


async def test_a_step_with_more_sequences_than_a_batch(site: SiteMaker) -> None:
    async with site(slots=40) as here:
        here.worker("decode-0").behaviour.steps_from = 40
        prompts = [[index, 3] for index in range(40)]
        answers = await asyncio.gather(*(here.generate(ids_request(prompt, 10)) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert tokens_of(answer) == expected(prompt, 10)
        assert here.worker("decode-0").decode.most_slots_used == 40 > 2 * BATCH
        await here.quiet()


async def test_models(site: SiteMaker) -> None:
    async with site() as here:
        models = (await here.stub.ListModels(ListModelsRequest())).models
        assert [(model.id, model.max_context_tokens) for model in models] == [("fake", 256)]
