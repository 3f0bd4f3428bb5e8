"""REST: what waits for its time in the shards of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import APIRouter, Response

from scheduler.api.documents import documented
from scheduler.api.exchange import json_response
from scheduler.timer_report import TimersView


def timer_routes(timers: Callable[[], TimersView]) -> APIRouter:
    """The route of a process that hosts shards. `timers` is called in a thread: it may take tens of milliseconds."""
    routes = APIRouter(tags=["operating"])

    @routes.get("/api/v1/timers", **documented(answers={200: TimersView}, problems=()))
    async def read_timers() -> Response:
        """What waits for its time in the shards of this process, when the next is due, and how late the last were."""
        return json_response(await asyncio.to_thread(timers), 200)

    return routes
