"""The public HTTP API: OpenAI's completions, chat completions and models, and vLLM's tokenize endpoints."""

from __future__ import annotations

import importlib.metadata
import time
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import ErrorKind, FieldError
from services.router.api.health_routes import health_routes
from services.router.api.openai_response import CompletionResponse
from services.router.api.tokenize_api import tokenize_routes
from services.router.formats.openai_chat import ChatFormatter
from services.router.formats.openai_completions import CompletionFormatter
from services.router.http.body import CancelOnDisconnect
from services.router.http.errors import HANDLERS
from services.router.http.server import http_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.routing import BaseRoute
    from starlette.types import Send

    from services.router.api.openai_response import Formatter
    from services.router.formats.openai_fields import SamplingBody
    from services.router.lifecycle.admission import Admission
    from services.router.lifecycle.dispatcher import Dispatcher
    from services.router.lifecycle.readiness import Readiness
    from services.router.request.request import Request


class HttpApi:
    """The ASGI application `app`."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        readiness: Readiness,
        more_routes: Sequence[BaseRoute] = (),
    ) -> None:
        """`more_routes` are served in addition to those of the API."""
        self._admission = admission
        self._dispatcher = dispatcher
        limit = admission.reader.max_body_bytes
        self._created = int(time.time())
        routes: list[BaseRoute] = [
            Route("/v1/completions", CancelOnDisconnect(self.completions, limit), methods=["POST"]),
            Route("/v1/chat/completions", CancelOnDisconnect(self.chat, limit), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            *health_routes(readiness),
            Route("/version", self.version, methods=["GET"]),
            *tokenize_routes(admission.reader),
            *more_routes,
        ]
        self.app = http_app(routes, HANDLERS)

    async def completions(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/completions."""
        body, requests = await self._admission.completion(request.state.body)
        formatter = CompletionFormatter(body, self._admission.tokenizer.token_texts)
        await self._respond(request, send, body, requests, formatter)

    async def chat(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/chat/completions."""
        body, requests = await self._admission.chat(request.state.body)
        formatter = ChatFormatter(body, self._admission.tokenizer.token_texts)
        await self._respond(request, send, body, requests, formatter)

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model}."""
        if request.path_params["model"] != self._admission.model.name:
            message = "the model does not exist"
            raise FieldError(message, param="model", code="model_not_found", kind=ErrorKind.NOT_FOUND)
        return JSONResponse(self._model())

    async def version(self, request: HttpRequest) -> Response:
        """GET /version."""
        return JSONResponse({"version": _VERSION})

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
            "max_model_len": model.max_context_tokens,
        }


def _installed_version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a bare checkout
        return "unknown"


_VERSION = _installed_version()
