"""GET and DELETE of stored responses, and the list of what one was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.base.errors import BatonError, ErrorKind, FieldError
from services.common.observability.audit_chain import AuditRecord
from services.common.observability.audit_log import AuditLog
from services.router.conversations.record import Item, StoredResponse, id_of, json_of
from services.router.conversations.stored_responses import StoredResponses
from services.router.formats.json_bodies import encode, utf8
from services.router.formats.responses.body import LOGPROBS
from services.router.tenants.account import CallCost
from services.router.tenants.current import check_model, current_caller, current_tenant

_PATH = "/v1/responses/{response_id}"
_ITEMS_PATH = f"{_PATH}/input_items"
# Items of one page.
DEFAULT_ITEMS, MOST_ITEMS = 20, 100
# The cost of a call: one of `requests_per_minute`.
_COST = CallCost(prompt_tokens=0, output_tokens=0, outputs=0)
_ORDERS = ("asc", "desc")


class StoredResponsesApi:
    """The routes, and what `POST /v1/responses` stores."""

    def __init__(self, model: str, stored: StoredResponses | None, audit: AuditLog | None = None) -> None:
        """`model`: the name of the served model. `stored`: None: there is no response. `audit`: where it is
        recorded who has read or deleted a response."""
        self._model = model
        self._stored = stored
        self._audit = audit or AuditLog()
        self.routes = [
            Route(_PATH, self.get_or_delete, methods=["GET", "DELETE"]),
            Route(_ITEMS_PATH, self.input_items, methods=["GET"]),
        ]

    def keep(self, items: bytes, response_id: str, document: bytes) -> None:
        """Stores a response that has ended."""
        if self._stored is not None:
            self._stored.keep(response_id, StoredResponse(document, items))

    async def get_or_delete(self, request: HttpRequest) -> Response:
        """One route for both methods, so that `Allow` of a 405 lists both."""
        return await (self.delete(request) if request.method == "DELETE" else self.get(request))

    async def get(self, request: HttpRequest) -> Response:
        """GET: the response as it was answered, without logprobs."""
        with self._recorded(request, "read", _PATH):
            _check_query(request.query_params.multi_items())
            found = await self._found(request)
        return Response(found.document, media_type="application/json")

    async def delete(self, request: HttpRequest) -> Response:
        """DELETE: the response is not found from then on."""
        response_id = request.path_params["response_id"]
        with self._recorded(request, "deleted", _PATH):
            await self._responses().delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: HttpRequest) -> Response:
        """GET .../input_items: a page of the items that the response was given."""
        with self._recorded(request, "read", _ITEMS_PATH):
            return await self._page(request)

    async def _page(self, request: HttpRequest) -> Response:
        query = request.query_params
        _check_query(query.multi_items())
        limit, order = _limit(query), query.get("order", "desc")
        if order not in _ORDERS:
            raise FieldError("order is asc or desc", param="order")
        items = (await self._found(request)).each_item()
        if order == "desc":
            items.reverse()
        after = query.get("after")
        if after is not None:
            ids = [id_of(item) for item in items]
            if (wanted := utf8(encode(after))) not in ids:
                raise FieldError("the response has no item with this id", param="after")
            items = items[ids.index(wanted) + 1 :]
        return Response(_listed(items[:limit], more=len(items) > limit), media_type="application/json")

    @contextlib.contextmanager
    def _recorded(self, request: HttpRequest, outcome: str, route: str) -> Iterator[None]:
        """Counts a call of the tenant's, and records what is done within, and whether it fails. A response
        that is not found has no id: what the client sent as one may be anything."""
        tenant = current_tenant()
        try:
            with contextlib.nullcontext() if tenant is None else tenant.admit(_COST):
                yield
        except BatonError as error:
            self._record(error.kind.name.lower(), route)
            raise
        self._record(outcome, route, request.path_params["response_id"])

    def _record(self, outcome: str, route: str, target: str = "") -> None:
        caller = current_caller.get()
        key_id, tenant = ("", "") if caller is None else (caller.key_id, caller.tenant_name)
        self._audit.record(AuditRecord("response", outcome, key_id, tenant, route=route, target=target))

    async def _found(self, request: HttpRequest) -> StoredResponse:
        return await self._responses().get(request.path_params["response_id"])

    def _responses(self) -> StoredResponses:
        check_model(self._model)
        if self._stored is None:
            raise BatonError(ErrorKind.NOT_FOUND, "this router stores no responses")
        return self._stored


def _listed(page: list[Item], *, more: bool) -> bytes:
    """The answer with these items."""
    first, last = (id_of(page[0]), id_of(page[-1])) if page else (b"null", b"null")
    has_more = b"true" if more else b"false"
    return b'{"object":"list","data":[%b],"first_id":%b,"last_id":%b,"has_more":%b}' % (
        b",".join(map(json_of, page)),
        first,
        last,
        has_more,
    )


def _check_query(query: list[tuple[str, str]]) -> None:
    """Refuses what would change the answer: streams, and logprobs, which are not stored."""
    for name, value in query:
        if name == "stream" and value.lower() not in ("false", ""):
            raise FieldError(
                "a stored response is not streamed", param="stream", code="unsupported_parameter"
            )
        if name in ("include", "include[]") and value == LOGPROBS:
            raise FieldError("logprobs are not stored", param="include", code="unsupported_parameter")


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(DEFAULT_ITEMS))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else 0
    if not 1 <= limit <= MOST_ITEMS:
        raise FieldError(f"limit is a number from 1 to {MOST_ITEMS}", param="limit")
    return limit
