"""Guided decoding through a real cluster: every kind of grammar, over both protocols, greedy and sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from jsonschema import validate

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.types_pb2 import Choices, Grammar
from models.demo_training.evaluate import DEMO_MODEL
from tests.e2e.support.cluster import MODEL, Answer, Cluster, assert_all_free, baton_up, descendants
from tests.e2e.support.completions import complete
from tests.support.json_schemas import Schema, schemas, validator_of

PROMPT = [7, 8, 9, 10, 11, 12]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
STREAMS = 32
WORDS = ["red", "green", "greenish"]


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
async def test_every_kind_of_grammar_over_both_protocols(cluster: Cluster, temperature: float) -> None:
    kinds: list[tuple[dict[str, Any], Grammar]] = [
        ({"choice": WORDS}, Grammar(choice=Choices(choices=WORDS))),
        ({"regex": "[a-f]{6}[0-9]{2}"}, Grammar(regex="[a-f]{6}[0-9]{2}")),
        ({"json": SCHEMA}, Grammar(json_schema=json.dumps(SCHEMA))),
        ({"grammar": 'start: "<" /[xyz]/ ">"'}, Grammar(grammar='start: "<" /[xyz]/ ">"')),
    ]
    common: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 200}
    async with cluster.stub() as stub, cluster.http() as client:

        async def one(fields: dict[str, Any], grammar: Grammar) -> None:
            answer, whole, streamed = await asyncio.gather(
                cluster.generate(stub, PROMPT, grammar=grammar, **common),
                complete(client, PROMPT, structured_outputs=fields, **common),
                complete(client, PROMPT, stream=True, structured_outputs=fields, **common),
            )
            assert whole.only == streamed.only
            assert (
                (whole.only.token_ids, whole.only.finish)
                == (answer.token_ids, "stop")
                == (
                    answer.token_ids,
                    answer.finish,
                )
            )
            check(fields, answer.text)

        # At once: outputs that share their steps take less processor time.
        await asyncio.gather(*(one(*kind) for kind in kinds))
    await assert_all_free(cluster, within_s=5)


def check(fields: dict[str, Any], text: str) -> None:
    """Raises AssertionError or jsonschema's ValidationError where a text is not as asked."""
    match fields:
        case {"choice": words}:
            assert text in words
        case {"regex": pattern}:
            assert re.fullmatch(pattern, text)
        case {"json": schema}:
            validate(json.loads(text), schema)
        case _:
            assert re.fullmatch("<[xyz]>", text)


async def test_guided_and_free_outputs_in_one_batch(cluster: Cluster) -> None:
    """The batch has several outputs a prompt, logprobs, penalties, and outputs that no grammar guides."""
    async with cluster.http() as client:
        alone = await complete(client, PROMPT, seed=3, max_tokens=40, ignore_eos=True)
        guided: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "max_tokens": 300,
            "repetition_penalty": 1.1,
            "logprobs": 2,
        }
        free, *rest = await asyncio.gather(
            complete(client, PROMPT, seed=3, max_tokens=40, ignore_eos=True),
            *(complete(client, [*PROMPT, number], n=3, seed=number, **guided) for number in range(6)),
        )
    assert free.only == alone.only, "a free output is as it is alone"
    texts = {choice.text for one in rest for choice in one.choices.values()}
    assert len(texts) > 12, "each output has a seed of its own"
    for text in texts:
        validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_outputs_of_random_schemas_are_valid(cluster: Cluster, temperature: float) -> None:
    await prove(cluster, schemas(16, seed=2), temperature)


@pytest.mark.slow
async def test_outputs_of_300_random_schemas_on_the_demo_model() -> None:
    with baton_up(DEMO_MODEL, "--slots", str(STREAMS)) as demo:
        for temperature in (0.0, 1.0):
            print(f"temperature {temperature}:", await prove(demo, schemas(300, seed=1), temperature))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [("--both", "1"), ("--prefill", "1", "--decode", "1")])
async def test_outputs_of_random_schemas_on_a_gpu(workers: tuple[str, ...]) -> None:
    flags = ("--device", "cuda", "--gpu-memory", "0.3", "--slots", str(STREAMS), *workers)
    with baton_up(DEMO_MODEL, *flags) as on_gpu:
        for temperature in (0.0, 1.0):
            print(f"temperature {temperature}:", await prove(on_gpu, schemas(300, seed=1), temperature))


async def prove(cluster: Cluster, cases: Sequence[Schema], temperature: float) -> str:
    """Has a document written for each schema, STREAMS at a time. All that end by themselves must be valid,
    and at most 2 % may reach 512 tokens. Returns what was counted."""
    streams, ended, tokens = asyncio.Semaphore(STREAMS), 0, 0
    async with cluster.stub() as stub:

        async def one(number: int, schema: Schema) -> None:
            nonlocal ended, tokens
            grammar, fields = Grammar(json_schema=json.dumps(schema)), {"max_tokens": 512, "seed": number}
            async with streams:
                answer = await cluster.generate(
                    stub, [*PROMPT, number], grammar=grammar, temperature=temperature, **fields
                )
            tokens += len(answer.token_ids)
            if answer.finish == "stop":
                ended += 1
                validator_of(schema).validate(json.loads(answer.text))

        async with asyncio.TaskGroup() as tasks:
            for number, schema in enumerate(cases):
                tasks.create_task(one(number, schema))
    assert len(cases) - ended <= 0.02 * len(cases)
    await assert_all_free(cluster, within_s=5)
    return f"{ended} of {len(cases)} ended by themselves, all valid; {tokens} tokens"


@pytest.mark.slow
async def test_a_killed_mask_process_costs_no_output(cluster: Cluster) -> None:
    """Guided outputs go on with another attempt, from the tokens they had; free outputs do not notice."""
    async with cluster.stub() as stub:
        common: dict[str, Any] = {"seed": 4, "max_tokens": 100}
        guided = {**common, "grammar": Grammar(regex="[a-z ]{600}")}
        prompts = [[*PROMPT, number] for number in range(4)]

        async def ask() -> tuple[list[Answer], Answer]:
            free = cluster.generate(stub, PROMPT, ignore_eos=True, **common)
            *answers, last = await asyncio.gather(
                *(cluster.generate(stub, prompt, **guided) for prompt in prompts), free
            )
            return answers, last

        expected, free = await ask()
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.2)
        for pid in mask_processes(cluster):
            os.kill(pid, signal.SIGKILL)
        answers, undisturbed = await asking
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert undisturbed.token_ids == free.token_ids
    attempts = [answer.last.trace.attempts for answer in answers if answer.last is not None]
    assert max(attempts) > 1, "the kill took effect"
    assert undisturbed.last is not None
    assert undisturbed.last.trace.attempts == 1
    await assert_all_free(cluster, within_s=5)


def mask_processes(cluster: Cluster) -> list[int]:
    """Ids of the cluster's mask processes."""
    found = []
    for pid in descendants(cluster.process.pid):
        with contextlib.suppress(OSError):
            if "services.grammar.process" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


async def test_clients_that_leave_leave_nothing(cluster: Cluster) -> None:
    request = GenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=PROMPT), max_tokens=200, grammar=Grammar(regex="[a-z ]{300}")
    )
    async with cluster.stub() as stub:

        async def one(most: int) -> None:
            call, received = stub.Generate(request, timeout=60), 0
            async for message in call:
                received += len(message.token_ids)
                if received > most:
                    call.cancel()
                    return

        await asyncio.gather(*(one(3 * number) for number in range(8)))
    await assert_all_free(cluster, within_s=5)


@pytest.mark.slow
async def test_hostile_grammars_disturb_no_other_request(cluster: Cluster) -> None:
    """Each ends, in an error of its client or at max_tokens; what runs beside them is as it is alone."""
    nested = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    exponential = {"$defs": {**nested, "d40": {"type": "string"}}, "$ref": "#/$defs/d0"}
    recursive = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    patterns = [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(2, 14)]
    hostile = [
        Grammar(json_schema=json.dumps(exponential)),
        Grammar(json_schema=json.dumps(recursive)),
        Grammar(json_schema='{"type":"array","items":' * 2000 + "{}" + "}" * 2000),
        Grammar(json_schema=json.dumps({"enum": [f"value {number}" for number in range(8000)]})),
        Grammar(json_schema=json.dumps({"allOf": patterns})),
        Grammar(grammar='start: a\na: a "x" | a a | "y" a | "y"'),
        Grammar(regex="((a{1,100}){1,100}){1,100}b"),
        Grammar(regex="a{1000000}"),
    ]
    async with cluster.stub() as stub:
        common: dict[str, Any] = {"seed": 9, "max_tokens": 40}

        async def others() -> list[list[int]]:
            grammar = Grammar(json_schema=json.dumps(SCHEMA))
            answers = await asyncio.gather(
                *(cluster.generate(stub, [*PROMPT, n], grammar=grammar, **common) for n in range(4)),
                *(cluster.generate(stub, [*PROMPT, n], ignore_eos=True, **common) for n in range(4)),
            )
            return [answer.token_ids for answer in answers]

        async def one(grammar: Grammar) -> str:
            try:
                return (await cluster.generate(stub, PROMPT, grammar=grammar, **common)).finish
            except grpc.aio.AioRpcError as error:
                return error.code().name

        alone = await others()
        beside, *ends = await asyncio.gather(others(), *(one(grammar) for grammar in hostile))
    assert beside == alone
    assert set(ends) <= {"stop", "length", "INVALID_ARGUMENT"}
    assert "INVALID_ARGUMENT" in ends
    await assert_all_free(cluster, within_s=5)


# Overflows the stack of whoever compiles it.
DEEP = "start: R0\n" + "".join(f'R{n}: "a" | ("b" ("c" R{n + 1} "d")+ "e")*\n' for n in range(1990))
CRASHING = Grammar(grammar=f'{DEEP}R1990: "a"')
# Takes 200 MB and, with a large vocabulary, a second.
EXPENSIVE = Grammar(regex="(a{1000}){1000}")


async def test_a_grammar_that_breaks_its_compiler_is_its_clients_error_and_nobody_elses(
    cluster: Cluster,
) -> None:
    """Refused in one attempt, again and again, while guided outputs go on as they do alone."""
    async with cluster.stub() as stub:
        common: dict[str, Any] = {"seed": 9, "max_tokens": 60, "grammar": Grammar(regex="[a-z ]{600}")}

        async def others() -> list[Answer]:
            return await asyncio.gather(*(cluster.generate(stub, [*PROMPT, n], **common) for n in range(3)))

        alone, processes = await others(), set(mask_processes(cluster))
        beside = asyncio.create_task(others())
        for grammar in (CRASHING, EXPENSIVE, CRASHING):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.generate(stub, PROMPT, grammar=grammar, max_tokens=4)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
        undisturbed = await beside
    assert [answer.token_ids for answer in undisturbed] == [answer.token_ids for answer in alone]
    attempts = [answer.last.trace.attempts for answer in undisturbed if answer.last is not None]
    assert attempts == [1, 1, 1]
    assert set(mask_processes(cluster)) == processes
    await assert_all_free(cluster, within_s=5)


async def test_choices_of_any_character_and_schemas_with_annotations(cluster: Cluster) -> None:
    async with cluster.http() as client:
        for text in ("a\x7fb", "a\x01b\nc\u2028\\\"'/"):
            answer = await complete(client, PROMPT, structured_outputs={"choice": [text]}, max_tokens=60)
            assert answer.only.text == text
        schema = {"type": "string", "maxLength": 3, "format": "password", "$schema": "https://example.com/s"}
        answer = await complete(client, PROMPT, structured_outputs={"json": schema}, max_tokens=60)
        assert isinstance(json.loads(answer.only.text), str)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": {"type": "objec"}}}, "Invalid type"),
    ({"structured_outputs": {"regex": "("}}, "unclosed group"),
    ({"structured_outputs": {"choice": ["ab"]}, "min_tokens": 10}, "allows no token"),
    ({"structured_outputs": {"choice": ["ab"]}, "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_no_grammar_can_do_is_an_error_of_the_client(cluster: Cluster, stream: bool) -> None:
    async with cluster.http() as client:
        for fields, reason in REFUSED:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "stream": stream, **fields}
            response = await client.post("/v1/completions", json=body)
            assert reason in response.text
            assert "invalid_request_error" in response.text
            # One whose first tokens were sent ends with an error event.
            sent = stream and "min_tokens" in fields
            assert response.status_code == (200 if sent else 400)
    await assert_all_free(cluster, within_s=5)
