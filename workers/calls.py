"""One call of a handler, and the two ways to perform it. Used by every executor and by the children of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from schemas.messages import ReadyTask
from workers import execution
from workers.context import Context, SaveCheckpoint, enter, leave
from workers.errors import TaskCancelled
from workers.execution import Cancelled, Outcome
from workers.registry import Handler

NowUs = Callable[[], int]


class Call:
    """An attempt on its way through an executor. Compared by identity."""

    __slots__ = ("context", "ends_at", "handler", "ready")

    def __init__(self, ready: ReadyTask, handler: Handler, ends_at: int | None, save: SaveCheckpoint) -> None:
        self.ready = ready
        self.handler = handler
        self.ends_at = ends_at
        self.context = Context(ready, ends_at, save)


def perform(call: Call, now_us: NowUs) -> Outcome:
    """Run a `def` handler here and now. Whatever it raises is an outcome."""
    token = enter(call.context)
    try:
        arguments = call.handler.arguments(call.ready.payload, call.ready.content_type, call.context)
        return execution.succeeded(call.handler.function(**arguments))
    except BaseException as error:  # SystemExit of a handler is its failure, not the worker's end
        return outcome_of(error, call, now_us)
    finally:
        leave(token)


async def perform_async(call: Call, now_us: NowUs) -> Outcome:
    """Run an `async def` handler in the current asyncio task. Whatever it raises is an outcome."""
    enter(call.context)
    try:
        arguments = call.handler.arguments(call.ready.payload, call.ready.content_type, call.context)
        return execution.succeeded(await call.handler.function(**arguments))
    except BaseException as error:
        return outcome_of(error, call, now_us)


def outcome_of(error: BaseException, call: Call, now_us: NowUs) -> Outcome:
    """What an exception that left the handler means for the attempt."""
    if call.context.is_cancelled and isinstance(error, TaskCancelled | asyncio.CancelledError):
        return Cancelled()
    return execution.failed(error, now_us())
