"""The schedules of one shard: what is asked of them, what the clock does to them, and the runs that they submit."""

from __future__ import annotations

from msgspec.structs import replace

from cron.zones import tzdata_version
from scheduler.core import decisions, schedule_requests
from scheduler.core.decisions import Decision
from scheduler.core.desk import LOST, Desk, Effects, Source, name_or_nothing, rejected
from scheduler.core.schedule import (
    FIRES_PER_STEP,
    decide_fire,
    evolve_schedule,
    next_due,
    replanned,
    skipped_for,
    to_cancel,
    wake_at,
    with_run,
)
from scheduler.core.schedule_requests import ScheduleDecision
from scheduler.core.schedules import Schedules
from scheduler.core.task import TERMINAL, deadline_of
from schemas.messages import (
    CancelTask,
    ControlSchedule,
    CreateSchedule,
    Event,
    EventBody,
    Outcome,
    Reply,
    RunSchedule,
    Schedule,
    ScheduleBackfilled,
    ScheduleFired,
    ScheduleFlagged,
    ScheduleRequest,
    SkipReason,
    Status,
    Task,
    TaskSubmitted,
    UpdateSchedule,
)

SCHEDULE = "schedule/"  # begins the keys of schedules in checkpoints
STUCK_US = 1_000_000  # until it is tried again to submit a run for which there was no room, or whose id was taken


class ShardSchedules:
    """What a shard does about schedules. Tasks are its desk's: runs become tasks there, and are told of by it."""

    def __init__(self, desk: Desk, schedules: Schedules, schedules_max: int) -> None:
        self._desk, self.schedules, self._max = desk, schedules, schedules_max

    # --- facts ---------------------------------------------------------------------------------------------------

    def evolve(self, event: Event) -> None:
        """Fold an event of a schedule, if it is its next one."""
        schedules, schedule_id = self.schedules, event.entity_id
        if not schedules.is_next(event):
            return
        after = evolve_schedule(schedules.get(schedule_id), event)
        if after is None:
            schedules.drop(event)
            self._desk.unstore(SCHEDULE + schedule_id)
        else:
            self._keep(after, event.at)

    def note_run(self, schedule_id: str, task: Task) -> None:
        """The task of a run began, goes on or has ended: its schedule may have waited for that."""
        schedule = self.schedules.get(schedule_id)
        if schedule is not None:
            after = with_run(schedule, task.task_id, is_live=task.status not in TERMINAL)
            if after is not schedule:
                self._keep(after, task.updated_at)

    def _keep(self, schedule: Schedule, now: int) -> None:
        self.schedules.put(schedule)
        self._desk.note_changed(SCHEDULE + schedule.schedule_id)
        self.schedules.look_again_at(schedule.schedule_id, now)

    def restore(self, schedule: Schedule) -> None:
        """Take a schedule from a checkpoint."""
        self.schedules.put(schedule)
        is_urgent = next_due(schedule) or to_cancel(schedule) or schedule.tzdata != tzdata_version()
        # Its jitter is computed when it is looked at, where an error concerns nobody else.
        self.schedules.look_again_at(schedule.schedule_id, 0 if is_urgent else schedule.next_fire_at)

    # --- requests ------------------------------------------------------------------------------------------------

    def handle(self, request: ScheduleRequest, source: Source, now: int) -> Effects:
        """Decide a request about a schedule."""
        schedule_id = request.schedule_id
        known = self.schedules.get(schedule_id)
        decision = self._decide(known, request, source, now)
        if decision.body is None:
            is_kept = request.reply_to is None and decision.outcome in LOST
            refusal = Decision(None, decision.outcome, decision.detail)
            body = rejected(type(request).__name__, refusal, source, is_kept=is_kept)
            event = self._desk.event(name_or_nothing(schedule_id), "", 0, body, now, source)
        else:
            spec = known.spec if known else request.spec  # type: ignore[union-attr]
            version = known.version + 1 if known else self.schedules.first_version(schedule_id)
            event = self._desk.event(schedule_id, spec.task.tenant_id, version, decision.body, now, source)
        effects = self._desk.happened(event)
        if request.reply_to is not None:
            reply = self._reply(request, decision, known, now)
            effects.replies.append((request.reply_to, reply))
        return effects

    def _decide(self, known: Schedule | None, request: ScheduleRequest, source: Source, now: int) -> ScheduleDecision:
        tzdata = tzdata_version()
        match request:
            case CreateSchedule():
                if known is None and len(self.schedules) >= self._max:
                    reason = f"the shard holds {self._max} schedules"
                    return ScheduleDecision(None, Outcome.OVERLOADED, reason)
                if known is None and (kind := self._desk.kind_of(request.schedule_id)) is not None:
                    return ScheduleDecision(None, Outcome.CONFLICT, f"there is a {kind} with this id")
                return schedule_requests.decide_create(known, request, now, tzdata)
            case UpdateSchedule():
                return schedule_requests.decide_update(known, request, now, tzdata)
            case ControlSchedule():
                return schedule_requests.decide_control(known, request, now, tzdata)
            case RunSchedule():
                origin = source.origin
                place = f"{source.offset}" if origin is None else f"{origin.partition}-{origin.offset}"
                is_view_ahead = request.view_offset > self._desk.forgotten_offset
                decision = schedule_requests.decide_run(known, request, place, now, is_view_ahead=is_view_ahead)
                return self._of_new_runs(decision)

    def _of_new_runs(self, decision: ScheduleDecision) -> ScheduleDecision:
        """Without the runs that the view did not show yet: from now on nobody else can take the ids of the others."""
        if not isinstance(decision.body, ScheduleBackfilled):
            return decision
        runs = tuple(run for run in decision.body.runs if self._desk.known(run.task_id) is None)
        if not runs:
            return ScheduleDecision(None, Outcome.DUPLICATE, schedule_requests.ALL_RUN)
        return decision._replace(body=ScheduleBackfilled(runs=runs))

    def _reply(self, request: ScheduleRequest, decision: ScheduleDecision, before: Schedule | None, now: int) -> Reply:
        schedule = self.schedules.get(request.schedule_id) or before
        is_run = isinstance(decision.body, ScheduleFired)
        return Reply(
            request_id=request.request_id,
            outcome=decision.outcome,
            task_id=decision.body.task_id if isinstance(decision.body, ScheduleFired) else request.schedule_id,
            status=Status.PENDING if is_run else None,
            version=schedule.version if schedule else 0,
            created_at=schedule.created_at if schedule else None,
            scheduled_at=schedule.next_fire_at if schedule else None,
            decided_at=now,
            detail=decision.detail,
        )

    # --- time ----------------------------------------------------------------------------------------------------

    def fire_due(self, now: int, limit: int) -> Effects:
        """What the clock did to schedules by `now`; of many to some of them."""
        effects = Effects.none()
        for schedule_id in self.schedules.pop_due(now, limit):
            try:
                self.schedules.look_again_at(schedule_id, self._look_at(schedule_id, effects, now))
            except Exception as error:  # a defect in the computation of one schedule: the others must go on
                self._flag(schedule_id, error, effects, now)
        return effects

    def _look_at(self, schedule_id: str, effects: Effects, now: int) -> int | None:
        """Fire what has come, submit what is due, cancel what was overtaken; when it is to be looked at again."""
        schedule = self.schedules.get(schedule_id)
        if schedule is None:
            return None
        if (change := replanned(schedule, tzdata_version())) is not None:
            self._happens(schedule, change, effects, now)
        return self._fire(schedule_id, effects, now)

    def _flag(self, schedule_id: str, error: Exception, effects: Effects, now: int) -> None:
        """It fires no more until it is changed or resumed."""
        schedule = self.schedules.get(schedule_id)
        if schedule is not None:
            problem = f"{type(error).__name__}: {error}"
            self._happens(schedule, ScheduleFlagged(problem=problem[: decisions.TEXT_MAX]), effects, now)
        self.schedules.look_again_at(schedule_id, None)

    def _fire(self, schedule_id: str, effects: Effects, now: int) -> int | None:
        """When it is to be looked at again."""
        tzdata = tzdata_version()
        for _ in range(FIRES_PER_STEP):
            is_stuck = self._submit_due(schedule_id, effects, now)
            schedule = self.schedules.get(schedule_id)
            if schedule is None:
                return None
            if is_stuck:
                return now + STUCK_US
            body = decide_fire(schedule, now, tzdata)
            if body is None:
                return wake_at(schedule)
            if isinstance(body, ScheduleFired) and self._desk.known(body.task_id) is not None:
                body = skipped_for(body, SkipReason.TAKEN)
            self._happens(schedule, body, effects, now)
        return now

    def _submit_due(self, schedule_id: str, effects: Effects, now: int) -> bool:
        """Submit the runs that are due, and cancel those before them if that is asked. Whether some must wait."""
        while (schedule := self.schedules.get(schedule_id)) is not None:
            run = next_due(schedule)
            if run is None:
                for task_id in to_cancel(schedule):
                    self._overtake(task_id, effects, now)
                return False
            # An older task with this id, back from the wheel, has the run taken off by its next event.
            if self._desk.is_full(schedule.spec.task, now) is not None or self._desk.known(run.task_id) is not None:
                return True
            spec = replace(schedule.spec.task, scheduled_at=run.nominal_at)
            deadline_at = deadline_of(spec.total_timeout_ms, now)
            body = TaskSubmitted(spec=spec, status=Status.PENDING, next_run_at=now, deadline_at=deadline_at)
            effects.extend(self._desk.happened(self._desk.event(run.task_id, spec.tenant_id, 1, body, now, None)))
        return False

    def _overtake(self, task_id: str, effects: Effects, now: int) -> None:
        task = self._desk.known(task_id)
        if isinstance(task, Task) and task.cancel_requested_at is None:
            request = CancelTask(request_id="", task_id=task_id, reason="a later run of its schedule began")
            effects.extend(self._desk.applied(task, decisions.decide_cancel(task, request), None, now))

    def _happens(self, schedule: Schedule, body: EventBody, effects: Effects, now: int) -> None:
        tenant_id = schedule.spec.task.tenant_id
        effects.extend(
            self._desk.happened(
                self._desk.event(schedule.schedule_id, tenant_id, schedule.version + 1, body, now, None)
            )
        )
