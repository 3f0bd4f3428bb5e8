"""REST of limits: translates between HTTP and `LimitService`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from scheduler.api.documents import documented, reference
from scheduler.api.exchange import check_query, json_response
from scheduler.api.guard import read_json
from scheduler.limit_service import LimitDeclaration, LimitKeyView, LimitList, LimitService, LimitView, declaration_of
from scheduler.submission import parse_fields
from schemas.limits import BODY_MAX

ANSWERS: tuple[type, ...] = (LimitKeyView, LimitView, LimitList)


def limit_routes(limits: LimitService) -> APIRouter:
    """The routes under /api/v1/limits."""
    routes = APIRouter(prefix="/api/v1/limits", tags=["limits"])

    @routes.get("", **documented(answers={200: LimitList}, problems=(422, 503)))
    async def list_limits(request: Request) -> Response:
        """All limits."""
        check_query(request, frozenset())
        return json_response(await limits.limits(), 200)

    @routes.get("/{name}", **documented(answers={200: LimitView}, problems=(404, 422, 503)))
    async def get(name: str) -> Response:
        """How a limit stands."""
        return json_response(await limits.limit(name), 200)

    @routes.put(
        "/{name}",
        **documented(
            body=reference(LimitDeclaration.__name__), answers={200: LimitView}, problems=(409, 415, 422, 503)
        ),
    )
    async def put(name: str, request: Request) -> Response:
        """Let a limit hold from now on, also for what waits already. What runs before the first one is not counted."""
        fields = parse_fields(await read_json(request, BODY_MAX), tuple(LimitDeclaration.model_fields))
        return json_response(await limits.set_limit(name, declaration_of(fields)), 200)

    @routes.delete("/{name}", **documented(answers={204: None}, problems=(404, 422, 503)))
    async def remove(name: str) -> Response:
        """Let a limit hold no more."""
        await limits.remove_limit(name)
        return Response(status_code=204)

    return routes
