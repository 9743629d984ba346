"""The HTTP door: OpenAI's completions, chat and models, tokens in vLLM's shapes, and how the router is."""

from __future__ import annotations

import importlib.metadata
import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import ErrorKind, FieldError
from services.router.answer import Answer
from services.router.http_body import Cancelling, read_json
from services.router.http_errors import HANDLERS
from services.router.openai_chat import ChatWords, parse_chat
from services.router.openai_completions import CompletionWords, parse_completion
from services.router.tokenize_door import TokenizeDoor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.routing import BaseRoute
    from starlette.types import Send

    from services.router.service import Service


class HttpDoor:
    """The ASGI application; `more_routes` are served beside its own."""

    def __init__(self, service: Service, more_routes: Sequence[BaseRoute] = ()) -> None:
        self._service = service
        self._created = int(time.time())
        routes: list[BaseRoute] = [
            Route("/v1/completions", Cancelling(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", Cancelling(self.chat), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            *TokenizeDoor(service.intake).routes,
            *more_routes,
        ]
        self.app = Starlette(routes=routes, exception_handlers=HANDLERS)
        self.app.router.redirect_slashes = False

    async def completions(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/completions."""
        body = parse_completion(read_json(request))
        requests = [one for asked in body.asked() for one in await self._service.admit(asked)]
        words = CompletionWords(body, self._service.intake.pool.token_texts)
        answer = Answer(self._service, requests, words, include_usage=body.include_usage)
        await _tell(answer, request, send, stream=body.stream)

    async def chat(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/chat/completions."""
        body = parse_chat(read_json(request))
        requests = await self._service.admit(body.asked())
        words = ChatWords(body, self._service.intake.pool.token_texts)
        answer = Answer(self._service, requests, words, include_usage=body.include_usage)
        await _tell(answer, request, send, stream=body.stream)

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model}."""
        if request.path_params["model"] != self._service.intake.served_name:
            message = "the model does not exist"
            raise FieldError(message, param="model", code="model_not_found", kind=ErrorKind.NOT_FOUND)
        return JSONResponse(self._model())

    async def health(self, request: HttpRequest) -> Response:
        """GET /health: the router is alive, whatever its workers are."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """GET /ready: 200 where a request would be served, else 503."""
        ready = self._service.usable()
        return JSONResponse({"status": "ready" if ready else "unavailable"}, 200 if ready else 503)

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


async def _tell(answer: Answer, request: HttpRequest, send: Send, *, stream: bool | None) -> None:
    if stream:
        await answer.stream(send)
    else:
        await JSONResponse(await answer.whole())(request.scope, request.receive, send)


def _installed_version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a bare checkout
        return "unknown"


_VERSION = _installed_version()
