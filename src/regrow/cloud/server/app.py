"""The API over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from regrow.cloud.server import access
from regrow.cloud.server.admin import ADMIN_METHODS, perform_admin
from regrow.cloud.server.call import perform
from regrow.cloud.server.engine import Engine
from regrow.cloud.server.methods import METHODS
from regrow.cloud.server.render import Renderer
from regrow.cloud.server.state_dir import ADMIN_PREFIX
from regrow.errors import CloudApiError, Code, UsageError

logger = logging.getLogger(__name__)

_LARGEST_BODY_BYTES: Final = 4 << 20
_LARGEST_PRETTY_BYTES: Final = 32 << 10
_HTTP_STATUS: Final = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


def make_app(engine: Engine, renderer: Renderer, token: str) -> Starlette:
    """The ASGI application.

    Args:
        engine: Whom it asks.
        renderer: How records are shown.
        token: What clients that the kernel does not know must present.
    """

    async def answer(request: Request) -> Response:
        try:
            ends = (_address(request.client), _address(request.scope.get("server")))
            refused = access.refusal(*ends, request.headers, token)
            if refused is not None:
                raise CloudApiError(Code.PERMISSION_DENIED, f"Permission denied: {refused}.")
            return _reply(200, _perform(engine, renderer, request, await _body(request)))
        except CloudApiError as error:
            return _refuse(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            logger.exception("%s %s", request.method, request.url.path)
            return _refuse(CloudApiError(Code.INTERNAL, f"Internal error encountered: {error!r}"))

    methods = ["GET", "POST", "PATCH", "PUT", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", answer, methods=methods)])


def _address(end: Sequence[Any] | None) -> access.Address | None:
    return None if end is None or end[1] is None else (str(end[0]), int(end[1]))


def _perform(engine: Engine, renderer: Renderer, request: Request, body: bytes) -> Any:
    path: str = request.scope["path"]
    pairs: Sequence[tuple[str, str]] = request.query_params.multi_items()
    if path.startswith(ADMIN_PREFIX):
        try:
            return perform_admin(ADMIN_METHODS, engine, renderer, request.method, path, body)
        except UsageError as error:
            raise CloudApiError(Code.INVALID_ARGUMENT, str(error)) from None
    return perform(METHODS, engine, renderer, request.method, path, pairs, body)


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_BODY_BYTES:
            raise CloudApiError(
                Code.INVALID_ARGUMENT,
                f"Request payload size exceeds the limit: {_LARGEST_BODY_BYTES} bytes.",
            )
    return body


def _reply(status: int, value: Any) -> Response:
    text = json.dumps(value)
    if len(text) < _LARGEST_PRETTY_BYTES:
        # Indenting takes ten times as long; nobody reads the answers about hundreds of slices.
        text = json.dumps(value, indent=2) + "\n"
    return Response(text, status, media_type="application/json")


def _refuse(error: CloudApiError) -> Response:
    status = _HTTP_STATUS.get(error.code, int(HTTPStatus.INTERNAL_SERVER_ERROR))
    told: dict[str, Any] = {"code": status, "message": error.message, "status": error.code.name}
    if error.details:
        told["details"] = list(error.details)
    return _reply(status, {"error": told})
