"""The table of fields covers what OpenAI documents and what bodies use; its verdicts are those of the API."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from baton.request_fields.field import Treatment
from services.router.formats.field_table import CHAT, COMPLETIONS, RESPONSES, TABLES, FieldTable
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.openai.fields import Body
from services.router.formats.openai.tokenize_bodies import DetokenizeBody, TokenizeBody
from services.router.formats.responses.body import ResponsesBody
from tests.router.conftest import MODEL, SiteMaker
from tests.router.http_client import http

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "a", "max_output_tokens": 1}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": RESPONSE,
}


@pytest.mark.parametrize("path", list(TABLES))
def test_bodies_have_the_fields_that_are_used(path: str) -> None:
    used = {name for name, field in TABLES[path].items() if field.treatment is Treatment.USED}
    assert used == set(BODIES[path].model_fields)
    assert BODIES[path].table is TABLES[path]


@pytest.mark.parametrize(
    ("table", "params"),
    [
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (CHAT, chat_create_params.CompletionCreateParamsBase),
        (RESPONSES, response_create_params.ResponseCreateParamsBase),
    ],
    ids=["completions", "chat", "responses"],
)
def test_every_field_of_openais_client_is_in_the_table(table: FieldTable, params: type) -> None:
    assert set(get_type_hints(params)) - set(table) == set()


@pytest.mark.parametrize("path", list(ASKED))
async def test_each_field_meets_its_treatment(site: SiteMaker, path: str) -> None:
    """Every field that is not used, at an odd value, at null, and at its neutral values."""
    async with site() as here, http(here) as client:
        for name, field in TABLES[path].items():
            if field.treatment is Treatment.USED:
                continue
            odd = await client.post(path, json={**ASKED[path], name: {"odd": [1]}})
            if field.treatment is Treatment.NO_EFFECT:
                assert odd.status_code == 200, (name, odd.text)
            else:
                error = odd.json()["error"]
                assert (odd.status_code, error["param"], error["code"]) == (
                    400,
                    name,
                    "unsupported_parameter",
                )
        unused = {name: one for name, one in TABLES[path].items() if one.treatment is not Treatment.USED}
        for values in (dict.fromkeys(unused), *_neutral(unused)):
            answer = await client.post(path, json={**ASKED[path], **values})
            assert answer.status_code == 200, (values, answer.text)
            assert "x-baton-ignored-fields" not in answer.headers


def _neutral(table: FieldTable) -> list[dict[str, object]]:
    """The first neutral value of every field that has one, then the second."""
    return [
        {name: field.neutral[place] for name, field in table.items() if len(field.neutral) > place}
        for place in (0, 1)
    ]


# Half a surrogate pair, in a value and in a key.
HALVES = ['{"a": {"b": ["\\ud800"]}}', '{"\\uDFFF": 1}']


def test_true_is_not_one() -> None:
    assert CHAT["best_of"].refuses(value=True)
    assert CHAT["echo"].refuses(0)
    assert not CHAT["best_of"].refuses(1.0)


@pytest.mark.parametrize(
    "body", ['{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 1}}', '{"a": NaN}', '{"a": -Infinity}', *HALVES]
)
async def test_json_that_readers_disagree_about_is_refused(site: SiteMaker, body: str) -> None:
    async with site() as here, http(here) as client:
        for path in TABLES:
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert json.loads(answer.text)["error"]["message"].startswith("the body is not valid JSON: ")
