"""What readers are told of a task: one shape on every surface, made of what the shard and the view know.

How the six answers to "what became of it?" are told apart: an unknown id is NOT_FOUND; a waiting task has a status of
SCHEDULED, BLOCKED, PENDING or RETRYING and `has_result` false; a running one RUNNING; one that returned nothing
SUCCEEDED, `has_result` true and `result` null; one whose result is not kept any more SUCCEEDED and `has_result` false;
a failed one FAILED or DEAD, with `error`.
"""

from __future__ import annotations

import base64

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from scheduler.core.task import is_terminal
from scheduler.instants import format_instant
from scheduler.ports import AttemptOutcome, AttemptRow, TaskRow
from scheduler.strict_json import NotAcceptable, check_json
from scheduler.submission import is_json
from schemas.messages import EndedTask, ErrorKind, Priority, Status, Task, TaskError

_NULL = Raw(b"null")


class ErrorView(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt did not succeed."""

    kind: ErrorKind
    type: str
    message: str
    traceback: str | None = None


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; without an outcome it still runs. Instants are RFC 3339 text in UTC."""

    attempt: int
    worker_id: str | None
    started_at: str | None
    finished_at: str | None
    outcome: AttemptOutcome | None
    error: ErrorView | None


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task as readers see it. Instants are RFC 3339 text in UTC.

    `started_at` and `duration_ms` are of the last attempt. `retry_count` counts the attempts after the first, whatever
    caused them. JSON contents are in `payload` and `result`, others in `payload_base64` and `result_base64`; a list has
    neither contents nor `attempt_history`. `is_partial`: the task ended a moment ago, ask again for what is missing.
    """

    task_id: str
    task_type: str | None
    queue: str | None
    status: Status
    priority: Priority | None
    tenant_id: str | None
    created_at: str
    scheduled_at: str | None
    next_run_at: str | None
    started_at: str | None
    completed_at: str | None
    duration_ms: int | None
    attempts: int
    max_attempts: int | None
    retry_count: int
    crash_count: int | None
    worker_id: str | None
    has_result: bool
    result: Raw
    result_content_type: str | None
    error: ErrorView | None
    metadata: dict[str, str]
    idempotency_key: str | None
    version: int
    cancel_requested_at: str | None
    cancel_reason: str | None
    is_dead_letter: bool
    payload: Raw
    is_partial: bool = False
    last_execution: AttemptView | None = None
    attempt_history: tuple[AttemptView, ...] = ()
    payload_base64: str | None = None
    payload_content_type: str | None = None
    result_base64: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether the task has ended and all that is known of its end is here."""
        return self.completed_at is not None and not self.is_partial


def task_view(row: TaskRow, *, with_contents: bool = True) -> TaskView:
    """The view of a row; without contents for a list."""
    spec = row.spec
    history = tuple(_attempt_view(attempt) for attempt in row.attempts)
    view = TaskView(
        task_id=row.task_id,
        task_type=spec.task_type,
        queue=spec.queue,
        status=row.status,
        priority=spec.priority,
        tenant_id=spec.tenant_id,
        created_at=format_instant(row.created_at),
        scheduled_at=format_instant(row.created_at if spec.scheduled_at is None else spec.scheduled_at),
        next_run_at=_text(row.next_run_at),
        started_at=_text(row.started_at),
        completed_at=_text(row.completed_at),
        duration_ms=_duration_ms(row),
        attempts=row.attempt,
        max_attempts=spec.retry.max_attempts,
        retry_count=max(0, row.attempt - 1),
        crash_count=row.crash_count,
        worker_id=row.worker_id,
        has_result=row.status is Status.SUCCEEDED and row.result is not None,
        result=_NULL,
        result_content_type=row.result_content_type,
        error=None if row.status is Status.SUCCEEDED else _error_view(row.last_error),
        metadata=dict(spec.metadata),  # a copy: whoever is shown a task may do with it what they like
        idempotency_key=spec.idempotency_key,
        version=row.version,
        cancel_requested_at=_text(row.cancel_requested_at),
        cancel_reason=row.cancel_reason,
        is_dead_letter=row.is_dead_letter,
        payload=_NULL,
        last_execution=history[-1] if history else None,
        attempt_history=history,
        payload_content_type=spec.content_type,
    )
    return _with_contents(view, row) if with_contents else view


def _with_contents(view: TaskView, row: TaskRow) -> TaskView:
    payload, payload_base64 = content_view(row.spec.payload, row.spec.content_type)
    result, result_base64 = content_view(row.result, row.result_content_type)
    return replace(view, payload=payload, payload_base64=payload_base64, result=result, result_base64=result_base64)


def content_view(content: bytes | None, content_type: str | None) -> tuple[Raw, str | None]:
    """A content as JSON, or as base64 if it is none: what others wrote to the log may not be what it says."""
    if content is None:
        return _NULL, None
    if is_json(content_type or ""):
        try:
            check_json(content)
        except NotAcceptable:
            pass
        else:
            return Raw(content), None
    return _NULL, base64.b64encode(content).decode()


def partial_view(ended: EndedTask) -> TaskView:
    """The view of a task of which no more is known yet than that it ended, or waits."""
    return TaskView(
        task_id=ended.task_id,
        task_type=None,
        queue=None,
        status=ended.status,
        priority=None,
        tenant_id=None,
        created_at=format_instant(ended.created_at),
        scheduled_at=format_instant(ended.scheduled_at),
        next_run_at=_text(ended.due_at),
        started_at=None,
        completed_at=None if ended.due_at is not None else format_instant(ended.ended_at),
        duration_ms=None,
        attempts=ended.attempt,
        max_attempts=None,
        retry_count=max(0, ended.attempt - 1),
        crash_count=None,
        worker_id=None,
        has_result=False,
        result=_NULL,
        result_content_type=None,
        error=None,
        metadata={},
        idempotency_key=None,
        version=ended.version,
        cancel_requested_at=None,
        cancel_reason=None,
        is_dead_letter=ended.status is Status.DEAD,
        payload=_NULL,
        is_partial=True,
    )


def _attempt_view(row: AttemptRow) -> AttemptView:
    return AttemptView(
        attempt=row.attempt,
        worker_id=row.worker_id,
        started_at=_text(row.started_at),
        finished_at=_text(row.finished_at),
        outcome=row.outcome,
        error=_error_view(row.error),
    )


def _error_view(error: TaskError | None) -> ErrorView | None:
    if error is None:
        return None
    return ErrorView(kind=error.kind, type=error.type, message=error.message, traceback=error.traceback)


def _duration_ms(row: TaskRow) -> int | None:
    if row.started_at is None or row.completed_at is None:
        return None
    return max(0, row.completed_at - row.started_at) // 1000


def _text(instant: int | None) -> str | None:
    return None if instant is None else format_instant(instant)


# --- shard and view together ------------------------------------------------------------------------------------------


def finished_attempts(task: Task) -> int:
    """How many attempts of a live task are over."""
    return task.attempt - 1 if task.status is Status.RUNNING else task.attempt


def is_caught_up(row: TaskRow | None, known: Task | EndedTask) -> bool:
    """Whether the view has all that is to be shown of what the shard knows."""
    if isinstance(known, EndedTask):
        return row is not None and row.version >= known.version
    needed = finished_attempts(known)
    return needed == 0 or (row is not None and _last_finished(row) >= needed)


def _last_finished(row: TaskRow) -> int:
    return max((attempt.attempt for attempt in row.attempts if attempt.outcome is not None), default=0)


def of_same_life(row: TaskRow | None, known: Task | EndedTask) -> TaskRow | None:
    """The row, unless it shows an earlier task under the same id: a key may be used again after its window."""
    return row if row is not None and row.created_at >= known.created_at else None


def merged(task: Task, row: TaskRow | None) -> TaskRow:
    """A live task as its shard has it, with the attempts that the view has; the row itself if that is newer."""
    if row is not None and (row.created_at, row.version) > (task.created_at, task.version):
        return row
    return TaskRow(
        task_id=task.task_id,
        spec=task.spec,
        status=task.status,
        version=task.version,
        created_at=task.created_at,
        updated_at=task.updated_at,
        next_run_at=task.next_run_at,
        deadline_at=task.deadline_at,
        started_at=task.started_at,
        attempt=task.attempt,
        failure_count=task.failure_count,
        crash_count=task.crash_count,
        snooze_count=task.snooze_count,
        worker_id=task.worker_id,
        last_error=task.last_error,
        cancel_requested_at=task.cancel_requested_at,
        cancel_reason=task.cancel_reason,
        fingerprint=task.fingerprint,
        traceparent=task.traceparent,
        attempts=_with_running(task, row.attempts if row else ()),
    )


def _with_running(task: Task, attempts: tuple[AttemptRow, ...]) -> tuple[AttemptRow, ...]:
    if task.status is not Status.RUNNING:
        return attempts
    running = AttemptRow(attempt=task.attempt, worker_id=task.worker_id, started_at=task.started_at)
    return (*(row for row in attempts if row.attempt < task.attempt), running)


def task_of(row: TaskRow) -> Task:
    """The task as its shard knew it when it ended, as far as the view shows it."""
    return Task(
        task_id=row.task_id,
        spec=row.spec,
        status=row.status,
        version=row.version,
        created_at=row.created_at,
        updated_at=row.updated_at,
        next_run_at=row.next_run_at,
        deadline_at=row.deadline_at,
        attempt=row.attempt,
        failure_count=row.failure_count,
        crash_count=row.crash_count,
        snooze_count=row.snooze_count,
        started_at=row.started_at,
        cancel_requested_at=row.cancel_requested_at,
        cancel_reason=row.cancel_reason,
        last_error=row.last_error,
        fingerprint=row.fingerprint,
        traceparent=row.traceparent,
    )


def is_ended(row: TaskRow) -> bool:
    """Whether the row shows a task that changes only by an operator's redrive."""
    return is_terminal(row.status)
