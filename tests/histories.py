"""Histories of tasks: events in an order that could have happened, with the tasks that they lead to."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from scheduler.core.task import TRANSITIONS, evolve
from schemas.messages import (
    ErrorKind,
    Event,
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
    TaskError,
    TaskExpired,
    TaskRedriven,
    TaskReleased,
    TaskSnoozed,
    TaskSpec,
    TaskStarted,
    TaskSubmitted,
    TaskSucceeded,
    TaskUnblocked,
    TaskUpdated,
)

START = 1_764_547_200_000_000

Make = Callable[[Any, Random, int], Any]  # (the task before, chance, the time) → an event's body


def _spec(rng: Random) -> TaskSpec:
    return TaskSpec(task_type=rng.choice(["mail", "resize"]), payload=rng.randbytes(8), queue=rng.choice(["a", "b"]))


def _error(rng: Random) -> TaskError:
    return TaskError(kind=rng.choice([ErrorKind.RAISED, ErrorKind.TIMEOUT]), type="OSError", message=str(rng.random()))


def _attempt(task: Task | None) -> dict[str, Any]:
    assert task is not None
    return {"attempt": task.attempt, "worker_id": task.worker_id}


def _step(rng: Random, at: int) -> dict[str, Any]:
    step = rng.choice([NextStep.RETRY, NextStep.RETRY, NextStep.FAILED, NextStep.DEAD, NextStep.CANCELLED])
    return {"next_step": step, "retry_at": at + 5 if step is NextStep.RETRY else None}


BODIES: dict[type, Make] = {
    TaskSubmitted: lambda _, rng, at: TaskSubmitted(
        spec=_spec(rng),
        status=rng.choice([Status.PENDING, Status.SCHEDULED, Status.BLOCKED]),
        next_run_at=at + 7,
        fingerprint=rng.choice([None, "f"]),
    ),
    TaskReleased: lambda *_: TaskReleased(),
    TaskUnblocked: lambda _, rng, at: TaskUnblocked(next_run_at=at + rng.choice([0, 9])),
    TaskStarted: lambda task, rng, at: TaskStarted(
        attempt=(task.attempt if task else 0) + 1, worker_id=rng.choice(["w1", "w2"]), started_at=at - 1
    ),
    TaskSucceeded: lambda task, rng, at: TaskSucceeded(
        **_attempt(task), finished_at=at - 1, result=rng.randbytes(4), content_type="x/y"
    ),
    TaskAttemptFailed: lambda task, rng, at: TaskAttemptFailed(
        **_attempt(task), finished_at=at - 1, error=_error(rng), failure_count=task.failure_count + 1, **_step(rng, at)
    ),
    TaskDeferred: lambda _task, _, at: TaskDeferred(next_run_at=at + 3),
    TaskSnoozed: lambda task, _, at: TaskSnoozed(
        **_attempt(task), finished_at=at - 1, snooze_count=task.snooze_count + 1, next_run_at=at + 3
    ),
    TaskAttemptLost: lambda task, rng, at: TaskAttemptLost(
        **_attempt(task),
        error=_error(rng),
        crash_count=task.crash_count + rng.choice([0, 1]),
        next_step=rng.choice([NextStep.RETRY, NextStep.RETRY, NextStep.DEAD]),
    ),
    TaskUpdated: lambda task, rng, at: TaskUpdated(
        spec=_spec(rng), status=task.status, next_run_at=at + 4, deadline_at=rng.choice([None, at + 99])
    ),
    TaskCancelRequested: lambda *_: TaskCancelRequested(reason="stop"),
    TaskCancelled: lambda *_: TaskCancelled(reason="no more"),
    TaskExpired: lambda _, rng, at: TaskExpired(error=_error(rng), status=rng.choice([Status.FAILED, Status.DEAD])),
    TaskCheckpointed: lambda task, rng, at: TaskCheckpointed(attempt=task.attempt, checkpoint=rng.randbytes(3)),
    TaskRedriven: lambda task, *_: TaskRedriven(task=task),
    TaskDiscarded: lambda *_: TaskDiscarded(),
}


def history(rng: Random, events: int, *, prefix: str = "t", epoch: int = 1) -> tuple[list[Event], dict[str, Task]]:
    """A mixed run of events of several tasks, and where it leaves each."""
    tasks: dict[str, Task] = {}
    log: list[Event] = []
    while len(log) < events:
        task_id = f"{prefix}{rng.randrange(len(tasks) + 2)}"
        task = tasks.get(task_id)
        status = task.status if task else None
        choices = [
            body for body, row in TRANSITIONS.items() if status in row.before and (task or body is TaskSubmitted)
        ]
        if not choices:
            continue
        at = START + len(log) * 1_000
        body = BODIES[rng.choice(choices)](task, rng, at)
        version = (task.version if task else 0) + 1
        event = Event(entity_id=task_id, tenant_id="default", version=version, epoch=epoch, at=at, body=body)
        tasks[task_id] = evolve(task, event)
        log.append(event)
    return log, tasks
