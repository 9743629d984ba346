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


class TokenizeApi:
    """Converts text to tokens and back with the model's tokenizer, without any worker. Small bodies are
    processed in a thread, larger ones in a helper process."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self.routes = [
            Route(
                f"/{job.__name__}",
                CancelOnDisconnect(self._handler(job), reader.max_body_bytes),
                methods=["POST"],
            )
            for job in (helper_jobs.tokenize, helper_jobs.detokenize)
        ]

    def _handler(self, job: helper_jobs.Job) -> Callable[[HttpRequest, Send], Awaitable[None]]:
        async def handle(request: HttpRequest, send: Send) -> None:
            parts = await self._reader.run(job, request.state.body, sizes.LARGE_TOKENIZE_BYTES)
            response = Response(bytes(parts[0]), media_type="application/json")
            await response(request.scope, request.receive, send)

        return handle
