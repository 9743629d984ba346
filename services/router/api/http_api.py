"""The HTTP door: OpenAI's completions, chat and models, tokens in vLLM's shapes, and how the router is."""

from __future__ import annotations

import importlib.metadata
import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import ErrorKind, FieldError
from services.router.api.health_routes import health_routes
from services.router.api.openai_response import Answer
from services.router.api.tokenize_api import TokenizeDoor
from services.router.formats.openai_chat import ChatWords
from services.router.formats.openai_completions import CompletionWords
from services.router.http.body import Cancelling
from services.router.http.errors import HANDLERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.routing import BaseRoute
    from starlette.types import Send

    from services.router.lifecycle.service import Service


class HttpDoor:
    """The ASGI application; `more_routes` are served beside its own."""

    def __init__(self, service: Service, more_routes: Sequence[BaseRoute] = ()) -> None:
        self._service = service
        reader = service.intake.reader
        most = reader.max_body_bytes
        self._created = int(time.time())
        routes: list[BaseRoute] = [
            Route("/v1/completions", Cancelling(self.completions, most), methods=["POST"]),
            Route("/v1/chat/completions", Cancelling(self.chat, most), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            *health_routes(service),
            Route("/version", self.version, methods=["GET"]),
            *TokenizeDoor(reader).routes,
            *more_routes,
        ]
        self.app = Starlette(routes=routes, exception_handlers=HANDLERS)
        self.app.router.redirect_slashes = False

    async def completions(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/completions."""
        arrived_ns = time.monotonic_ns()
        with self._service.counting_refusals():
            body, prompts = await self._service.intake.reader.completion(request.state.body)
        requests = await self._service.admit(*prompts, arrived_ns=arrived_ns)
        request.state.deadline = max(one.deadline for one in requests)
        words = CompletionWords(body, self._service.intake.pool.token_texts)
        answer = Answer(self._service, requests, words, body.stream_options)
        await (answer.stream(send) if body.stream else answer.whole(send))

    async def chat(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/chat/completions."""
        arrived_ns = time.monotonic_ns()
        with self._service.counting_refusals():
            body, asked = await self._service.intake.reader.chat(request.state.body)
        requests = await self._service.admit(asked, arrived_ns=arrived_ns)
        request.state.deadline = requests[0].deadline
        words = ChatWords(body, self._service.intake.pool.token_texts)
        answer = Answer(self._service, requests, words, body.stream_options)
        await (answer.stream(send) if body.stream else answer.whole(send))

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model}."""
        if request.path_params["model"] != self._service.intake.served_name:
            message = "the model does not exist"
            raise FieldError(message, param="model", code="model_not_found", kind=ErrorKind.NOT_FOUND)
        return JSONResponse(self._model())

    async def version(self, request: HttpRequest) -> Response:
        """GET /version."""
        return JSONResponse({"version": _VERSION})

    def _model(self) -> dict[str, object]:
        intake = self._service.intake
        return {
            "id": intake.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": intake.max_context_tokens,
        }


def _installed_version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a bare checkout
        return "unknown"


_VERSION = _installed_version()
