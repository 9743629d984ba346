"""The OpenAPI document is well formed, has every route, and describes what the API answers and refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from baton.request_fields.field import Treatment
from services.router.api.openapi import OPERATIONS, Operation, openapi_document
from services.router.formats.field_table import TABLES
from tests.router.api.inputs.test_refusals import REFUSED
from tests.router.conftest import MODEL, SiteMaker
from tests.router.http_client import complete, events, http

SCHEMAS = openapi_document()["components"]["schemas"]
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
# Refused for what the schema cannot express: the meaning of values, and the size of vocabulary and context.
BEYOND_SCHEMA = {
    "stop_token_ids",
    "prompt",
    "logit_bias",
    "suffix",
    "response_format",
    "structured_outputs",
    "best_of",
    "min_tokens",
    "max_tokens",
    "stop",
}


def check(schema: str, document: object) -> None:
    Draft202012Validator(
        {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": SCHEMAS}}
    ).validate(document)


def is_valid(schema: str, document: object) -> bool:
    root = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": SCHEMAS}}
    return bool(Draft202012Validator(root).is_valid(document))


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            if key == "$ref":
                yield one
            else:
                yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_schemas_are_valid_and_references_resolve() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    document = openapi_document()
    named = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert named == set(SCHEMAS)
    names = [operation.name for operation in OPERATIONS]
    assert len(names) == len(set(names))


async def test_it_has_every_route(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        document = (await client.get("/openapi.json")).json()
        assert document == openapi_document()
        routes = here.router.http_api.app.routes
        served = {
            (method.lower(), re.sub(r":path", "", route.path))
            for route in routes
            if isinstance(route, Route)
            for method in (route.methods or {"POST"}) - {"HEAD"}
        }
        documented = {(one.method, one.path) for one in OPERATIONS}
        assert served - documented == {("get", "/openapi.json"), ("get", "/docs"), ("get", "/metrics")}
        assert documented <= served


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
def test_bodies_have_the_fields_of_the_table(path: str) -> None:
    (body,) = (operation.body for operation in OPERATIONS if operation.path == path)
    assert body is not None
    properties = set(SCHEMAS[body.__name__]["properties"])
    assert properties == {
        name for name, field in TABLES[path].items() if field.treatment is not Treatment.REFUSED
    }


async def test_answers_are_as_described(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for schema, path in (
            ("ModelList", "/v1/models"),
            ("Model", f"/v1/models/{MODEL}"),
            ("State", "/health"),
            ("State", "/ready"),
            ("Version", "/version"),
            ("Error", "/v1/models/other"),
        ):
            check(schema, (await client.get(path)).json())
        check("Tokens", (await client.post("/tokenize", json={"prompt": "a"})).json())
        check("Text", (await client.post("/detokenize", json={"tokens": [97]})).json())
        check("Error", (await complete(client, temperature=-1)).json())
        options = {"logprobs": 2, "return_token_ids": True, "n": 2, "max_tokens": 3}
        check("Completion", (await complete(client, **options)).json())
        async for chunk in events(client, stream_options={"include_usage": True}, **options):
            check("Completion", chunk)
        answer = await client.post("/v1/chat/completions", json=CHAT)
        check("ChatCompletion", answer.json())
        include = ["message.output_text.logprobs"]
        asked = {"model": MODEL, "input": "a", "max_output_tokens": 3, "include": include, "top_logprobs": 2}
        check("Response", (await client.post("/v1/responses", json=asked)).json())


async def test_what_the_schema_refuses_is_refused(site: SiteMaker) -> None:
    """Requests that the schema allows are accepted, except where it cannot state a rule."""
    base: dict[str, Any] = {"model": MODEL, "prompt": [1, 2, 3]}
    assert is_valid("CompletionBody", base)
    for field, value in REFUSED:
        if field not in BEYOND_SCHEMA and value != 1e-60:  # which is 0 only as a float32
            assert not is_valid("CompletionBody", {**base, field: value}), (field, value)
    edges: dict[str, Any] = {
        "temperature": 100, "top_p": 1, "min_p": 1, "logprobs": 20, "n": 2, "stop": ["a" * 1024] * 16,
        "presence_penalty": -2, "repetition_penalty": 0.01, "seed": 2**64 - 1, "max_tokens": 2,
    }  # fmt: skip
    async with site() as here, http(here) as client:
        for field, value in edges.items():
            body = {**base, "max_tokens": 2, field: value}
            assert is_valid("CompletionBody", body), field
            assert (await client.post("/v1/completions", json=body)).status_code == 200, field


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_refusals_ahead_of_the_operation_are_documented(site: SiteMaker, operation: Operation) -> None:
    documented = openapi_document()["paths"][operation.path][operation.method]["responses"]
    path = re.sub(r"{\w+}", "a", operation.path)
    async with site() as here, http(here) as client:
        answers = [await client.request(operation.method, path, headers={"host": "elsewhere.example"})]
        if path != operation.path:
            answers.append(await client.request(operation.method, path + "%01"))
        assert [answer.status_code for answer in answers] == [403, 400][: len(answers)]
        for answer in answers:
            assert str(answer.status_code) in documented
            check("Error", answer.json())


class Page(HTMLParser):
    """Checks that tags are closed in order; collects identifiers, links and what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "link", "iframe")
        if tag != "meta":
            self.open.append(tag)
        given = dict(attrs)
        self.ids += [given["id"]] if given.get("id") else []  # type: ignore[list-item]
        self.links += [given["href"]] if given.get("href") else []  # type: ignore[list-item]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


async def test_the_page_lists_every_endpoint_and_loads_nothing(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        answer = await client.get("/docs")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        page = Page()
        page.feed(answer.text)
        page.close()
        assert page.open == []
        assert {link.removeprefix("#") for link in page.links} - {"openapi.json"} == set(page.ids)
        for path in openapi_document()["paths"]:
            assert path in page.text
        assert "number, from 0, to 1, default 1" in page.text
