"""A submitted task in the hands of its submitter."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

from scheduler.refusals import RefusalKind, Refused
from scheduler.service import CancelView
from scheduler.task_view import TaskView
from schemas.messages import Status
from tidewheel.backend import Backend
from tidewheel.errors import (
    NotSubmitted,
    ResultNotKept,
    ResultTimeout,
    TaskFailed,
    TaskNotFound,
    TaskWasCancelled,
    TidewheelError,
)
from workers.registry import Handler
from workers.values import decode_json

R = TypeVar("R")
WAIT_FOREVER_S = 3_600.0  # one wait; `result()` without a timeout waits again


class TaskHandle(Generic[R]):
    """One task: its id, how it stands, its result. Every call has an `async` twin that begins with `a`."""

    def __init__(self, task_id: str, backend: Backend, handler: Handler | None = None) -> None:
        self.task_id = task_id
        self._backend = backend
        self._handler = handler

    def __repr__(self) -> str:
        return f"<TaskHandle {self.task_id}>"

    def info(self) -> TaskView:
        """All that is known of the task. Raises TaskNotFound."""
        try:
            return self._backend.get(self.task_id).run()
        except Refused as refused:
            raise translated(refused) from refused

    async def ainfo(self) -> TaskView:
        """All that is known of the task. Raises TaskNotFound."""
        try:
            return await self._backend.get(self.task_id)
        except Refused as refused:
            raise translated(refused) from refused

    def status(self) -> Status:
        """Where the task stands. Raises TaskNotFound."""
        return self.info().status

    async def astatus(self) -> Status:
        """Where the task stands. Raises TaskNotFound."""
        return (await self.ainfo()).status

    def result(self, timeout: float | None = None) -> R:
        """What the handler returned, once it has; waits up to `timeout` seconds, or for ever.

        Raises ResultTimeout, TaskFailed, TaskWasCancelled, ResultNotKept or TaskNotFound.
        """
        while True:
            try:
                view = self._backend.wait(self.task_id, WAIT_FOREVER_S if timeout is None else timeout).run()
            except Refused as refused:
                raise translated(refused) from refused
            if view.is_final or timeout is not None:
                return self._result_of(view, timeout)

    async def aresult(self, timeout: float | None = None) -> R:  # noqa: ASYNC109 (the twin of `result`)
        """What the handler returned, once it has; waits up to `timeout` seconds, or for ever. Raises as `result`."""
        while True:
            try:
                view = await self._backend.wait(self.task_id, WAIT_FOREVER_S if timeout is None else timeout)
            except Refused as refused:
                raise translated(refused) from refused
            if view.is_final or timeout is not None:
                return self._result_of(view, timeout)

    def cancel(self, reason: str | None = None) -> CancelView:
        """Stop the task: a waiting one never starts, a running one is told to stop. Raises NotSubmitted if it ended."""
        try:
            return self._backend.cancel(self.task_id, reason=reason).run()
        except Refused as refused:
            raise translated(refused) from refused

    async def acancel(self, reason: str | None = None) -> CancelView:
        """Stop the task: a waiting one never starts, a running one is told to stop. Raises NotSubmitted if it ended."""
        try:
            return await self._backend.cancel(self.task_id, reason=reason)
        except Refused as refused:
            raise translated(refused) from refused

    def _result_of(self, view: TaskView, timeout: float | None) -> R:
        if view.is_partial:
            raise ResultTimeout(
                f"task {view.task_id} is {view.status}; after {timeout} s the view lags behind: ask again"
            )
        if view.status is Status.SUCCEEDED:
            return cast("R", self._value_of(view))
        if view.status is Status.CANCELLED:
            raise TaskWasCancelled(f"task {view.task_id} was cancelled: {view.cancel_reason or 'no reason was given'}")
        if view.status in (Status.FAILED, Status.DEAD):
            raise TaskFailed(view.task_id, view.status, view.error)
        raise ResultTimeout(f"task {view.task_id} is {view.status} after {timeout} s; it goes on")

    def _value_of(self, view: TaskView) -> Any:
        if not view.has_result:
            raise ResultNotKept(f"task {view.task_id} succeeded, but its result is not kept any more")
        content = bytes(view.result)
        return self._handler.result(content) if self._handler is not None else decode_json(content)


def translated(refused: Refused) -> TidewheelError:
    """The SDK's exception for a refusal."""
    if refused.refusal.kind is RefusalKind.NOT_FOUND:
        return TaskNotFound(refused.refusal.detail)
    return NotSubmitted(refused.refusal)
