"""The life of a task: the table of its transitions, and the fold of its events.

All that decides which status may follow which is in this file; docs/LIFECYCLE.md and the tests are made from the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from schemas.messages import (
    Event,
    EventBody,
    NextStep,
    Status,
    Task,
    TaskAttemptFailed,
    TaskAttemptLost,
    TaskCancelled,
    TaskCancelRequested,
    TaskCheckpointed,
    TaskDeferred,
    TaskDiscarded,
    TaskExpired,
    TaskRedriven,
    TaskReleased,
    TaskSnoozed,
    TaskStarted,
    TaskSubmitted,
    TaskSucceeded,
    TaskUnblocked,
    TaskUpdated,
)

WAITING = frozenset({Status.SCHEDULED, Status.BLOCKED, Status.PENDING, Status.RETRYING})
TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.DEAD, Status.CANCELLED})
NOT_KNOWN = None  # the task does not exist, or its shard has forgotten it since it ended


class Transition(NamedTuple):
    """Where a task may stand before an event, where it may stand after it, and when that happens."""

    before: frozenset[Status | None]
    after: frozenset[Status]
    meaning: str


def _row(before: set[Status | None] | frozenset[Status], after: set[Status], meaning: str) -> Transition:
    return Transition(frozenset(before), frozenset(after), meaning)


TRANSITIONS: dict[type[EventBody], Transition] = {
    TaskSubmitted: _row({NOT_KNOWN}, {Status.PENDING, Status.SCHEDULED, Status.BLOCKED}, "accepted"),
    TaskReleased: _row({Status.SCHEDULED, Status.RETRYING}, {Status.PENDING}, "its time came"),
    TaskDeferred: _row({Status.SCHEDULED}, {Status.SCHEDULED}, "put off: its queue is crowded, its priority low"),
    TaskUnblocked: _row({Status.BLOCKED}, {Status.PENDING, Status.SCHEDULED}, "its dependencies are done"),
    TaskStarted: _row({Status.PENDING}, {Status.RUNNING}, "a worker began an attempt"),
    TaskSucceeded: _row({Status.RUNNING}, {Status.SUCCEEDED}, "the handler returned"),
    TaskAttemptFailed: _row(
        {Status.RUNNING}, {Status.RETRYING, Status.FAILED, Status.DEAD, Status.CANCELLED}, "the handler failed"
    ),
    TaskSnoozed: _row({Status.RUNNING}, {Status.SCHEDULED}, "the handler asked to be called later"),
    TaskAttemptLost: _row(
        {Status.RUNNING}, {Status.PENDING, Status.RETRYING, Status.DEAD, Status.CANCELLED}, "the worker went away"
    ),
    TaskUpdated: _row(WAITING, {Status.PENDING, Status.SCHEDULED, Status.RETRYING, Status.BLOCKED}, "changed"),
    TaskCancelRequested: _row({Status.RUNNING}, {Status.RUNNING}, "told to stop"),
    TaskCancelled: _row(WAITING | {Status.RUNNING}, {Status.CANCELLED}, "cancelled"),
    TaskExpired: _row(WAITING | {Status.RUNNING}, {Status.FAILED, Status.DEAD}, "its deadline passed"),
    TaskCheckpointed: _row({Status.RUNNING}, {Status.RUNNING}, "saved its progress"),
    TaskRedriven: _row({NOT_KNOWN, Status.DEAD, Status.FAILED}, {Status.PENDING}, "run again by an operator"),
    TaskDiscarded: _row({Status.DEAD}, {Status.DEAD}, "given up by an operator"),
}


class IllegalTransition(Exception):
    """An event that cannot follow what happened before; nothing was changed. It is a defect, never a user's fault."""


def is_terminal(status: Status) -> bool:
    """Whether a task of this status changes only by an operator's redrive."""
    return status in TERMINAL


def evolve(task: Task | None, event: Event) -> Task:
    """The task after `event`; the only way in which a task changes. Raises IllegalTransition."""
    body = event.body
    row = TRANSITIONS.get(type(body))
    if row is None:
        raise IllegalTransition(f"{type(body).__name__} changes no task")
    if (task.status if task else NOT_KNOWN) not in row.before:
        raise IllegalTransition(
            f"{type(body).__name__} for {event.entity_id}, which is {task.status if task else 'not known'}"
        )
    after = _FOLDS[type(body)](task, event, body)
    if after.status not in row.after:
        raise IllegalTransition(f"{type(body).__name__} leads {event.entity_id} to {after.status}")
    return after


def _changed(task: Task, event: Event, **fields: Any) -> Task:
    return replace(task, version=event.version, updated_at=event.at, **fields)


def _submitted(_: None, event: Event, body: TaskSubmitted) -> Task:
    return Task(
        task_id=event.entity_id,
        spec=body.spec,
        status=body.status,
        version=event.version,
        created_at=event.at,
        updated_at=event.at,
        next_run_at=body.next_run_at,
        deadline_at=body.deadline_at,
        fingerprint=body.fingerprint,
        traceparent=event.traceparent,
    )


def _released(task: Task, event: Event, _: TaskReleased) -> Task:
    return _changed(task, event, status=Status.PENDING)


def _deferred(task: Task, event: Event, body: TaskDeferred) -> Task:
    return _changed(task, event, next_run_at=body.next_run_at)


def _unblocked(task: Task, event: Event, body: TaskUnblocked) -> Task:
    status = Status.PENDING if body.next_run_at <= event.at else Status.SCHEDULED
    return _changed(task, event, status=status, next_run_at=body.next_run_at)


def _started(task: Task, event: Event, body: TaskStarted) -> Task:
    return _changed(
        task,
        event,
        status=Status.RUNNING,
        attempt=body.attempt,
        worker_id=body.worker_id,
        started_at=body.started_at,
        start_accepted_at=event.at,
        next_run_at=None,
    )


def _succeeded(task: Task, event: Event, _: TaskSucceeded) -> Task:
    return _changed(task, event, status=Status.SUCCEEDED, worker_id=None)


_AFTER = {
    NextStep.RETRY: Status.RETRYING,
    NextStep.FAILED: Status.FAILED,
    NextStep.DEAD: Status.DEAD,
    NextStep.CANCELLED: Status.CANCELLED,
    NextStep.UNKNOWN: Status.UNKNOWN,  # of a newer writer: no transition leads there, so that it is refused
}


def _attempt_failed(task: Task, event: Event, body: TaskAttemptFailed) -> Task:
    return _changed(
        task,
        event,
        status=_AFTER[body.next_step],
        failure_count=body.failure_count,
        last_delay_ms=body.delay_ms,
        last_error=body.error,
        next_run_at=body.retry_at,
        worker_id=None,
    )


def _snoozed(task: Task, event: Event, body: TaskSnoozed) -> Task:
    return _changed(
        task,
        event,
        status=Status.SCHEDULED,
        snooze_count=body.snooze_count,
        next_run_at=body.next_run_at,
        worker_id=None,
    )


def _attempt_lost(task: Task, event: Event, body: TaskAttemptLost) -> Task:
    is_at_once = body.next_step is NextStep.RETRY and body.retry_at is None
    return _changed(
        task,
        event,
        status=Status.PENDING if is_at_once else _AFTER[body.next_step],
        crash_count=body.crash_count,
        last_error=body.error,
        next_run_at=event.at if is_at_once else body.retry_at,
        worker_id=None,
    )


def _updated(task: Task, event: Event, body: TaskUpdated) -> Task:
    return _changed(
        task, event, spec=body.spec, status=body.status, next_run_at=body.next_run_at, deadline_at=body.deadline_at
    )


def _cancel_requested(task: Task, event: Event, body: TaskCancelRequested) -> Task:
    return _changed(task, event, cancel_requested_at=event.at, cancel_reason=body.reason)


def _cancelled(task: Task, event: Event, body: TaskCancelled) -> Task:
    return _changed(task, event, status=Status.CANCELLED, cancel_reason=body.reason, next_run_at=None, worker_id=None)


def _expired(task: Task, event: Event, body: TaskExpired) -> Task:
    return _changed(task, event, status=body.status, last_error=body.error, next_run_at=None, worker_id=None)


def _checkpointed(task: Task, event: Event, body: TaskCheckpointed) -> Task:
    return _changed(task, event, checkpoint=body.checkpoint)


def _redriven(_: Task | None, event: Event, body: TaskRedriven) -> Task:
    # Attempt numbers go on where they stopped: they are fencing tokens, so none may ever be used twice.
    return _changed(
        body.task,
        event,
        spec=replace(body.task.spec, start_deadline_at=None),
        status=Status.PENDING,
        next_run_at=event.at,
        deadline_at=deadline_of(body.task.spec.total_timeout_ms, event.at),
        failure_count=0,
        crash_count=0,
        last_delay_ms=0,
        worker_id=None,
        cancel_requested_at=None,
        cancel_reason=None,
    )


def _discarded(task: Task, event: Event, _: TaskDiscarded) -> Task:
    return _changed(task, event)


def deadline_of(total_timeout_ms: int | None, due_at: int) -> int | None:
    """When the whole task must be over: its total time counts from when it is due."""
    return None if total_timeout_ms is None else due_at + total_timeout_ms * 1000


_FOLDS: dict[type[Any], Callable[[Any, Event, Any], Task]] = {
    TaskSubmitted: _submitted,
    TaskReleased: _released,
    TaskDeferred: _deferred,
    TaskUnblocked: _unblocked,
    TaskStarted: _started,
    TaskSucceeded: _succeeded,
    TaskAttemptFailed: _attempt_failed,
    TaskSnoozed: _snoozed,
    TaskAttemptLost: _attempt_lost,
    TaskUpdated: _updated,
    TaskCancelRequested: _cancel_requested,
    TaskCancelled: _cancelled,
    TaskExpired: _expired,
    TaskCheckpointed: _checkpointed,
    TaskRedriven: _redriven,
    TaskDiscarded: _discarded,
}
