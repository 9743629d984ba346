"""The public HTTP API: OpenAI's completions, responses and models, and vLLM's tokenize endpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Send

from baton.base.errors import ErrorKind, FieldError
from services.common.observability.audit_log import AuditLog
from services.router.api.docs_page import docs_page
from services.router.api.openai_response import CompletionResponse, Formatter
from services.router.api.openapi import installed_version, openapi_document
from services.router.api.responses_answer import ResponsesAnswer
from services.router.api.stored_responses import StoredResponsesApi
from services.router.conversations.stored_responses import StoredResponses
from services.router.formats.ignored_fields import header
from services.router.formats.openai.chat import ChatFormatter
from services.router.formats.openai.completions import CompletionFormatter
from services.router.formats.openai.fields import SamplingBody
from services.router.http.body import CancelOnDisconnect
from services.router.http.errors import HANDLERS
from services.router.http.server import http_app
from services.router.lifecycle.admission import Admission
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.lifecycle.readiness import Readiness
from services.router.request import sizes
from services.router.request.request import Request
from services.router.tenants.current import check_model, current_caller
from services.router.tokenization import helper_jobs

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"


class HttpApi:
    """The HTTP API as an ASGI application, `app`."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        readiness: Readiness,
        more_routes: Sequence[BaseRoute] = (),
        stored: StoredResponses | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """`more_routes` are served in addition to those of the API. `stored`: the admission's responses.
        `audit`: records who reads or deletes them."""
        self._admission = admission
        self._stored = StoredResponsesApi(admission.model.name, stored, audit)
        self._dispatcher = dispatcher
        self._created = int(time.time())
        posts = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/v1/responses": self.responses,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        limit = admission.reader.max_body_bytes
        routes: list[BaseRoute] = [
            *(Route(at, CancelOnDisconnect(handle, limit), methods=["POST"]) for at, handle in posts.items()),
            *self._stored.routes,
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            *health_routes(readiness),
            Route("/version", JSONResponse({"version": installed_version()}), methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            *more_routes,
        ]
        self.app = http_app(routes, HANDLERS)

    async def completions(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/completions: OpenAI's completions, streamed or whole."""
        body, requests = await self._admission.completion(request.state.body, request.headers)
        formatter = CompletionFormatter(body, self._admission.tokenizer.token_texts)
        await self._respond(request, send, body, requests, formatter)

    async def chat(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/chat/completions: OpenAI's chat completions, streamed or whole."""
        body, requests = await self._admission.chat(request.state.body, request.headers)
        formatter = ChatFormatter(body, self._admission.tokenizer.token_texts)
        await self._respond(request, send, body, requests, formatter)

    async def responses(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/responses: OpenAI's responses, streamed or whole."""
        body, admitted, items = await self._admission.response(request.state.body, request.headers)
        request.state.deadline = admitted.deadline
        texts = self._admission.tokenizer.token_texts
        keep = partial(self._stored.keep, bytes(items)) if items else None
        answer = ResponsesAnswer(self._dispatcher, body, admitted, texts, keep)
        await (answer.stream(send) if body.stream else answer.whole(send))

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models: the served model, if the caller may use it."""
        caller, model = current_caller.get(), self._model()
        permitted = caller is None or caller.may_use(self._admission.model.name)
        return JSONResponse({"object": "list", "data": [model] if permitted else []})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model}: the served model. FieldError for another name."""
        check_model(request.path_params["model"])
        if request.path_params["model"] != self._admission.model.name:
            message = "the model does not exist"
            raise FieldError(message, param="model", code="model_not_found", kind=ErrorKind.NOT_FOUND)
        return JSONResponse(self._model())

    async def openapi(self, request: HttpRequest) -> Response:
        """GET /openapi.json: the OpenAPI document of the HTTP API."""
        return JSONResponse(openapi_document())

    async def docs(self, request: HttpRequest) -> Response:
        """GET /docs: a page for people, which loads nothing."""
        return HTMLResponse(docs_page(), headers={"content-security-policy": _PAGE_POLICY})

    async def tokenize(self, request: HttpRequest, send: Send) -> None:
        """POST /tokenize: the tokens of a text, without any worker."""
        await self._convert(helper_jobs.tokenize, request, send)

    async def detokenize(self, request: HttpRequest, send: Send) -> None:
        """POST /detokenize: the text of tokens, without any worker."""
        await self._convert(helper_jobs.detokenize, request, send)

    async def _convert(self, job: helper_jobs.Job, request: HttpRequest, send: Send) -> None:
        """Responds with the result of a job."""
        check_model(self._admission.model.name)
        reader = self._admission.reader
        answer, names = await reader.run(job, request.state.body, sizes.LARGE_TOKENIZE_BYTES)
        ignored = json.loads(names)
        reader.ignored.report(ignored)
        response = Response(bytes(answer), media_type="application/json")
        response.raw_headers += header(ignored)
        await response(request.scope, request.receive, send)

    async def _respond(
        self,
        request: HttpRequest,
        send: Send,
        body: SamplingBody,
        requests: Sequence[Request],
        formatter: Formatter,
    ) -> None:
        """Runs the requests. Their deadline bounds how long the client may take to read (see
        `http.protocol`)."""
        request.state.deadline = requests[0].deadline
        response = CompletionResponse(
            self._dispatcher, self._admission.model.name, requests, formatter, body.stream_options
        )
        await (response.stream(send) if body.stream else response.whole(send))

    def _model(self) -> dict[str, object]:
        model = self._admission.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_context_tokens,
            "vocab_size": model.limits().vocab_size,
        }


def health_routes(readiness: Readiness) -> list[Route]:
    """Routes of liveness and readiness probes.

    `/health` is 200 as long as the event loop runs, whatever the state of the workers, unless another of the
    router's processes cannot be replaced: restart the router if it fails. `/ready` is 200 while a request
    would be served, else 503 with a reason.
    """

    def answer(reason: str | None, otherwise: str) -> Response:
        if reason is None:
            return JSONResponse({"status": otherwise})
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    async def health(request: HttpRequest) -> Response:
        return answer(readiness.unhealthy(), "ok")

    async def ready(request: HttpRequest) -> Response:
        return answer(readiness.reason(), "ready")

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
    ]
