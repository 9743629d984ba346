"""POST /tokenize and /detokenize, compatible with vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from services.router.http.body import CancelOnDisconnect
from services.router.request import sizes
from services.router.tokenization import helper_jobs as helper_jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request as HttpRequest
    from starlette.types import Send

    from services.router.tokenization.request_reader import RequestReader


def tokenize_routes(reader: RequestReader) -> list[Route]:
    """Routes that convert text to tokens and back with the model's tokenizer, without any worker. Small
    bodies are processed in a thread, larger ones in a helper process."""
    return [
        Route(
            f"/{job.__name__}",
            CancelOnDisconnect(_handler(reader, job), reader.max_body_bytes),
            methods=["POST"],
        )
        for job in (helper_jobs.tokenize, helper_jobs.detokenize)
    ]


def _handler(reader: RequestReader, job: helper_jobs.Job) -> Callable[[HttpRequest, Send], Awaitable[None]]:
    async def handle(request: HttpRequest, send: Send) -> None:
        parts = await reader.run(job, request.state.body, sizes.LARGE_TOKENIZE_BYTES)
        response = Response(bytes(parts[0]), media_type="application/json")
        await response(request.scope, request.receive, send)

    return handle
