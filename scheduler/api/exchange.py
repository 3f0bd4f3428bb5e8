"""What the routes have in common: answers as JSON, and what may stand in a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from fastapi import Query, Request, Response

from scheduler.refusals import invalid
from schemas.limits import PAGE_MAX

Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]


def json_response(body: msgspec.Struct, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """An answer as JSON."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), media_type="application/json")


def check_query(request: Request, allowed: frozenset[str]) -> None:
    """Refuse parameters that are not known. Raises Refused."""
    for name in request.query_params:
        if name not in allowed:
            raise invalid(name[:128], "is not a known parameter", ", ".join(sorted(allowed)) or "no parameter")
