"""Errors as RFC 9457 problem details: always valid JSON, never with the value that was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from fastapi import Response

from scheduler.refusals import FieldError, Refusal, RefusalKind
from schemas.messages import Status

MEDIA_TYPE = "application/problem+json"

HTTP_STATUS = {
    RefusalKind.INVALID: 422,
    RefusalKind.TOO_LARGE: 413,
    RefusalKind.NOT_FOUND: 404,
    RefusalKind.CONFLICT: 409,
    RefusalKind.WRONG_STATUS: 409,
    RefusalKind.VERSION_MISMATCH: 409,
    RefusalKind.OVERLOADED: 503,
    RefusalKind.TOO_MANY: 429,
    RefusalKind.UNAVAILABLE: 503,
    RefusalKind.UNDECIDED: 503,
}
_TITLES = {
    RefusalKind.INVALID: "The request is not valid",
    RefusalKind.TOO_LARGE: "The content is too large",
    RefusalKind.NOT_FOUND: "There is no such task or schedule",
    RefusalKind.CONFLICT: "Another one has this id, key or name",
    RefusalKind.WRONG_STATUS: "It stands where this cannot be done",
    RefusalKind.VERSION_MISMATCH: "It has another version",
    RefusalKind.OVERLOADED: "Too much to do",
    RefusalKind.TOO_MANY: "Too much of one tenant",
    RefusalKind.UNAVAILABLE: "A part of the scheduler does not answer",
    RefusalKind.UNDECIDED: "Not decided in time",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Problem details (RFC 9457). `errors` names the fields; `task_status` is where the task stands."""

    type: str
    title: str
    status: int
    detail: str
    errors: tuple[FieldError, ...] = ()
    task_status: Status | None = None
    request_id: str | None = None


def problem_of(refusal: Refusal) -> Problem:
    """The problem that a refusal is."""
    return Problem(
        type=f"urn:tidewheel:problem:{refusal.kind}",
        title=_TITLES[refusal.kind],
        status=HTTP_STATUS[refusal.kind],
        detail=refusal.detail,
        errors=refusal.errors,
        task_status=refusal.status,
    )


def http_problem(status: int, detail: str, *, request_id: str | None = None) -> Problem:
    """A problem that is no more than its HTTP status."""
    return Problem(
        type="about:blank", title=HTTPStatus(status).phrase, status=status, detail=detail, request_id=request_id
    )


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The response that tells of a problem."""
    content = msgspec.json.encode(problem)
    return Response(content, problem.status, dict(headers or {}), media_type=MEDIA_TYPE)


def refusal_response(refusal: Refusal) -> Response:
    """The response that tells of a refusal, with Retry-After where the same request may succeed later."""
    retry_after_s = refusal.retry_after_s
    return problem_response(problem_of(refusal), {} if retry_after_s is None else {"Retry-After": str(retry_after_s)})
