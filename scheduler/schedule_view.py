"""What readers are told of a schedule: one shape on every surface."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec import Raw

from scheduler.instants import format_instant
from scheduler.schedule_submission import nominal_text
from scheduler.task_view import content_view
from schemas.messages import Priority, Schedule, Status


class ScheduleStatus(StrEnum):
    """How a schedule stands."""

    ACTIVE = "active"
    PAUSED = "paused"
    ENDED = "ended"  # no nominal time is left
    FLAGGED = "flagged"  # its next nominal time cannot be computed: `problem` says why


class CreatedSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that was made, or changed. `next_fire_time` is RFC 3339 text in UTC; null: none."""

    cron_id: str
    name: str
    next_fire_time: str | None
    status: ScheduleStatus
    version: int


class FireCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Nominal times that became runs, were skipped for overlap, or were missed."""

    fired: int
    skipped: int
    missed: int


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as readers see it. Instants are RFC 3339 text in UTC.

    One of `cron_expression`, `every_seconds` and `calendar` is its rule. `running` are the runs that are not over, as
    far as its overlap policy needs to know them; `waiting` those that were decided and wait for these.
    """

    cron_id: str
    name: str
    status: ScheduleStatus
    enabled: bool
    cron_expression: str | None
    every_seconds: float | None
    anchor: str | None
    calendar: tuple[str, ...] | None
    timezone: str
    task_type: str
    payload: Raw
    queue: str
    priority: Priority
    max_retries: int
    timeout_seconds: float | None
    metadata: dict[str, str]
    tenant_id: str
    overlap_policy: str
    misfire_policy: str
    misfire_max: int
    misfire_grace_seconds: float
    max_lateness_seconds: float | None
    gap_policy: str
    fold_policy: str
    jitter_seconds: float
    start_at: str | None
    end_at: str | None
    declared_by: str | None
    next_fire_time: str | None
    last_fire_time: str | None
    counts: FireCounts
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    problem: str | None
    pause_reason: str | None
    version: int
    tzdata: str
    created_at: str
    updated_at: str
    payload_base64: str | None = None


class ScheduleList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of schedules and the cursor of the next page; null at the end. May lag by milliseconds."""

    schedules: Sequence[ScheduleView]
    cursor: str | None


class TriggeredRun(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a run that was asked for."""

    task_id: str


class BackfilledRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of the runs that a range lacked, in the order of their nominal times."""

    runs: tuple[str, ...]


class PreviewView(msgspec.Struct, frozen=True, kw_only=True):
    """The next nominal times, RFC 3339 in UTC; fewer than asked for: there are no more. `tzdata`: by which rules."""

    next: tuple[str, ...]
    tzdata: str


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A nominal time and the task of its run. Without a status there is no such task: it was skipped or missed."""

    nominal_time: str
    task_id: str
    status: Status | None
    started_at: str | None
    completed_at: str | None


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """The latest nominal times of a schedule, the latest first. May lag by milliseconds."""

    runs: Sequence[RunView]


def status_of(schedule: Schedule) -> ScheduleStatus:
    """How a schedule stands."""
    if schedule.is_paused:
        return ScheduleStatus.PAUSED
    if schedule.problem is not None:
        return ScheduleStatus.FLAGGED
    return ScheduleStatus.ENDED if schedule.next_fire_at is None else ScheduleStatus.ACTIVE


def schedule_view(schedule: Schedule) -> ScheduleView:
    """The view of a schedule."""
    spec, task = schedule.spec, schedule.spec.task
    payload, payload_base64 = content_view(task.payload, task.content_type)
    return ScheduleView(
        cron_id=schedule.schedule_id,
        name=spec.name,
        status=status_of(schedule),
        enabled=not schedule.is_paused,
        cron_expression=spec.cron_expression,
        every_seconds=_seconds(spec.every_ms),
        anchor=nominal_text(spec.anchor_at) if spec.every_ms is not None else None,
        calendar=tuple(map(nominal_text, spec.calendar)) or None,
        timezone=spec.timezone,
        task_type=task.task_type,
        payload=payload,
        payload_base64=payload_base64,
        queue=task.queue,
        priority=task.priority,
        max_retries=task.retry.max_attempts - 1,
        timeout_seconds=_seconds(task.timeout_ms),
        metadata=dict(task.metadata),
        tenant_id=task.tenant_id,
        overlap_policy=spec.overlap,
        misfire_policy=spec.misfire,
        misfire_max=spec.misfire_max,
        misfire_grace_seconds=spec.misfire_grace_ms / 1000,
        max_lateness_seconds=_seconds(spec.max_lateness_ms),
        gap_policy=spec.gap,
        fold_policy=spec.fold,
        jitter_seconds=spec.jitter_ms / 1000,
        start_at=_text(spec.start_at),
        end_at=_text(spec.end_at),
        declared_by=spec.declared_by,
        next_fire_time=_nominal(schedule.next_fire_at),
        last_fire_time=_nominal(schedule.last_fired_at),
        counts=FireCounts(fired=schedule.fired, skipped=schedule.skipped, missed=schedule.missed),
        running=schedule.running,
        waiting=tuple(run.task_id for run in schedule.due),
        problem=schedule.problem,
        pause_reason=schedule.pause_reason,
        version=schedule.version,
        tzdata=schedule.tzdata,
        created_at=format_instant(schedule.created_at),
        updated_at=format_instant(schedule.updated_at),
    )


def created_view(schedule: Schedule) -> CreatedSchedule:
    """What the one who makes a schedule is told."""
    return CreatedSchedule(
        cron_id=schedule.schedule_id,
        name=schedule.spec.name,
        next_fire_time=_nominal(schedule.next_fire_at),
        status=status_of(schedule),
        version=schedule.version,
    )


def _nominal(instant: int | None) -> str | None:
    return None if instant is None else nominal_text(instant)


def _text(instant: int | None) -> str | None:
    return None if instant is None else format_instant(instant)


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
