"""What the SDK raises to the one who submits and waits.

TidewheelError
├── NotSubmitted       the request was refused: `refusal` names the fields and what is allowed
├── TaskNotFound       no task has this id
├── ScheduleNotFound   no schedule has this id
├── ResultTimeout      the task has not ended yet; it goes on
├── ResultNotKept      it succeeded, but its result is not kept any more
├── TaskFailed         it ended as FAILED or DEAD: `error` says why
└── TaskWasCancelled   it ended as CANCELLED
"""

from __future__ import annotations

from scheduler.refusals import Refusal
from scheduler.task_view import ErrorView
from schemas.messages import Status


class TidewheelError(Exception):
    """Base of what the SDK raises."""


class NotSubmitted(TidewheelError):
    """A request was refused; nothing changed, except where `refusal.kind` is UNDECIDED."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


class TaskNotFound(TidewheelError):
    """No task has this id."""


class ScheduleNotFound(TidewheelError):
    """No schedule has this id."""


class ResultTimeout(TidewheelError):
    """The task has not ended within the time that the caller was ready to wait; it goes on."""


class ResultNotKept(TidewheelError):
    """The task succeeded, but its result is not kept any more."""


class TaskFailed(TidewheelError):
    """The task ended as FAILED or DEAD. `error` is that of its last attempt."""

    def __init__(self, task_id: str, status: Status, error: ErrorView | None) -> None:
        reason = f"{error.type}: {error.message}" if error else "no error is known"
        super().__init__(f"task {task_id} is {status}: {reason}")
        self.task_id = task_id
        self.status = status
        self.error = error


class TaskWasCancelled(TidewheelError):
    """The task ended as CANCELLED."""
