"""One function per request about a schedule: what happens, given what is known of it. Pure, like `core.decisions`."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from cron.errors import InvalidSchedule
from scheduler.core import decisions
from scheduler.core.schedule import (
    GRACE_MS_MAX,
    GRACE_MS_MIN,
    JITTER_MS_MAX,
    MISFIRE_MAX,
    ScheduleBody,
    is_blocked,
    plan_after,
    recurrence_of,
    run_id,
)
from schemas.ids import NAME_RULE, is_name
from schemas.messages import (
    ControlSchedule,
    CreateSchedule,
    DueRun,
    FireCause,
    MisfirePolicy,
    Outcome,
    OverlapPolicy,
    RunSchedule,
    Schedule,
    ScheduleAction,
    ScheduleBackfilled,
    ScheduleCreated,
    ScheduleDeleted,
    ScheduleFired,
    SchedulePaused,
    ScheduleResumed,
    ScheduleSpec,
    ScheduleUpdated,
    SubmitTask,
    UpdateSchedule,
)

SCHEDULE_ID_MAX = 90  # characters: with a nominal time behind it, it still is a name
REASON_MAX = decisions.REASON_MAX
ALL_RUN = "all nominal times of the range have their runs"
BACKFILL_MAX = 1_000  # runs of one request: they are held in memory, and in one event


class ScheduleDecision(NamedTuple):
    """What happened (None: nothing), and how the one who asked is answered."""

    body: ScheduleBody | None = None
    outcome: Outcome = Outcome.ACCEPTED
    detail: str | None = None


def _refused(outcome: Outcome, detail: str) -> ScheduleDecision:
    return ScheduleDecision(None, outcome, detail)


_UNKNOWN = _refused(Outcome.NOT_FOUND, "no schedule has this id")


def decide_create(known: Schedule | None, request: CreateSchedule, now: int, tzdata: str) -> ScheduleDecision:
    """Make a schedule; the first one under an id wins."""
    if known is not None:
        theirs, ours = request.fingerprint, known.fingerprint
        if theirs is not None and ours is not None and theirs != ours:
            return _refused(Outcome.CONFLICT, "another schedule has this name")
        return _refused(Outcome.DUPLICATE, "this schedule was made before")
    problem = schedule_id_problem(request.schedule_id) or spec_problem(request.schedule_id, request.spec, now)
    if problem:
        return _refused(Outcome.INVALID, problem)
    plan = plan_after(request.spec, now, tzdata)
    body = ScheduleCreated(
        spec=request.spec,
        is_paused=request.is_paused,
        next_fire_at=None if request.is_paused else plan.next_fire_at,
        tzdata=plan.tzdata,
        fingerprint=request.fingerprint,
    )
    return ScheduleDecision(body)


def schedule_id_problem(schedule_id: str) -> str | None:
    """Why a schedule cannot have an id; None if it can."""
    if is_name(schedule_id) and "." not in schedule_id and len(schedule_id) <= SCHEDULE_ID_MAX:
        return None
    return f"schedule_id must be {NAME_RULE}, without a dot, of at most {SCHEDULE_ID_MAX} characters"


def spec_problem(schedule_id: str, spec: ScheduleSpec, now: int) -> str | None:
    """Why a schedule is refused, naming the field and what is allowed; None if it is not."""
    if not is_name(spec.name):
        return f"name must be {NAME_RULE}"
    bounds = (
        ("jitter_ms", spec.jitter_ms, 0, JITTER_MS_MAX),
        ("misfire_max", spec.misfire_max, 1, MISFIRE_MAX),
        ("misfire_grace_ms", spec.misfire_grace_ms, GRACE_MS_MIN, GRACE_MS_MAX),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            return f"{name} is {value}; allowed: {low} to {high}"
    if spec.max_lateness_ms is not None and spec.max_lateness_ms < 0:
        return f"max_lateness_ms is {spec.max_lateness_ms}; allowed: 0 and more, or absent"
    if spec.overlap is OverlapPolicy.UNKNOWN or spec.misfire is MisfirePolicy.UNKNOWN:
        return "overlap or misfire is a policy that this version does not know"
    try:
        recurrence_of(spec)
    except InvalidSchedule as error:
        return str(error)
    run = SubmitTask(request_id="", spec=spec.task, submitted_at=now, task_id=run_id(schedule_id, now))
    if spec.task.idempotency_key is not None or spec.task.scheduled_at is not None:
        return "the task of a schedule has neither idempotency_key nor scheduled_at: its runs are named by their times"
    return decisions.problem_of(run, now)


def decide_update(known: Schedule | None, request: UpdateSchedule, now: int, tzdata: str) -> ScheduleDecision:
    """Replace what a schedule asks for; nominal times up to now count as decided."""
    if known is None:
        return _UNKNOWN
    if request.expected_version not in (None, known.version):
        detail = f"the schedule has version {known.version}, not {request.expected_version}"
        return _refused(Outcome.VERSION_MISMATCH, detail)
    if request.spec.name != known.spec.name or request.spec.task.tenant_id != known.spec.task.tenant_id:
        return _refused(Outcome.INVALID, "name and tenant_id cannot change: make another schedule")
    problem = spec_problem(known.schedule_id, request.spec, now)
    if problem:
        return _refused(Outcome.INVALID, problem)
    plan = plan_after(request.spec, now, tzdata)
    body = ScheduleUpdated(
        spec=request.spec,
        considered_at=now,
        next_fire_at=None if known.is_paused else plan.next_fire_at,
        tzdata=plan.tzdata,
    )
    return ScheduleDecision(body)


def decide_control(known: Schedule | None, request: ControlSchedule, now: int, tzdata: str) -> ScheduleDecision:
    """Pause, resume or delete. What was missed while paused is decided by the misfire policy at once."""
    if known is None:
        return _UNKNOWN
    if request.reason is not None and len(request.reason) > REASON_MAX:
        return _refused(Outcome.INVALID, f"reason must have at most {REASON_MAX} characters")
    match request.action:
        case ScheduleAction.PAUSE:
            if known.is_paused:
                return _refused(Outcome.DUPLICATE, "paused before")
            return ScheduleDecision(SchedulePaused(reason=request.reason))
        case ScheduleAction.RESUME:
            if not known.is_paused and known.problem is None:
                return _refused(Outcome.DUPLICATE, "it is not paused")
            plan = plan_after(known.spec, known.considered_at, tzdata)
            return ScheduleDecision(ScheduleResumed(next_fire_at=plan.next_fire_at, tzdata=plan.tzdata))
        case ScheduleAction.DELETE:
            return ScheduleDecision(ScheduleDeleted(reason=request.reason))
    return _refused(Outcome.INVALID, "action is one that this version does not know")


def decide_run(
    known: Schedule | None, request: RunSchedule, place: str, now: int, *, is_view_ahead: bool
) -> ScheduleDecision:
    """Run it now, or what a range of nominal times lacks. `place` tells this request from all others."""
    if known is None:
        return _UNKNOWN
    if request.first_at is not None and request.last_at is not None:
        return _decide_backfill(known, request, request.first_at, request.last_at, is_view_ahead=is_view_ahead)
    if is_blocked(known):
        return _refused(Outcome.WRONG_STATUS, f"a run is not over, and overlap is {known.spec.overlap}")
    fired = ScheduleFired(
        nominal_at=now,
        task_id=f"{known.schedule_id}.trigger-{place}",
        cause=FireCause.TRIGGER,
        next_fire_at=known.next_fire_at,
        tzdata=known.tzdata,
    )
    return ScheduleDecision(fired)


def _decide_backfill(
    known: Schedule, request: RunSchedule, first_at: int, last_at: int, *, is_view_ahead: bool
) -> ScheduleDecision:
    limit = request.runs_max
    if not (0 <= first_at <= last_at and 1 <= limit <= BACKFILL_MAX):
        return _refused(Outcome.INVALID, f"first_at must not be after last_at, and runs_max is 1 to {BACKFILL_MAX}")
    if known.spec.overlap is OverlapPolicy.CANCEL_RUNNING:
        return _refused(Outcome.INVALID, "with overlap cancel_running the runs of a range would cancel each other")
    if known.due:
        return _refused(Outcome.WRONG_STATUS, "runs of an earlier request are not over")
    if not is_view_ahead:
        return _refused(Outcome.VIEW_BEHIND, "the view lags behind; try again")
    recurrence, last_at = recurrence_of(known.spec), min(last_at, known.considered_at)
    done = frozenset(request.done)
    if recurrence.count(first_at - 1, last_at) - len(done) > limit:
        return _refused(Outcome.INVALID, f"the range has more than {limit} nominal times without a run: shorten it")
    times = takewhile(lambda time: time <= last_at, recurrence.onward(first_at - 1, last_at))
    runs = [DueRun(task_id=run_id(known.schedule_id, time), nominal_at=time) for time in times if time not in done]
    if not runs:
        return _refused(Outcome.DUPLICATE, ALL_RUN)
    return ScheduleDecision(ScheduleBackfilled(runs=tuple(runs)))
