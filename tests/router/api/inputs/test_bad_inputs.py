"""Inputs that have broken other servers get the same verdict from both APIs, and reach no worker.

The largest of them are tokenised in a helper process. `-s` prints how long the slowest answers took.
"""

from __future__ import annotations

import json

from baton.base.errors import ErrorKind, FieldError
from baton.rpc.grpc_errors import from_status
from tests.router.api.both_apis import both_apis, kind_of
from tests.router.api.inputs.bad_inputs import CASES, CONTEXT, MIB, body, message
from tests.router.conftest import SiteMaker, ids_request

_STATUS = {ErrorKind.INVALID: 400, ErrorKind.NOT_FOUND: 404}


async def test_both_apis_refuse_alike_and_no_worker_is_called(site: SiteMaker) -> None:
    async with both_apis(site) as both:
        for warm in (body(prompt="a" * 70_000), body(prompt="a" * MIB), body()):  # starts both helpers
            await both.post("warm", warm)
        prompts = len(both.here.worker("prefill-0").prefill.prompts)
        both.slowest.clear()
        for name, (data, serialised, kind) in CASES.items():
            answer = await both.post(name, data)
            assert answer.status_code == _STATUS[kind], (name, answer.text[:300])
            assert answer.json()["error"]["message"]
            assert len(answer.content) < 2000, name  # nothing of the request is echoed
            if serialised is not None:
                error = await both.generate(name, serialised)
                assert error is not None, name
                assert kind_of(error) is kind, (name, error)
        slowest = sorted(both.slowest.items(), key=lambda item: -item[1])
        print("slowest refusals, ms:", {name: round(ms, 1) for name, ms in slowest[:8]})
        assert len(both.here.worker("prefill-0").prefill.prompts) == prompts
        assert not any(worker.decode.reserves[1:] for worker in both.here.cluster.workers.values())
        assert (await both.post("good", body())).status_code == 200
        assert await both.generate("good", message()) is None
        await both.here.quiet()


async def test_many_parts_are_read_in_a_helper_process(site: SiteMaker) -> None:
    """A body of a few kilobytes may take longer to validate than other requests can wait."""
    async with both_apis(site) as both:
        for parts, helpers in ((1000, 0), (1100, 1)):
            odd = json.dumps([[]] * parts).encode()
            assert (await both.post("parts", body()[:-1] + b', "odd": ' + odd + b"}")).status_code == 200
            assert len(both.here.router.tokenizer.processes.pids) == helpers


async def test_roles_are_the_same_to_tokenize(site: SiteMaker) -> None:
    """A template may copy a role into the prompt."""
    async with both_apis(site) as both:
        for role, status in (("robot", 400), ("user", 200)):
            messages = json.dumps({"messages": [{"role": role, "content": "a"}]}).encode()
            answer = await both.post("role", messages, "/tokenize")
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["param"] == "messages"


async def test_of_a_text_that_is_too_long_other_fields_are_judged_first(site: SiteMaker) -> None:
    long = "a" * 100_000
    async with both_apis(site) as both:
        for fields, param in (({}, "prompt"), ({"min_p": -1.0}, "min_p"), ({"stop": [""]}, "stop")):
            answer = await both.post("long", body(prompt=long, **fields))
            assert answer.json()["error"]["param"] == param
            error = await both.generate("long", message(text=long, **fields))
            assert error is not None
            refused = from_status(error.code(), error.details(), error.trailing_metadata())  # type: ignore[arg-type]
            assert isinstance(refused, FieldError)
            assert refused.param == param


async def test_a_prompt_that_just_fits_is_served(site: SiteMaker) -> None:
    ids = [1] * (CONTEXT - 1)
    async with both_apis(site) as both:
        assert (await both.post("fits", body(prompt=ids, max_tokens=1))).status_code == 200
        assert await both.generate("fits", ids_request(ids, 1).SerializeToString()) is None
