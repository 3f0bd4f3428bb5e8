"""Schedules: what is decided when a nominal time comes, and the fold of a schedule's events. Pure.

Which instants are nominal times is computed in `cron`. A fire is two events, in this order: ScheduleFired on the
schedule, and TaskSubmitted of its run, whose id is `<schedule_id>.<nominal time>`. Between the two the run is *due*: a
crash there loses nothing, since whoever loads the shard submits what is due. So a nominal time that was decided is
never decided again, and its task is submitted once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, get_args

from msgspec.structs import replace

from cron.errors import InvalidSchedule
from cron.limits import EARLIEST_US, LATEST_US
from cron.patterns import CalendarPattern, IntervalPattern, Pattern
from cron.schedule import Recurrence
from cron.wall_clock import FoldPolicy, GapPolicy, cron_pattern
from schemas.messages import (
    DueRun,
    Event,
    FireCause,
    MisfirePolicy,
    OverlapPolicy,
    Schedule,
    ScheduleBackfilled,
    ScheduleCreated,
    ScheduleDeleted,
    ScheduleFired,
    ScheduleFlagged,
    SchedulePaused,
    ScheduleResumed,
    ScheduleSkipped,
    ScheduleSpec,
    ScheduleUpdated,
    SkipReason,
)

FIRES_PER_STEP = 100  # of one schedule: those of others, and inputs, come in between
DUE_MAX = 100  # runs of one schedule that were decided and cannot be submitted
MISFIRE_MAX, GRACE_MS_MIN, GRACE_MS_MAX, JITTER_MS_MAX = 1_000, 1_000, 86_400_000, 86_400_000
_PATTERNS_KEPT = 10_000  # patterns by what they were made of: parsing costs ten times as much as the next fire

ScheduleBody = (
    ScheduleCreated
    | ScheduleUpdated
    | SchedulePaused
    | ScheduleResumed
    | ScheduleDeleted
    | ScheduleFired
    | ScheduleBackfilled
    | ScheduleSkipped
    | ScheduleFlagged
)
SCHEDULE_BODIES = frozenset(get_args(ScheduleBody))


# --- nominal times ----------------------------------------------------------------------------------------------------


@lru_cache(_PATTERNS_KEPT)
def _cron(text: str, timezone: str, gap: str, fold: str) -> Pattern:
    return cron_pattern(text, timezone, GapPolicy(gap), FoldPolicy(fold))


def recurrence_of(spec: ScheduleSpec) -> Recurrence:
    """The nominal times that a specification means. Raises InvalidSchedule."""
    given = [spec.cron_expression is not None, spec.every_ms is not None, bool(spec.calendar)]
    if sum(given) != 1:
        raise InvalidSchedule("cron_expression", "is not the only rule", "one of cron_expression, every and calendar")
    pattern: Pattern
    if spec.cron_expression is not None:
        pattern = _cron(spec.cron_expression, spec.timezone, spec.gap.value, spec.fold.value)
    elif spec.every_ms is not None:
        pattern = IntervalPattern(spec.every_ms * 1_000, spec.anchor_at)
    else:
        pattern = CalendarPattern(spec.calendar)
    start_us = EARLIEST_US if spec.start_at is None else spec.start_at
    end_us = LATEST_US if spec.end_at is None else spec.end_at
    return Recurrence(pattern, start_us, end_us, spec.jitter_ms * 1_000)


def run_id(schedule_id: str, nominal_at: int) -> str:
    """The id of the task of a nominal time: there is at most one task under it, whatever happens."""
    instant = datetime.fromtimestamp(nominal_at // 1_000_000, UTC)
    micros = nominal_at % 1_000_000
    fraction = f".{micros:06}" if micros else ""
    return f"{schedule_id}.{instant:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def schedule_of_run(task_id: str) -> str | None:
    """The schedule that a task may be a run of: what its id has before the first dot."""
    schedule_id, dot, _ = task_id.partition(".")
    return schedule_id if dot else None


# --- the fold ---------------------------------------------------------------------------------------------------------


def evolve_schedule(schedule: Schedule | None, event: Event) -> Schedule | None:
    """The schedule after one of its events; None: it is deleted. An event that cannot follow raises ValueError."""
    body = event.body
    if isinstance(body, ScheduleCreated):
        return Schedule(
            schedule_id=event.entity_id,
            spec=body.spec,
            version=event.version,
            created_at=event.at,
            updated_at=event.at,
            is_paused=body.is_paused,
            considered_at=event.at,
            next_fire_at=body.next_fire_at,
            tzdata=body.tzdata,
            fingerprint=body.fingerprint,
        )
    if schedule is None:
        raise ValueError(f"{type(body).__name__} of schedule {event.entity_id}, which is not known")
    return None if isinstance(body, ScheduleDeleted) else _after(replace(schedule, version=event.version), event)


def _after(schedule: Schedule, event: Event) -> Schedule:
    body = event.body
    match body:
        case ScheduleUpdated():
            changed = replace(schedule, spec=body.spec, considered_at=body.considered_at, problem=None)
            return replace(changed, next_fire_at=body.next_fire_at, tzdata=body.tzdata, updated_at=event.at)
        case SchedulePaused():
            return replace(schedule, is_paused=True, pause_reason=body.reason, next_fire_at=None, updated_at=event.at)
        case ScheduleResumed():
            resumed = replace(schedule, is_paused=False, pause_reason=None, updated_at=event.at)
            return replace(resumed, next_fire_at=body.next_fire_at, tzdata=body.tzdata, problem=None)
        case ScheduleFired():
            return _fired(schedule, body)
        case ScheduleBackfilled():
            return replace(schedule, due=(*schedule.due, *body.runs), fired=schedule.fired + len(body.runs))
        case ScheduleSkipped():
            is_overlap = body.reason is SkipReason.OVERLAP
            return replace(
                schedule,
                considered_at=body.nominal_at,
                next_fire_at=body.next_fire_at,
                tzdata=body.tzdata,
                skipped=schedule.skipped + is_overlap,
                missed=schedule.missed + body.missed,
            )
        case ScheduleFlagged():
            return replace(schedule, problem=body.problem, next_fire_at=None, updated_at=event.at)
    raise ValueError(f"{type(body).__name__} changes no schedule")


def _fired(schedule: Schedule, body: ScheduleFired) -> Schedule:
    due = (*schedule.due, DueRun(task_id=body.task_id, nominal_at=body.nominal_at))
    fired = replace(schedule, due=due, fired=schedule.fired + 1, missed=schedule.missed + body.missed)
    if body.cause is FireCause.TRIGGER:
        return fired
    return replace(
        fired,
        considered_at=body.nominal_at,
        last_fired_at=body.nominal_at,
        next_fire_at=body.next_fire_at,
        tzdata=body.tzdata,
    )


def with_run(schedule: Schedule, task_id: str, *, is_live: bool) -> Schedule:
    """The schedule once the task of one of its runs was submitted, goes on, or has ended."""
    due = tuple(run for run in schedule.due if run.task_id != task_id)
    running = schedule.running
    if schedule.spec.overlap is not OverlapPolicy.ALLOW or not is_live:
        running = tuple(one for one in running if one != task_id)
    if is_live and schedule.spec.overlap is not OverlapPolicy.ALLOW:
        running = (*running, task_id) if task_id not in schedule.running else schedule.running
    return (
        schedule if (due, running) == (schedule.due, schedule.running) else replace(schedule, due=due, running=running)
    )


# --- what time does ---------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """When a schedule fires next, and by which version of the zones' rules."""

    next_fire_at: int | None
    tzdata: str


def plan_after(spec: ScheduleSpec, instant: int, tzdata: str) -> Plan:
    """The first nominal time after an instant. Raises InvalidSchedule."""
    return Plan(recurrence_of(spec).next_after(instant), tzdata)


def wake_at(schedule: Schedule) -> int | None:
    """When the clock may change the schedule: its next nominal time, later by its jitter."""
    if schedule.is_paused or schedule.next_fire_at is None:
        return None
    if not schedule.spec.jitter_ms:
        return schedule.next_fire_at
    return recurrence_of(schedule.spec).run_at(schedule.schedule_id, schedule.next_fire_at)


def replanned(schedule: Schedule, tzdata: str) -> ScheduleUpdated | None:
    """The change that new rules of its time zone make, if they do."""
    if schedule.is_paused or schedule.problem is not None or schedule.tzdata == tzdata:
        return None
    next_fire_at, _ = plan_after(schedule.spec, schedule.considered_at, tzdata)
    if next_fire_at == schedule.next_fire_at:
        return None
    return ScheduleUpdated(
        spec=schedule.spec, considered_at=schedule.considered_at, next_fire_at=next_fire_at, tzdata=tzdata
    )


def decide_fire(schedule: Schedule, now: int, tzdata: str) -> ScheduleFired | ScheduleSkipped | None:
    """What the next nominal time brings, if it has come; to be asked again until nothing does. Raises InvalidSchedule.

    Nominal times that are later than the grace were missed: which of them are made up for says the misfire policy.
    """
    at = wake_at(schedule)
    if at is None or at > now or schedule.next_fire_at is None:
        return None
    spec, recurrence = schedule.spec, recurrence_of(schedule.spec)
    first = schedule.next_fire_at
    last_missed = recurrence.previous_at_or_before(now - spec.misfire_grace_ms * 1_000 - spec.jitter_ms * 1_000 - 1)
    if last_missed is None or last_missed < first:
        return _fire(schedule, recurrence, first, FireCause.TIME, 0, tzdata)
    made_up = _made_up(spec, recurrence, first, last_missed, now)
    if made_up is None:
        missed = recurrence.count(first - 1, last_missed)
        next_fire_at = recurrence.next_after(last_missed)
        return ScheduleSkipped(
            nominal_at=last_missed,
            reason=SkipReason.MISSED,
            next_fire_at=next_fire_at,
            tzdata=tzdata,
            missed=missed,
        )
    missed = recurrence.count(first - 1, made_up - 1)
    return _fire(schedule, recurrence, made_up, FireCause.MADE_UP, missed, tzdata)


def _made_up(spec: ScheduleSpec, recurrence: Recurrence, first: int, last_missed: int, now: int) -> int | None:
    """The first of the missed nominal times that is run after all."""
    oldest = first if spec.max_lateness_ms is None else max(first, now - spec.max_lateness_ms * 1_000)
    wanted = {MisfirePolicy.LATEST: 1, MisfirePolicy.ALL: spec.misfire_max}.get(spec.misfire, 0)
    if spec.misfire is MisfirePolicy.LATEST:
        following = recurrence.next_after(last_missed)
        if following is not None and following <= now:
            return None  # one that is in time stands for those before it
    made_up = None
    for made_up in islice(recurrence.back(last_missed, oldest - 1), wanted):  # noqa: B007 - the last one is wanted
        pass
    return made_up


def _fire(
    schedule: Schedule, recurrence: Recurrence, nominal_at: int, cause: FireCause, missed: int, tzdata: str
) -> ScheduleFired | ScheduleSkipped:
    next_fire_at = recurrence.next_after(nominal_at)
    fired = ScheduleFired(
        nominal_at=nominal_at,
        task_id=run_id(schedule.schedule_id, nominal_at),
        cause=cause,
        next_fire_at=next_fire_at,
        tzdata=tzdata,
        missed=missed,
    )
    return skipped_for(fired, SkipReason.OVERLAP) if is_blocked(schedule) else fired


def skipped_for(fired: ScheduleFired, reason: SkipReason) -> ScheduleSkipped:
    """The same nominal time, without a run."""
    return ScheduleSkipped(
        nominal_at=fired.nominal_at,
        reason=reason,
        next_fire_at=fired.next_fire_at,
        tzdata=fired.tzdata,
        missed=fired.missed,
    )


def is_blocked(schedule: Schedule) -> bool:
    """Whether a run must not be added to those that are not over."""
    match schedule.spec.overlap:
        case OverlapPolicy.ALLOW | OverlapPolicy.CANCEL_RUNNING:
            return len(schedule.due) >= DUE_MAX
        case OverlapPolicy.QUEUE:
            return bool(schedule.due)
    return bool(schedule.running or schedule.due)


def next_due(schedule: Schedule) -> DueRun | None:
    """The run to be submitted now. With overlap skip more than one are due only after a backfill."""
    is_alone = schedule.spec.overlap in (OverlapPolicy.SKIP, OverlapPolicy.QUEUE)
    return None if not schedule.due or (is_alone and schedule.running) else schedule.due[0]


def to_cancel(schedule: Schedule) -> tuple[str, ...]:
    """Runs that must stop, since a later one began."""
    is_asked = schedule.spec.overlap is OverlapPolicy.CANCEL_RUNNING
    return schedule.running[:-1] if is_asked else ()
