"""REST of queues and tenants: translates between HTTP and `QueueService`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from scheduler.api.documents import documented, reference
from scheduler.api.exchange import check_query, json_response
from scheduler.api.guard import read_json, read_json_if_any
from scheduler.queue_service import (
    PriorityView,
    QueueChange,
    QueueDefaultsView,
    QueueList,
    QueueService,
    QueueView,
    TenantChange,
    TenantList,
    TenantView,
)
from scheduler.refusals import invalid
from scheduler.submission import parse_fields, validated
from schemas.limits import BODY_MAX

ANSWERS: tuple[type, ...] = (PriorityView, QueueDefaultsView, QueueView, QueueList, TenantView, TenantList)
_REASON_BODY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"reason": {"type": ["string", "null"], "maxLength": 1024}},
}


def _changing(change: type[BaseModel], view: type) -> dict[str, Any]:
    return documented(body=reference(change.__name__), answers={200: view}, problems=(415, 422, 503))


def queue_routes(queues: QueueService) -> APIRouter:
    """The routes under /api/v1/queues and /api/v1/tenants."""
    routes = APIRouter()
    routes.include_router(_queue_routes(queues))
    routes.include_router(_tenant_routes(queues))
    return routes


def _queue_routes(queues: QueueService) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/queues", tags=["queues"])

    @routes.get("", **documented(answers={200: QueueList}, problems=(422, 503)))
    async def list_queues(request: Request) -> Response:
        """The queues: what waits and runs in them, which are paused."""
        check_query(request, frozenset())
        return json_response(await queues.queues(), 200)

    @routes.get("/{queue}", **documented(answers={200: QueueView}, problems=(422, 503)))
    async def get(queue: str) -> Response:
        """What waits and runs in a queue, and whether it is paused. A scaler may go by `backlog`."""
        return json_response(await queues.queue(queue), 200)

    @routes.patch("/{queue}", **_changing(QueueChange, QueueView))
    async def change(queue: str, request: Request) -> Response:
        """Let other bounds or defaults hold for a queue, and make it known."""
        fields = parse_fields(await read_json(request, BODY_MAX), tuple(QueueChange.model_fields))
        return json_response(await queues.set_queue(queue, validated(QueueChange, fields)), 200)

    @routes.post(
        "/{queue}/pause",
        **documented(body=_REASON_BODY, is_body_required=False, answers={200: QueueView}, problems=(415, 422, 503)),
    )
    async def pause(queue: str, request: Request) -> Response:
        """Let tasks of a queue wait until it is resumed. Those that run go on; what is out to workers may start."""
        reason = parse_fields(await read_json_if_any(request, BODY_MAX), ("reason",)).get("reason")
        if reason is not None and not isinstance(reason, str):
            raise invalid("reason", "is not a text")
        return json_response(await queues.pause(queue, reason=reason), 200)

    @routes.post("/{queue}/resume", **documented(answers={200: QueueView}, problems=(415, 422, 503)))
    async def resume(queue: str, request: Request) -> Response:
        """Let tasks of a queue go out again."""
        parse_fields(await read_json_if_any(request, BODY_MAX), ())
        return json_response(await queues.resume(queue), 200)

    return routes


def _tenant_routes(queues: QueueService) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/tenants", tags=["tenants"])

    @routes.get("", **documented(answers={200: TenantList}, problems=(422, 503)))
    async def list_tenants(request: Request) -> Response:
        """The tenants: what waits and runs of them, and their shares."""
        check_query(request, frozenset())
        return json_response(await queues.tenants(), 200)

    @routes.get("/{tenant_id}", **documented(answers={200: TenantView}, problems=(422, 503)))
    async def get(tenant_id: str) -> Response:
        """What waits and runs of a tenant, and its share."""
        return json_response(await queues.tenant(tenant_id), 200)

    @routes.patch("/{tenant_id}", **_changing(TenantChange, TenantView))
    async def change(tenant_id: str, request: Request) -> Response:
        """Let a tenant have another share, also of what waits already, or other bounds."""
        fields = parse_fields(await read_json(request, BODY_MAX), tuple(TenantChange.model_fields))
        return json_response(await queues.set_tenant(tenant_id, validated(TenantChange, fields)), 200)

    return routes
