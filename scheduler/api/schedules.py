"""REST of schedules: translates between HTTP and `ScheduleService`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from scheduler.api.documents import documented, reference
from scheduler.api.exchange import Limit, check_query, json_response
from scheduler.api.guard import read_json, read_json_if_any
from scheduler.ports import ScheduleFilter
from scheduler.refusals import invalid
from scheduler.schedule_service import LOOKUP_SIZE, ScheduleService
from scheduler.schedule_submission import parse_backfill, parse_change, parse_preview, parse_schedule
from scheduler.schedule_view import (
    BackfilledRuns,
    CreatedSchedule,
    PreviewView,
    RunList,
    ScheduleList,
    ScheduleView,
    TriggeredRun,
)
from scheduler.submission import parse_fields
from schemas.limits import BODY_MAX

ANSWERS: tuple[type, ...] = (
    CreatedSchedule,
    ScheduleView,
    ScheduleList,
    TriggeredRun,
    BackfilledRuns,
    PreviewView,
    RunList,
)
_PREFIX = "/api/v1/cron-tasks"
_CHANGE_BODY = {
    "description": "Fields of a schedule; absent ones stay, null stands for the default. And `expected_version`.",
    "type": "object",
    "properties": {"expected_version": {"type": "integer"}, "enabled": {"type": "boolean"}},
}
_REASON_BODY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"reason": {"type": ["string", "null"], "maxLength": 1024}},
}


def schedule_routes(schedules: ScheduleService) -> APIRouter:
    """The routes under /api/v1/cron-tasks."""
    routes = APIRouter()
    routes.include_router(_making_routes(schedules))
    routes.include_router(_one_routes(schedules))
    routes.include_router(_run_routes(schedules))
    return routes


def _making_routes(schedules: ScheduleService) -> APIRouter:
    routes = APIRouter(prefix=_PREFIX, tags=["schedules"])

    @routes.post(
        "",
        **documented(
            body=reference("ScheduleSubmission"),
            answers={201: CreatedSchedule, 200: CreatedSchedule},
            problems=(409, 413, 415, 422, 503),
        ),
    )
    async def create(request: Request) -> Response:
        """Make a schedule. 201: it is durable and will fire. 200: the same one was made before. 409: another one."""
        created = await schedules.create(parse_schedule(await read_json(request, BODY_MAX)))
        return json_response(created.view, 200 if created.is_repeat else 201)

    @routes.post(
        "/preview", **documented(body=reference("Preview"), answers={200: PreviewView}, problems=(415, 422, 503))
    )
    async def preview(request: Request) -> Response:
        """The next nominal times of a rule, later than `start`. Nothing is made."""
        return json_response(await schedules.preview(parse_preview(await read_json(request, BODY_MAX))), 200)

    @routes.get("", **documented(answers={200: ScheduleList}, problems=(422, 503)))
    async def list_schedules(
        request: Request,
        tenant_id: str | None = None,
        paused: bool | None = None,
        declared_by: str | None = None,
        limit: Limit = 50,
        cursor: str | None = None,
    ) -> Response:
        """Schedules, as the view has them (it may lag by milliseconds)."""
        check_query(request, frozenset({"tenant_id", "paused", "declared_by", "limit", "cursor"}))
        wanted = ScheduleFilter(tenant_id=tenant_id, is_paused=paused, declared_by=declared_by)
        return json_response(await schedules.list_schedules(wanted, limit=limit, cursor=cursor), 200)

    return routes


def _one_routes(schedules: ScheduleService) -> APIRouter:
    routes = APIRouter(prefix=_PREFIX, tags=["schedules"])

    @routes.get("/{cron_id}", **documented(answers={200: ScheduleView}, problems=(404, 503)))
    async def get(cron_id: str) -> Response:
        """A schedule: what it asks for, when it fires next, what it did."""
        return json_response(await schedules.get(cron_id), 200)

    @routes.patch(
        "/{cron_id}",
        **documented(body=_CHANGE_BODY, answers={200: ScheduleView}, problems=(404, 409, 413, 415, 422, 503)),
    )
    async def update(cron_id: str, request: Request) -> Response:
        """Change a schedule. Nominal times up to now count as decided. Against others: `expected_version` (409)."""
        return json_response(await schedules.update(cron_id, parse_change(await read_json(request, BODY_MAX))), 200)

    @routes.delete("/{cron_id}", **documented(answers={204: None}, problems=(404, 503)))
    async def delete(cron_id: str) -> Response:
        """Make an end of a schedule; its runs go on."""
        await schedules.delete(cron_id)
        return Response(status_code=204)

    @routes.post(
        "/{cron_id}/pause",
        **documented(
            body=_REASON_BODY, is_body_required=False, answers={200: ScheduleView}, problems=(404, 415, 422, 503)
        ),
    )
    async def pause(cron_id: str, request: Request) -> Response:
        """Let a schedule fire no more until it is resumed."""
        reason = (await _fields(request, ("reason",))).get("reason")
        if reason is not None and not isinstance(reason, str):
            raise invalid("reason", "is not a text")
        return json_response(await schedules.pause(cron_id, reason=reason), 200)

    @routes.post("/{cron_id}/resume", **documented(answers={200: ScheduleView}, problems=(404, 415, 422, 503)))
    async def resume(cron_id: str, request: Request) -> Response:
        """Let a schedule fire again; its misfire policy says what becomes of nominal times that were missed."""
        await _fields(request, ())
        return json_response(await schedules.resume(cron_id), 200)

    return routes


def _run_routes(schedules: ScheduleService) -> APIRouter:
    routes = APIRouter(prefix=_PREFIX, tags=["schedules"])

    @routes.post("/{cron_id}/trigger", **documented(answers={200: TriggeredRun}, problems=(404, 409, 415, 422, 503)))
    async def trigger(cron_id: str, request: Request) -> Response:
        """Run it now, beside its nominal times. 409: a run is not over, and the overlap policy forbids another."""
        await _fields(request, ())
        return json_response(await schedules.trigger(cron_id), 200)

    @routes.post(
        "/{cron_id}/backfill",
        **documented(body=reference("Backfill"), answers={200: BackfilledRuns}, problems=(404, 409, 415, 422, 503)),
    )
    async def backfill(cron_id: str, request: Request) -> Response:
        """Run those nominal times of a range that have no run. Repeated, it runs nothing twice."""
        return json_response(await schedules.backfill(cron_id, parse_backfill(await read_json(request, BODY_MAX))), 200)

    @routes.get("/{cron_id}/runs", **documented(answers={200: RunList}, problems=(404, 422, 503)))
    async def runs(request: Request, cron_id: str, limit: Annotated[int, Query(ge=1, le=LOOKUP_SIZE)] = 20) -> Response:
        """The latest nominal times and what became of each; runs that were asked for are not among them."""
        check_query(request, frozenset({"limit"}))
        return json_response(await schedules.runs(cron_id, limit=limit), 200)

    return routes


async def _fields(request: Request, allowed: tuple[str, ...]) -> dict[str, Any]:
    return parse_fields(await read_json_if_any(request, BODY_MAX), allowed)
