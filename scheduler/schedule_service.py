"""The rules of the surface for schedules; like `scheduler.service`, of which this is a part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from cron.zones import tzdata_version
from scheduler.core.schedule import recurrence_of, run_id
from scheduler.instants import format_instant
from scheduler.operations import (
    Operation,
    Performer,
    Steps,
    ask_all,
    pause,
    pauses,
    read,
    refusing_errors,
)
from scheduler.ports import Clock, ScheduleFilter, SchedulePage, TaskRow, View
from scheduler.refusals import Refusal, RefusalKind, Refused, invalid, refusal_of, schedule_not_found, too_large
from scheduler.schedule_submission import (
    PREVIEW_DEFAULT,
    Backfill,
    Preview,
    ScheduleChange,
    ScheduleSubmission,
    nominal_text,
)
from scheduler.schedule_view import (
    BackfilledRuns,
    CreatedSchedule,
    PreviewView,
    RunList,
    RunView,
    ScheduleList,
    ScheduleView,
    TriggeredRun,
    created_view,
    schedule_view,
)
from scheduler.submission import check_reason
from schemas.errors import TidewheelIOError
from schemas.ids import is_name, shard_of
from schemas.limits import PAGE_MAX
from schemas.messages import (
    ControlSchedule,
    CreateSchedule,
    EndedTask,
    Outcome,
    Reply,
    RunSchedule,
    Schedule,
    ScheduleAction,
    ScheduleRequest,
    ScheduleSpec,
    Task,
    UpdateSchedule,
)

T = TypeVar("T")

RANGE_MAX = 5_000  # nominal times of the range of a backfill: each is looked up in the view
LOOKUP_SIZE = 500  # rows that are looked up at a time
MADE_KEPT = 1_000  # schedules that were made here and may not be in the view yet


class LiveSchedules(Protocol):
    """What the shards have in memory; answers at once, from any thread."""

    def get(self, task_id: str) -> Task | EndedTask | None:
        """The task, what is remembered of its end, or None if its shard does not know it (any more)."""

    def schedule(self, schedule_id: str) -> Schedule | None:
        """The schedule, or None if there is none. Raises LookupError: its shard is not here."""


class Created(NamedTuple):
    """A schedule that was made, now or, if `is_repeat`, before."""

    view: CreatedSchedule
    is_repeat: bool


class ScheduleService:
    """What can be asked of schedules."""

    def __init__(
        self,
        performer: Performer,
        view: View,
        live: LiveSchedules,
        *,
        clock: Clock,
        request_id: Callable[[], str],
        shards: int,
        reply_to: int,
        payload_max: int,
        view_wait_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._performer, self._view, self._live, self._clock = performer, view, live, clock
        self._request_id, self._shards, self._reply_to = request_id, shards, reply_to
        self._payload_max, self._view_wait_s, self._monotonic = payload_max, view_wait_s, monotonic
        self._made: OrderedDict[str, tuple[float, Schedule]] = OrderedDict()

    # --- the operations -----------------------------------------------------------------------------------------------

    def create(self, submission: ScheduleSubmission) -> Operation[Created]:
        """Make a schedule. A repeat (same id, or tenant and name; same content) gives the first one."""
        return self._operation(self._create(submission))

    def get(self, schedule_id: str) -> Operation[ScheduleView]:
        """How a schedule stands."""
        return self._operation(self._get(schedule_id))

    def list_schedules(
        self, wanted: ScheduleFilter, *, limit: int = 50, cursor: str | None = None
    ) -> Operation[ScheduleList]:
        """A page of schedules as the view has them."""
        return self._operation(self._list(wanted, limit, cursor))

    def update(self, schedule_id: str, change: ScheduleChange) -> Operation[ScheduleView]:
        """Change what a schedule asks for, and whether it fires. Nominal times up to now count as decided."""
        return self._operation(self._update(schedule_id, change))

    def pause(self, schedule_id: str, *, reason: str | None = None) -> Operation[ScheduleView]:
        """Let it fire no more until it is resumed. Twice gives the same answer."""
        return self._operation(self._controlled(schedule_id, ScheduleAction.PAUSE, reason))

    def resume(self, schedule_id: str) -> Operation[ScheduleView]:
        """Let it fire again; what was missed is decided by its misfire policy. Twice gives the same answer."""
        return self._operation(self._controlled(schedule_id, ScheduleAction.RESUME, None))

    def delete(self, schedule_id: str) -> Operation[None]:
        """Make an end of it; its runs go on."""
        return self._operation(self._delete(schedule_id))

    def trigger(self, schedule_id: str) -> Operation[TriggeredRun]:
        """Run it now, beside its nominal times."""
        return self._operation(self._trigger(schedule_id))

    def backfill(self, schedule_id: str, wanted: Backfill) -> Operation[BackfilledRuns]:
        """Run those nominal times of a range that have no run."""
        return self._operation(self._backfill(schedule_id, wanted))

    def runs(self, schedule_id: str, *, limit: int = 20) -> Operation[RunList]:
        """What became of the latest nominal times."""
        return self._operation(self._runs(schedule_id, limit))

    def preview(self, wanted: Preview) -> Operation[PreviewView]:
        """The next nominal times of a rule; asks nobody."""
        return self._operation(self._preview(wanted))

    def _operation(self, steps: Steps[T]) -> Operation[T]:
        return Operation(self._performer, refusing_errors(steps))

    # --- making -------------------------------------------------------------------------------------------------------

    def _create(self, submission: ScheduleSubmission) -> Steps[Created]:
        request = CreateSchedule(
            request_id=self._request_id(),
            schedule_id=submission.schedule_id,
            spec=self._checked(submission.spec()),
            is_paused=submission.is_paused,
            fingerprint=submission.fingerprint(),
            reply_to=self._reply_to,
        )
        reply = yield from self._asked(request)
        if reply.outcome is Outcome.DUPLICATE:
            return Created(created_view((yield from self._known(request.schedule_id))), True)
        if reply.outcome is not Outcome.ACCEPTED:
            raise Refused(refusal_of(reply))
        made = _made(request, reply)
        self._made[made.schedule_id] = self._monotonic() + self._view_wait_s, made
        if len(self._made) > MADE_KEPT:
            self._made.popitem(last=False)
        return Created(created_view(made), False)

    def _checked(self, spec: ScheduleSpec) -> ScheduleSpec:
        if len(spec.task.payload) > self._payload_max:
            raise too_large("payload", len(spec.task.payload), self._payload_max)
        return spec

    # --- reading ------------------------------------------------------------------------------------------------------

    def _get(self, schedule_id: str) -> Steps[ScheduleView]:
        return schedule_view((yield from self._known(schedule_id)))

    def _known(self, schedule_id: str) -> Steps[Schedule]:
        """The newest that is known. Of a shard elsewhere that is what the view has, or what was made here just now."""
        if not is_name(schedule_id):
            raise schedule_not_found(schedule_id)
        try:
            known = self._live.schedule(schedule_id)
        except LookupError:
            known = yield from read(partial(self._view.schedule, schedule_id))
            until, made = self._made.get(schedule_id, (0.0, None))
            if known is None and self._monotonic() < until:
                known = made
        if known is None:
            raise schedule_not_found(schedule_id)
        return known

    def _list(self, wanted: ScheduleFilter, limit: int, cursor: str | None) -> Steps[ScheduleList]:
        if not 1 <= limit <= PAGE_MAX:
            raise invalid("limit", f"is {limit}", f"1 to {PAGE_MAX}")
        try:
            page: SchedulePage = yield from read(lambda: self._view.schedules(wanted, limit, cursor))
        except ValueError as error:
            raise invalid("cursor", "is not one that a list gave", "the cursor of the page before") from error
        return ScheduleList(schedules=[schedule_view(one) for one in page.rows], cursor=page.cursor)

    def _runs(self, schedule_id: str, limit: int) -> Steps[RunList]:
        if not 1 <= limit <= LOOKUP_SIZE:
            raise invalid("limit", f"is {limit}", f"1 to {LOOKUP_SIZE}")
        known = yield from self._known(schedule_id)
        times = list(islice(recurrence_of(known.spec).back(known.considered_at), limit))
        rows = yield from self._rows(schedule_id, times)
        return RunList(runs=[_run_view(schedule_id, time, rows.get(time)) for time in times])

    def _rows(self, schedule_id: str, times: Sequence[int]) -> Steps[Mapping[int, TaskRow]]:
        """The rows of the runs of nominal times, of those that have one."""
        found: dict[int, TaskRow] = {}
        for start in range(0, len(times), LOOKUP_SIZE):
            ids = {run_id(schedule_id, time): time for time in times[start : start + LOOKUP_SIZE]}
            rows: Mapping[str, TaskRow] = yield from read(partial(self._view.rows, list(ids)))
            found |= {ids[task_id]: row for task_id, row in rows.items()}
        return found

    def _preview(self, wanted: Preview) -> Steps[PreviewView]:
        start = self._clock.now_us() if wanted.start is None else wanted.start
        count = wanted.count or PREVIEW_DEFAULT
        times = yield from read(lambda: list(islice(wanted.recurrence().onward(start), count)))
        return PreviewView(next=tuple(map(nominal_text, times)), tzdata=tzdata_version())

    # --- changing -----------------------------------------------------------------------------------------------------

    def _update(self, schedule_id: str, change: ScheduleChange) -> Steps[ScheduleView]:
        enabled = change.enabled
        if change.changes_spec:
            version = yield from self._updated(schedule_id, change)
        else:
            version = yield from self._version_as_expected(schedule_id, change.expected_version)
        if enabled is not None:
            action = ScheduleAction.RESUME if enabled else ScheduleAction.PAUSE
            return (yield from self._controlled(schedule_id, action, None))
        return (yield from self._shown_at(schedule_id, version))

    def _version_as_expected(self, schedule_id: str, expected: int | None) -> Steps[int]:
        known = yield from self._known(schedule_id)
        if expected not in (None, known.version):
            detail = f"the schedule has version {known.version}, not {expected}"
            raise Refused(Refusal(RefusalKind.VERSION_MISMATCH, detail))
        return known.version

    def _updated(self, schedule_id: str, change: ScheduleChange) -> Steps[int]:
        """Send the whole new specification, made of the newest that is known; again if that was not the newest."""
        give_up_at = self._monotonic() + self._view_wait_s
        for pause_s in pauses():
            known = yield from self._known(schedule_id)
            spec = self._checked(change.applied_to(known.spec))
            if spec == known.spec and change.expected_version in (None, known.version):
                return known.version  # a repeat: the times that it has are not looked at again
            request = UpdateSchedule(
                request_id=self._request_id(),
                schedule_id=schedule_id,
                spec=spec,
                expected_version=known.version if change.expected_version is None else change.expected_version,
                reply_to=self._reply_to,
            )
            reply = yield from self._asked(request)
            if reply.outcome is Outcome.ACCEPTED:
                return reply.version
            is_race = reply.outcome is Outcome.VERSION_MISMATCH and change.expected_version is None
            if not is_race or self._monotonic() >= give_up_at:
                break
            yield from pause(pause_s)
        raise Refused(refusal_of(reply))

    def _controlled(self, schedule_id: str, action: ScheduleAction, reason: str | None) -> Steps[ScheduleView]:
        reply = yield from self._asked(self._control(schedule_id, action, reason))
        if reply.outcome not in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            raise Refused(refusal_of(reply))
        return (yield from self._shown_at(schedule_id, reply.version))

    def _control(self, schedule_id: str, action: ScheduleAction, reason: str | None) -> ControlSchedule:
        if not is_name(schedule_id):
            raise schedule_not_found(schedule_id)
        check_reason(reason)
        return ControlSchedule(
            request_id=self._request_id(),
            schedule_id=schedule_id,
            action=action,
            reason=reason,
            reply_to=self._reply_to,
        )

    def _shown_at(self, schedule_id: str, version: int) -> Steps[ScheduleView]:
        """The schedule once that version is there to be read."""
        give_up_at = self._monotonic() + self._view_wait_s
        for pause_s in pauses():
            known = yield from self._known(schedule_id)
            if known.version >= version or self._monotonic() >= give_up_at:
                break
            yield from pause(pause_s)
        return schedule_view(known)

    def _delete(self, schedule_id: str) -> Steps[None]:
        reply = yield from self._asked(self._control(schedule_id, ScheduleAction.DELETE, None))
        if reply.outcome is not Outcome.ACCEPTED:
            raise Refused(refusal_of(reply))
        self._made.pop(schedule_id, None)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _trigger(self, schedule_id: str) -> Steps[TriggeredRun]:
        if not is_name(schedule_id):
            raise schedule_not_found(schedule_id)
        request_id = self._request_id()
        request = RunSchedule(request_id=request_id, schedule_id=schedule_id, reply_to=self._reply_to)
        reply = yield from self._asked(request)
        if reply.outcome is not Outcome.ACCEPTED:
            raise Refused(refusal_of(reply))
        return TriggeredRun(task_id=reply.task_id)

    def _backfill(self, schedule_id: str, wanted: Backfill) -> Steps[BackfilledRuns]:
        """Ask with what the view shows to be done, again while it lags behind."""
        give_up_at = self._monotonic() + self._view_wait_s
        for pause_s in pauses():
            # The position first: the rows then hold at least what the position promises.
            positions = yield from read(self._view.positions)
            known = yield from self._known(schedule_id)
            last_at = min(wanted.last_at, known.considered_at)
            times = _times(known.spec, wanted.first_at, last_at)
            shown = yield from self._rows(schedule_id, times)
            done = {time for time in times if time in shown or self._live.get(run_id(schedule_id, time)) is not None}
            lacking = tuple(run_id(schedule_id, time) for time in times if time not in done)
            if not lacking:
                return BackfilledRuns(runs=())
            position = positions.get(shard_of(schedule_id, self._shards))
            request = RunSchedule(
                request_id=self._request_id(),
                schedule_id=schedule_id,
                first_at=wanted.first_at,
                last_at=last_at,
                done=tuple(sorted(done)),
                view_offset=0 if position is None else position.next_offset,
                runs_max=wanted.runs_max,
                reply_to=self._reply_to,
            )
            reply = yield from self._asked(request)
            if reply.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):  # the shard knows of runs that the view lacks
                return BackfilledRuns(runs=lacking if reply.outcome is Outcome.ACCEPTED else ())
            if reply.outcome is not Outcome.VIEW_BEHIND or self._monotonic() >= give_up_at:
                break
            yield from pause(pause_s)
        raise Refused(refusal_of(reply))

    def _asked(self, request: ScheduleRequest) -> Steps[Reply]:
        (answer,) = yield from ask_all([request])
        if isinstance(answer, TidewheelIOError):
            raise answer
        if answer.outcome is Outcome.NOT_FOUND:
            raise schedule_not_found(request.schedule_id)
        return answer


def _times(spec: ScheduleSpec, first_at: int, last_at: int) -> list[int]:
    recurrence = recurrence_of(spec)
    count = recurrence.count(first_at - 1, last_at) if first_at <= last_at else 0
    if count > RANGE_MAX:
        raise invalid("to", f"is {count:,} nominal times after from", f"at most {RANGE_MAX:,} in one range")
    return list(recurrence.onward(first_at - 1, last_at))


def _made(request: CreateSchedule, reply: Reply) -> Schedule:
    at = reply.created_at or reply.decided_at
    return Schedule(
        schedule_id=request.schedule_id,
        spec=request.spec,
        version=reply.version,
        created_at=at,
        updated_at=at,
        is_paused=request.is_paused,
        considered_at=at,
        next_fire_at=reply.scheduled_at,
        tzdata=tzdata_version(),
        fingerprint=request.fingerprint,
    )


def _run_view(schedule_id: str, time: int, row: TaskRow | None) -> RunView:
    return RunView(
        nominal_time=nominal_text(time),
        task_id=run_id(schedule_id, time),
        status=None if row is None else row.status,
        started_at=None if row is None or row.started_at is None else format_instant(row.started_at),
        completed_at=None if row is None or row.completed_at is None else format_instant(row.completed_at),
    )
