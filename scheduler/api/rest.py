"""REST: translates between HTTP and `TaskService`. No rules are in here.

Bodies are parsed from their bytes by `scheduler.submission` and answers are encoded by msgspec, so that numbers stay
exact and no NaN passes in either direction. Every error is a problem (`scheduler.api.problem`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from scheduler.api.documents import describe, documented, reference
from scheduler.api.exchange import Limit, check_query, json_response
from scheduler.api.guard import Guard, UnsupportedMediaType, read_json, read_json_if_any
from scheduler.api.health import Health, HealthView, health_view
from scheduler.api.limits import ANSWERS as LIMIT_ANSWERS
from scheduler.api.limits import limit_routes
from scheduler.api.problem import Problem, http_problem, problem_of, problem_response, refusal_response
from scheduler.api.queues import ANSWERS as QUEUE_ANSWERS
from scheduler.api.queues import queue_routes
from scheduler.api.schedules import ANSWERS as SCHEDULE_ANSWERS
from scheduler.api.schedules import schedule_routes
from scheduler.api.timers import timer_routes
from scheduler.instants import INSTANT_RULE, parse_instant
from scheduler.ports import TaskFilter
from scheduler.refusals import Refusal, RefusalKind, Refused, invalid
from scheduler.service import (
    CancelView,
    ChangedView,
    PurgeView,
    RedriveAllView,
    Submitted,
    SubmittedView,
    TaskList,
    TaskService,
)
from scheduler.submission import (
    ERRORS_MAX,
    Submission,
    field_error,
    parse_fields,
    parse_item,
    parse_submission,
    parse_update,
    split_bulk,
)
from scheduler.task_view import TaskView
from scheduler.timer_report import TimersView
from schemas.limits import BODY_MAX, BULK_BODY_MAX, BULK_MAX
from schemas.messages import Priority, Status

REGISTRY_MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
PARSE_SLICE = 50  # items of a bulk body between two turns of the event loop
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ETAG = re.compile(r'"([0-9]{1,18})"')

SchemaAnswer = Callable[[str], tuple[int, Any]]  # status and JSON body of GET <raw path>


class BulkItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one task of a bulk call: `task`, or `error`. `is_repeat`: it was accepted before."""

    task: SubmittedView | None = None
    is_repeat: bool = False
    error: Problem | None = None


class BulkView(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each task of a bulk call, in their order."""

    accepted: int
    refused: int
    results: list[BulkItem]


_ANSWERS: tuple[type, ...] = (
    SubmittedView,
    BulkView,
    TaskView,
    TaskList,
    CancelView,
    ChangedView,
    PurgeView,
    RedriveAllView,
    HealthView,
    TimersView,
    *SCHEDULE_ANSWERS,
    *QUEUE_ANSWERS,
    *LIMIT_ANSWERS,
)


def create_api(
    service: TaskService,
    *,
    health: Callable[[], Health],
    schema_answer: SchemaAnswer,
    metrics: CollectorRegistry,
    version: str = "0",
    readiness: Callable[[], Health] | None = None,
    timers: Callable[[], TimersView] | None = None,
) -> FastAPI:
    """The API over a service. `health`, `readiness` and `schema_answer` answer at once; /metrics shows `metrics`.

    Without `readiness` a process that is well is ready; without `timers` it hosts no shards.
    """
    app = FastAPI(
        title="tidewheel",
        version=version,
        description="Submit tasks, follow and change them; schedule them; look after the dead-letter queue.",
        redirect_slashes=False,
    )
    app.include_router(_task_routes(service))
    app.include_router(_change_routes(service))
    app.include_router(_list_routes(service))
    app.include_router(_dead_letter_routes(service))
    app.include_router(schedule_routes(service.schedules))
    app.include_router(queue_routes(service.queues))
    app.include_router(_purge_routes(service))
    app.include_router(limit_routes(service.limits))
    app.include_router(_operating_routes(health, readiness or health, metrics))
    app.include_router(_schema_routes(schema_answer))
    if timers is not None:
        app.include_router(timer_routes(timers))
    app.add_middleware(Guard)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(UnsupportedMediaType, _on_media_type)
    describe(app, _ANSWERS)
    return app


# --- tasks ------------------------------------------------------------------------------------------------------------


def _task_routes(service: TaskService) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/tasks", tags=["tasks"])

    @routes.post(
        "",
        **documented(
            body=reference("Submission"),
            answers={202: SubmittedView, 200: SubmittedView},
            problems=(409, 413, 415, 422, 503),
        ),
    )
    async def submit(request: Request) -> Response:
        """Submit a task. 202: it is durable and will run. 200: the same submission was accepted before."""
        submission = parse_submission(await read_json(request, BODY_MAX))
        submitted = await service.submit(submission, traceparent=_traceparent(request))
        return json_response(submitted.view, 200 if submitted.is_repeat else 202)

    @routes.post(
        "/bulk",
        **documented(body=_BULK_BODY, answers={202: BulkView}, problems=(413, 415, 422, 503)),
    )
    async def submit_bulk(request: Request) -> Response:
        """Submit tasks, each accepted or refused by itself: look at each result. Refusals do not undo the others."""
        submissions = await _parse_bulk(await read_json(request, BULK_BODY_MAX))
        results = await service.submit_many(submissions, traceparent=_traceparent(request))
        return json_response(_bulk_view(results), 202)

    @routes.get("/{task_id}", **documented(answers={200: TaskView}, problems=(404, 503)))
    async def get(task_id: str) -> Response:
        """A task with its attempts, result and error; there from the moment this process sent its 202."""
        task = await service.get(task_id)
        return json_response(task, 200, {"ETag": f'"{task.version}"'})

    return routes


def _change_routes(service: TaskService) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/tasks", tags=["tasks"])

    @routes.patch(
        "/{task_id}",
        **documented(
            body=reference("Update"), answers={200: ChangedView}, problems=(404, 409, 412, 413, 415, 422, 503)
        ),
    )
    async def update(task_id: str, request: Request) -> Response:
        """Change a waiting task; absent fields stay. Against others: `expected_version` (409) or If-Match (412)."""
        wanted = parse_update(await read_json(request, BODY_MAX))
        if_match = request.headers.get("if-match", "*")
        if if_match == "*":
            changed = await service.update(task_id, wanted)
        else:
            changed = await _update_if_match(service, task_id, wanted, if_match)
        return json_response(changed, 200, {"ETag": f'"{changed.version}"'})

    @routes.post(
        "/{task_id}/cancel",
        **documented(
            body=_CANCEL_BODY, is_body_required=False, answers={200: CancelView}, problems=(404, 409, 415, 422, 503)
        ),
    )
    async def cancel(task_id: str, request: Request) -> Response:
        """Cancel a task: a waiting one never starts, a running one is told to stop. 409: it has ended otherwise."""
        reason = parse_fields(await read_json_if_any(request, BODY_MAX), ("reason",)).get("reason")
        if reason is not None and not isinstance(reason, str):
            raise invalid("reason", "is not a text")
        return json_response(await service.cancel(task_id, reason=reason), 200)

    return routes


_BULK_BODY = {
    "type": "object",
    "required": ["tasks"],
    "additionalProperties": False,
    "properties": {"tasks": {"type": "array", "minItems": 1, "maxItems": BULK_MAX, "items": reference("Submission")}},
}
_CANCEL_BODY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"reason": {"type": ["string", "null"], "maxLength": 1024}},
}


async def _parse_bulk(body: bytes) -> list[Submission | Refusal]:
    submissions: list[Submission | Refusal] = []
    for item in split_bulk(body):
        submissions.append(parse_item(item))
        if len(submissions) % PARSE_SLICE == 0:
            await asyncio.sleep(0)
    return submissions


def _bulk_view(results: list[Submitted | Refusal]) -> BulkView:
    items = [
        BulkItem(error=problem_of(result))
        if isinstance(result, Refusal)
        else BulkItem(task=result.view, is_repeat=result.is_repeat)
        for result in results
    ]
    refused = sum(1 for item in items if item.error is not None)
    return BulkView(accepted=len(items) - refused, refused=refused, results=items)


async def _update_if_match(service: TaskService, task_id: str, wanted: Any, if_match: str) -> ChangedView:
    match = _ETAG.fullmatch(if_match)
    if match is None:
        raise invalid("If-Match", "is not an ETag of a task", 'one ETag as GET gave it, for example "3"')
    version = int(match[1])
    if wanted.expected_version not in (None, version):
        raise invalid("expected_version", "disagrees with If-Match", "the same, or one of the two")
    try:
        return await service.update(task_id, wanted.model_copy(update={"expected_version": version}))
    except Refused as refused:
        if refused.refusal.kind is RefusalKind.VERSION_MISMATCH:
            raise HTTPException(412, refused.refusal.detail) from refused
        raise


def _list_routes(service: TaskService) -> APIRouter:
    routes = APIRouter(tags=["tasks"])

    @routes.get("/api/v1/tasks", **documented(answers={200: TaskList}, problems=(422, 503)))
    async def list_tasks(
        request: Request,
        tenant_id: str | None = None,
        status: Status | None = None,
        queue: str | None = None,
        task_type: str | None = None,
        priority: Priority | None = None,
        created_from: Annotated[str | None, Query(description="Created at or after.")] = None,
        created_to: Annotated[str | None, Query(description="Created before.")] = None,
        limit: Limit = 50,
        cursor: str | None = None,
    ) -> Response:
        """Tasks, newest first, as the view has them (it may lag by milliseconds); without contents and attempts."""
        check_query(request, _LIST_QUERY)
        wanted = TaskFilter(
            tenant_id=tenant_id,
            status=status,
            queue=queue,
            task_type=task_type,
            priority=priority,
            created_from=_instant("created_from", created_from),
            created_to=_instant("created_to", created_to),
        )
        return json_response(await service.list_tasks(wanted, limit=limit, cursor=cursor), 200)

    return routes


_LIST_QUERY = frozenset(TaskFilter.__struct_fields__) - {"is_dead_letter"} | {"limit", "cursor"}


def _instant(field: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_instant(text)
    except ValueError as error:
        raise invalid(field, str(error), f"{INSTANT_RULE}; a + in a query is written %2B") from error


# --- dead letters -----------------------------------------------------------------------------------------------------


_PURGE_BODY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["confirm"],
    "properties": {
        "confirm": {"type": "string", "description": "The name of the queue once more."},
        "reason": {"type": ["string", "null"], "maxLength": 1024},
    },
}


def _purge_routes(service: TaskService) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/queues", tags=["queues"])

    @routes.post("/{queue}/purge", **documented(body=_PURGE_BODY, answers={200: PurgeView}, problems=(415, 422, 503)))
    async def purge(queue: str, request: Request) -> Response:
        """Cancel all tasks of a queue that wait; those that run go on. Not complete: call again for the rest."""
        fields = parse_fields(await read_json(request, BODY_MAX), ("confirm", "reason"))
        confirmed, reason = fields.get("confirm"), fields.get("reason")
        if not isinstance(confirmed, str):
            raise invalid("confirm", "is not the name of the queue", queue)
        if reason is not None and not isinstance(reason, str):
            raise invalid("reason", "is not a text")
        return json_response(await service.purge(queue, confirmed=confirmed, reason=reason), 200)

    return routes


def _dead_letter_routes(service: TaskService) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/dlq", tags=["dead letters"])

    @routes.get("", **documented(answers={200: TaskList}, problems=(422, 503)))
    async def list_dead_letters(
        request: Request, queue: str | None = None, limit: Limit = 50, cursor: str | None = None
    ) -> Response:
        """The dead-letter queue, newest first: of one queue, or of all."""
        check_query(request, frozenset({"queue", "limit", "cursor"}))
        return json_response(await service.dead_letters(queue, limit=limit, cursor=cursor), 200)

    @routes.post("/retry-all", **documented(answers={200: RedriveAllView}, problems=(422, 503)))
    async def redrive_all(request: Request, queue: str) -> Response:
        """Run all dead letters of a queue again. Not complete: call again for the rest."""
        check_query(request, frozenset({"queue"}))
        return json_response(await service.redrive_all(queue), 200)

    @routes.post("/{task_id}/retry", **documented(answers={200: ChangedView}, problems=(404, 409, 503)))
    async def redrive(task_id: str) -> Response:
        """Run a DEAD or FAILED task again, with fresh attempts."""
        return json_response(await service.redrive(task_id), 200)

    @routes.delete("/{task_id}", **documented(answers={204: None}, problems=(404, 409, 503)))
    async def discard(task_id: str) -> Response:
        """Take a task out of the dead-letter queue; it stays DEAD."""
        await service.discard(task_id)
        return Response(status_code=204)

    return routes


# --- operating --------------------------------------------------------------------------------------------------------


def _operating_routes(
    health: Callable[[], Health], readiness: Callable[[], Health], metrics: CollectorRegistry
) -> APIRouter:
    routes = APIRouter(tags=["operating"])

    @routes.get("/healthz", **documented(answers={200: HealthView, 503: HealthView}, problems=()))
    async def healthz() -> Response:
        """200 while every part makes progress; 503 with the reasons otherwise."""
        view = health_view(health())
        return json_response(view, 503 if view.reasons else 200, {"Retry-After": "1"} if view.reasons else {})

    @routes.get("/readyz", **documented(answers={200: HealthView, 503: HealthView}, problems=()))
    async def readyz() -> Response:
        """Whether the process does its work now; one that does not should be sent nothing."""
        view = health_view(readiness())
        return json_response(view, 503 if view.reasons else 200, {"Retry-After": "1"} if view.reasons else {})

    @routes.get("/metrics", response_class=Response)
    async def metrics_text() -> Response:
        """Metrics in the text format of Prometheus."""
        text = await asyncio.to_thread(generate_latest, metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes


def _schema_routes(answer: SchemaAnswer) -> APIRouter:
    routes = APIRouter(tags=["schemas"])

    @routes.get("/schemas/{path:path}", response_class=Response)
    @routes.get("/subjects", response_class=Response)
    @routes.get("/subjects/{path:path}", response_class=Response)
    async def read_schemas(request: Request) -> Response:
        """The read endpoints of a Confluent-compatible schema registry, for the schemas that are built in."""
        raw_path = request.scope.get("raw_path") or request.url.path.encode()
        status, body = answer(raw_path.partition(b"?")[0].decode("ascii", "replace"))
        return Response(msgspec.json.encode(body), status, media_type=REGISTRY_MEDIA_TYPE)

    return routes


# --- errors -----------------------------------------------------------------------------------------------------------


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal_response(error.refusal)


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem_response(http_problem(error.status_code, str(error.detail)), error.headers)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = tuple(field_error(_without_place(details)) for details in error.errors()[:ERRORS_MAX])
    summary = "; ".join(f"{one.field} {one.message}" for one in errors[:3])
    return refusal_response(Refusal(RefusalKind.INVALID, summary, errors))


def _without_place(details: ErrorDetails) -> ErrorDetails:
    return {**details, "loc": tuple(details["loc"])[1:]}  # the first says "query"; the name alone is what was sent


async def _on_media_type(_: Request, error: Exception) -> Response:
    return problem_response(http_problem(415, "the body must be JSON, with Content-Type: application/json"))


def _traceparent(request: Request) -> str | None:
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else None
