"""Routes of the web page: its files, the status that it polls, and the prompts that it tries."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from services.router.http.body import CancelOnDisconnect
from services.router.lifecycle.admission import Admission
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.observability.status import Status
from services.router.ui.prompts import Prompts
from services.router.ui.snapshots import Snapshots

# Bodies of prompts: the admin listener has little memory for them.
_MOST_BODY_BYTES = 256 * 1024
_STATIC = Path(__file__).parent / "static"
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def ui_routes(status: Status, admission: Admission, dispatcher: Dispatcher) -> list[BaseRoute]:
    """The page at `/` and what it uses, below `/ui`. `auth.scopes` has a rule for each."""
    snapshots = Snapshots(status, chats=admission.tokenizer.tokenizer.has_chat_template)
    prompts = Prompts(dispatcher)

    async def answer_status(request: HttpRequest) -> Response:
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(await snapshots.latest(), media_type="application/json", headers=headers)

    limit = min(admission.reader.max_body_bytes, _MOST_BODY_BYTES)
    posts = {
        "/ui/chat": prompts.handler(admission.chat),
        "/ui/completion": prompts.handler(admission.completion),
    }
    return [
        *(
            Route("/" if path.name == "index.html" else f"/ui/{path.name}", _file(path), methods=["GET"])
            for path in sorted(_STATIC.iterdir())
        ),
        Route("/ui/status", answer_status, methods=["GET"]),
        *(Route(at, CancelOnDisconnect(handle, limit), methods=["POST"]) for at, handle in posts.items()),
    ]


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=_HEADERS)
