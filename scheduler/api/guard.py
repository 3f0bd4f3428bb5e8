"""What every request passes first: an id of its own, a path that means what it says, and a last resort for defects."""

from __future__ import annotations

import asyncio
import uuid

import structlog
from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.api.problem import http_problem, problem_response
from scheduler.refusals import too_large

_log = structlog.get_logger(__name__)

BODY_READ_S = 30.0  # for a client to send its body; a slower one only holds memory
REQUEST_ID = "X-Request-Id"


class Guard:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; whatever goes wrong inside becomes a problem, and is logged with the request's id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        is_started = False

        async def send_marked(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            if _has_encoded_slash(scope):
                await _not_found()(scope, receive, send_marked)
            else:
                await self._app(scope, receive, send_marked)
        except ClientDisconnect:
            _log.info("client_left", request_id=request_id)
        except Exception:
            _log.exception("request_failed", request_id=request_id, method=scope["method"], path=scope["path"][:200])
            if not is_started:
                await _defect(request_id)(scope, receive, send_marked)


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")
    is_usable = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    return given if is_usable else uuid.uuid4().hex


def _has_encoded_slash(scope: Scope) -> bool:
    # The server decodes a path before it is routed: `foo%2Fcancel` would become a call that cancels `foo`.
    return b"%2f" in scope.get("raw_path", b"").partition(b"?")[0].lower()


def _not_found() -> Response:
    return problem_response(http_problem(404, "no id contains a slash, and no other path has an encoded one"))


def _defect(request_id: str) -> Response:
    detail = "a defect of the scheduler; its log tells more under this request id"
    return problem_response(http_problem(500, detail, request_id=request_id))


class UnsupportedMediaType(Exception):
    """The body is not said to be JSON."""


async def read_json(request: Request, size_max: int) -> bytes:
    """The bytes of a JSON body of at most `size_max`.

    The media type must be that of JSON: a web page of another origin can then not send one without being allowed to.
    Raises Refused, UnsupportedMediaType, or HTTPException for a body that is too slow.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaType
    return await _read(request, size_max)


async def read_json_if_any(request: Request, size_max: int) -> bytes:
    """`read_json` for a body that may be left out."""
    length = request.headers.get("content-length", "")
    if "transfer-encoding" not in request.headers and length in ("", "0"):
        return b""
    return await read_json(request, size_max)


async def _read(request: Request, size_max: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > size_max:
        raise too_large("the body", int(length), size_max)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_READ_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > size_max:
                    raise too_large("the body", size, size_max)
                chunks.append(chunk)
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {BODY_READ_S:g} s") from error
    return b"".join(chunks)
