"""The OpenAPI description of bodies that we parse and encode ourselves."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from scheduler.api.problem import MEDIA_TYPE, Problem
from scheduler.limit_service import LimitDeclaration
from scheduler.queue_service import QueueChange, TenantChange
from scheduler.schedule_submission import Backfill, Preview, ScheduleSubmission
from scheduler.submission import Submission, Update

_REF = "#/components/schemas/{name}"
_MODELS: tuple[type[BaseModel], ...] = (
    Submission,
    Update,
    ScheduleSubmission,
    Preview,
    Backfill,
    LimitDeclaration,
    QueueChange,
    TenantChange,
)
_EXAMPLE = {
    "task_type": "email.send",
    "payload": {"to": "ada@example.org", "template": "welcome"},
    "priority": "high",
    "queue": "mail",
    "delay_seconds": 5,
    "max_retries": 3,
    "idempotency_key": "welcome-17",
    "metadata": {"tenant_id": "acme"},
}


def reference(name: str) -> dict[str, str]:
    """A reference to a schema by its name."""
    return {"$ref": _REF.format(name=name)}


def documented(
    *,
    body: dict[str, Any] | None = None,
    is_body_required: bool = True,
    answers: dict[int, type | None],
    problems: tuple[int, ...],
) -> dict[str, Any]:
    """Arguments of a route that say what goes in and what comes out."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status, answer in answers.items():
        responses[status] = {"description": (answer.__doc__ or "").partition("\n")[0] if answer else "Done."}
        if answer is not None:
            responses[status]["content"] = {"application/json": {"schema": reference(answer.__name__)}}
    for status in problems:
        responses[status] = {
            "description": "A problem (RFC 9457).",
            "content": {MEDIA_TYPE: {"schema": reference(Problem.__name__)}},
        }
    arguments: dict[str, Any] = {"responses": responses, "status_code": next(iter(answers))}
    if body is not None:
        content = {"application/json": {"schema": body}}
        arguments["openapi_extra"] = {"requestBody": {"required": is_body_required, "content": content}}
    return arguments


def describe(app: FastAPI, answers: tuple[type, ...]) -> None:
    """Make the app's OpenAPI contain the schemas of our own bodies."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            document.setdefault("components", {}).setdefault("schemas", {}).update(_schemas(answers))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents


def _schemas(answers: tuple[type, ...]) -> dict[str, Any]:
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template=_REF.replace("{name}", "{model}")
    )
    schemas: dict[str, Any] = dict(definitions["$defs"])
    schemas["Submission"]["examples"] = [_EXAMPLE]
    _, components = msgspec.json.schema_components((*answers, Problem), ref_template=_REF, schema_hook=_any_json)
    return schemas | components


def _any_json(kind: type) -> dict[str, Any]:
    if kind is msgspec.Raw:
        return {"description": "Any JSON value, exactly as it was given."}
    raise NotImplementedError  # so msgspec is told that another type has no schema, and says which it was
