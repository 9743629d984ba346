"""Guided decoding through a real cluster: every kind of grammar, over both protocols, greedy and sampled."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from jsonschema import validate

from baton.v1.types_pb2 import Choices, Grammar
from tests.e2e.cluster import MODEL, Cluster, assert_all_free
from tests.e2e.completions import complete

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
WORDS = ["red", "green", "greenish"]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_every_kind_of_grammar_over_both_protocols(cluster: Cluster, temperature: float) -> None:
    kinds: list[tuple[dict[str, Any], Grammar]] = [
        ({"choice": WORDS}, Grammar(choice=Choices(choices=WORDS))),
        ({"regex": "[a-f]{6}[0-9]{2}"}, Grammar(regex="[a-f]{6}[0-9]{2}")),
        ({"json": SCHEMA}, Grammar(json_schema=json.dumps(SCHEMA))),
        ({"grammar": 'start: "<" /[xyz]/ ">"'}, Grammar(grammar='start: "<" /[xyz]/ ">"')),
    ]
    common: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 200}
    async with cluster.stub() as stub, cluster.http() as client:
        for fields, grammar in kinds:
            answer = await cluster.generate(stub, PROMPT, grammar=grammar, **common)
            whole = await complete(client, PROMPT, structured_outputs=fields, **common)
            streamed = await complete(client, PROMPT, stream=True, structured_outputs=fields, **common)
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
    """With several outputs a prompt, logprobs, penalties, and others that no grammar guides."""
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
