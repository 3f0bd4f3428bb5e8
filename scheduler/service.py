"""The rules of the surface: one for REST, gRPC, the command line and the SDK. Nothing of any of them is in here.

Every method returns an `Operation`: `await` it on an event loop, or `run` it in a thread. It gives the answer or raises
Refused; it waits no longer than the gateway's deadline and `view_wait_s` together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from scheduler.accepted import Accepted
from scheduler.core.admission import AdmissionSettings, SubmitRates
from scheduler.core.parking import PARKED_FROM
from scheduler.core.task import WAITING
from scheduler.gateway import Answer, Gateway
from scheduler.instants import format_instant
from scheduler.limit_service import LimitService
from scheduler.operations import (
    Operation,
    Performer,
    Steps,
    ask_all,
    pause,
    pauses,
    read,
    refusal_of_error,
    refusing_errors,
)
from scheduler.ports import Clock, Position, TaskFilter, TaskPage, TaskRow, View
from scheduler.queue_service import QueueService
from scheduler.refusals import (
    Refusal,
    RefusalKind,
    Refused,
    invalid,
    not_found,
    refusal_of,
    too_large,
    wrong_status,
)
from scheduler.schedule_service import LiveSchedules, ScheduleService
from scheduler.submission import Submittable, Update, check_reason, check_scheduled_at, with_defaults
from scheduler.task_view import (
    TaskView,
    is_caught_up,
    is_ended,
    merged,
    of_same_life,
    partial_view,
    task_of,
    task_view,
)
from schemas.errors import TidewheelIOError
from schemas.ids import is_name, keyed_task_id, shard_of, unique_root_of, uuid7
from schemas.limits import PAGE_MAX, PAYLOAD_MAX
from schemas.messages import (
    CancelTask,
    DiscardTask,
    EndedTask,
    Outcome,
    RedriveTask,
    Reply,
    Request,
    Status,
    SubmitTask,
    Task,
    TaskSpec,
    UpdateTask,
)

T = TypeVar("T")


class LiveTasks(LiveSchedules, Protocol):
    """What the shards have in memory; answers at once, from any thread."""

    def get(self, task_id: str) -> Task | EndedTask | None:
        """The task, what is remembered of its end, or None if its shard does not know it (any more)."""


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the surface."""

    payload_max: int = PAYLOAD_MAX
    idempotency_window_s: int = 86_400  # of keys, from the acceptance of the first submission; the shards' is the same
    view_wait_s: float = 2.0  # for a view that has not seen yet what the shard knows
    redrive_batch: int = 200  # dead letters sent back at a time
    redrive_deadline_s: float = 30.0  # of one call that sends back all
    admission: AdmissionSettings = AdmissionSettings()
    remembers_accepted: bool = False  # where shards are elsewhere: what was just accepted the view does not know yet


# --- answers ----------------------------------------------------------------------------------------------------------


class SubmittedView(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was accepted. Instants are RFC 3339 text in UTC."""

    task_id: str
    status: Status
    scheduled_at: str
    created_at: str


class Submitted(NamedTuple):
    """A submission that was accepted, now or, if `is_repeat`, before."""

    view: SubmittedView
    is_repeat: bool


class CancelView(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is CANCELLED, or RUNNING and was told to stop at `cancel_requested_at`."""

    task_id: str
    status: Status
    cancelled_at: str | None
    cancel_requested_at: str | None


class ChangedView(msgspec.Struct, frozen=True, kw_only=True):
    """A task after an update or a redrive."""

    task_id: str
    status: Status
    version: int
    scheduled_at: str | None


class TaskList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of tasks, newest first, and the cursor of the next page; null at the end. May lag by milliseconds."""

    tasks: Sequence[TaskView]
    cursor: str | None


class RedriveAllView(msgspec.Struct, frozen=True, kw_only=True):
    """How many dead letters were sent back, and how many were not. Not complete: call again for the rest."""

    redriven: int
    skipped: int
    is_complete: bool


class PurgeView(msgspec.Struct, frozen=True, kw_only=True):
    """How many waiting tasks were cancelled, and how many were not. Not complete: call again for the rest."""

    cancelled: int
    skipped: int
    is_complete: bool


_Item: TypeAlias = SubmitTask | Refusal
_Known: TypeAlias = TaskRow | EndedTask | None


class TaskService:
    """What can be asked of tasks; `schedules`, `queues` and `limits` are what can be asked of those."""

    def __init__(
        self,
        gateway: Gateway,
        view: View,
        live: LiveTasks,
        *,
        clock: Clock,
        random_bits: Callable[[int], int],
        settings: ServiceSettings | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        performer: Performer | None = None,
    ) -> None:
        self._view = view
        self._live = live
        self._clock = clock
        self._random_bits = random_bits
        self._settings = settings or ServiceSettings()
        self._accepted = Accepted() if self._settings.remembers_accepted else None
        self._monotonic = monotonic
        self._shards = gateway.shards
        self._reply_to = gateway.partition
        self._performer = performer or Performer(gateway)
        self._gateway = gateway
        self._rates = SubmitRates(self._settings.admission)
        self._request_prefix = f"{random_bits(64):016x}"
        self._request_numbers = itertools.count(1)
        self.schedules = ScheduleService(
            self._performer,
            view,
            live,
            clock=clock,
            request_id=self._request_id,
            shards=gateway.shards,
            reply_to=gateway.partition,
            payload_max=self._settings.payload_max,
            view_wait_s=self._settings.view_wait_s,
            monotonic=monotonic,
        )

        self.queues = QueueService(self._performer, gateway, clock=clock)
        self.limits = LimitService(self._performer, gateway, clock=clock)

    def close(self) -> None:
        """Let the reads that are under way end."""
        self._performer.close()

    # --- the operations -----------------------------------------------------------------------------------------------

    def submit(self, submission: Submittable, *, traceparent: str | None = None) -> Operation[Submitted]:
        """Accept a task. A repeat (same id or key, same content) gives the first one; other content is a CONFLICT."""
        return self._operation(self._submit(submission, traceparent))

    def submit_many(
        self, submissions: Sequence[Submittable | Refusal], *, traceparent: str | None = None
    ) -> Operation[list[Submitted | Refusal]]:
        """Accept each task or refuse it, in their order; an item that is a refusal already stays one."""
        return self._operation(self._submit_many(submissions, traceparent))

    def get(self, task_id: str) -> Operation[TaskView]:
        """A task with its attempts, result and error; a task is there from the moment it was accepted."""
        return self._operation(self._get(task_id))

    def wait(self, task_id: str, timeout_s: float) -> Operation[TaskView]:
        """The task once it has ended and its result is there, or as it stands after `timeout_s`."""
        return self._operation(self._wait(task_id, timeout_s))

    def list_tasks(self, wanted: TaskFilter, *, limit: int = 50, cursor: str | None = None) -> Operation[TaskList]:
        """A page of tasks as the view has them, without their contents and attempts."""
        return self._operation(self._list(wanted, limit, cursor))

    def dead_letters(self, queue: str | None, *, limit: int = 50, cursor: str | None = None) -> Operation[TaskList]:
        """A page of the dead-letter queue, of one queue or all."""
        return self.list_tasks(TaskFilter(queue=queue, is_dead_letter=True), limit=limit, cursor=cursor)

    def update(self, task_id: str, update: Update) -> Operation[ChangedView]:
        """Change a waiting task; it keeps its id."""
        return self._operation(self._update(task_id, update))

    def cancel(self, task_id: str, *, reason: str | None = None) -> Operation[CancelView]:
        """Stop a task: a waiting one never starts, a running one is told to stop. Twice gives the same answer."""
        return self._operation(self._cancel(task_id, reason))

    def redrive(self, task_id: str) -> Operation[ChangedView]:
        """Run a DEAD or FAILED task again, with fresh attempts."""
        return self._operation(self._redrive(task_id))

    def redrive_all(self, queue: str) -> Operation[RedriveAllView]:
        """Run all dead letters of a queue again, in batches, within a deadline."""
        return self._operation(self._redrive_all(queue))

    def purge(self, queue: str, *, confirmed: str, reason: str | None = None) -> Operation[PurgeView]:
        """Cancel all tasks of a queue that wait, as the view shows them, within a deadline; those that run go on.

        `confirmed` is the name of the queue once more.
        """
        return self._operation(self._purge(queue, confirmed, reason))

    def discard(self, task_id: str) -> Operation[None]:
        """Take a DEAD task out of the dead-letter queue; it stays DEAD."""
        return self._operation(self._discard(task_id))

    def _operation(self, steps: Steps[T]) -> Operation[T]:
        return Operation(self._performer, refusing_errors(steps))

    # --- submitting ---------------------------------------------------------------------------------------------------

    def _submit(self, submission: Submittable, traceparent: str | None) -> Steps[Submitted]:
        (result,) = yield from self._submit_many([submission], traceparent)
        if isinstance(result, Refusal):
            raise Refused(result)
        return result

    def _submit_many(
        self, submissions: Sequence[Submittable | Refusal], traceparent: str | None
    ) -> Steps[list[Submitted | Refusal]]:
        now = self._clock.now_us()
        items = [self._built(submission, now, traceparent) for submission in submissions]
        results = yield from self._decided_before(items, now)
        places = [i for i, item in enumerate(items) if i not in results and isinstance(item, SubmitTask)]
        requests = [item for i in places if isinstance(item := items[i], SubmitTask)]
        answers = (yield from ask_all(requests)) if requests else ()
        for place, request, answer in zip(places, requests, answers, strict=True):
            results[place] = _submitted(request, answer)
            if self._accepted is not None and isinstance(answer, Reply) and answer.outcome is Outcome.ACCEPTED:
                self._accepted.note(request, answer)
        return [results[i] if isinstance(item, SubmitTask) else item for i, item in enumerate(items)]

    def _built(self, submission: Submittable | Refusal, now: int, traceparent: str | None) -> _Item:
        if isinstance(submission, Refusal):
            return submission
        try:
            request = self._request_of(submission, now, traceparent)
            self._check_rate(request.spec.tenant_id, now)
        except Refused as refused:
            return refused.refusal
        return request

    def _check_rate(self, tenant_id: str, now: int) -> None:
        """Refuse early what the shards would refuse: here it costs next to nothing."""
        try:
            tenant = self._gateway.policies.tenant(tenant_id)
        except TidewheelIOError:
            return  # the shards know
        refused = self._rates.refusal(tenant, now)
        if refused is not None:
            raise Refused(Refusal(RefusalKind.TOO_MANY, refused.detail))

    def _spec_of(self, submission: Submittable, now: int) -> TaskSpec:
        spec = submission.spec(now)
        try:
            policy = self._gateway.policies.queue(spec.queue)
        except TidewheelIOError as error:  # what holds in the queue is not known yet
            raise Refused(Refusal(RefusalKind.UNAVAILABLE, str(error))) from error
        return with_defaults(spec, submission.asked, policy)

    def _request_of(self, submission: Submittable, now: int, traceparent: str | None) -> SubmitTask:
        spec = self._spec_of(submission, now)
        self._check_payload(spec.payload)
        is_named = submission.task_id is not None or spec.idempotency_key is not None
        return SubmitTask(
            request_id=self._request_id(),
            spec=spec,
            submitted_at=now,
            task_id=self._task_id(submission, now),
            fingerprint=submission.fingerprint() if is_named else None,
            reply_to=self._reply_to,
            traceparent=traceparent,
        )

    def _check_payload(self, payload: bytes) -> None:
        if len(payload) > self._settings.payload_max:
            raise too_large("payload", len(payload), self._settings.payload_max)

    def _task_id(self, submission: Submittable, now: int) -> str:
        if submission.task_id is not None:
            return submission.task_id
        if submission.idempotency_key is not None:
            return keyed_task_id(submission.tenant_id, submission.idempotency_key)
        if (unique := submission.uniqueness) is not None:
            root = unique_root_of(submission.tenant_id, unique.key)
            return f"{root}.{uuid7(now // 1000, self._random_bits)}"
        return uuid7(now // 1000, self._random_bits)

    def _request_id(self) -> str:
        return f"{self._request_prefix}-{next(self._request_numbers):x}"

    def _decided_before(self, items: Sequence[_Item], now: int) -> Steps[dict[int, Submitted | Refusal]]:
        """The submissions that repeat a task of which only the view knows: it ended long ago, or waits for long."""
        suspects = {
            i: item.task_id
            for i, item in enumerate(items)
            if isinstance(item, SubmitTask) and item.fingerprint and item.task_id and not self._live.get(item.task_id)
        }
        if not suspects:
            return {}
        try:
            rows = yield from read(lambda: self._view.rows(suspects.values()))
        except TidewheelIOError:
            return {}  # a view that is down stops no submission: the shards know what is recent
        known = {i: rows[task_id] for i, task_id in suspects.items() if task_id in rows}
        results = {i: self._repeated(row, items[i], now) for i, row in known.items()}
        return {i: result for i, result in results.items() if result is not None}

    def _repeated(self, row: TaskRow, item: _Item, now: int) -> Submitted | Refusal | None:
        window_us = self._settings.idempotency_window_s * 1_000_000
        if not isinstance(item, SubmitTask):
            return None
        if is_ended(row) and item.spec.idempotency_key is not None and row.created_at + window_us <= now:
            return None
        if row.fingerprint != item.fingerprint:
            return Refusal(RefusalKind.CONFLICT, f"another task with other content has the id {row.task_id}")
        scheduled_at = row.created_at if row.spec.scheduled_at is None else row.spec.scheduled_at
        return Submitted(_submitted_view(row.task_id, row.status, scheduled_at, row.created_at), True)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _get(self, task_id: str) -> Steps[TaskView]:
        known = yield from self._newest(task_id)
        if known is None:
            raise not_found(task_id)
        return partial_view(known) if isinstance(known, EndedTask) else task_view(known)

    def _newest(self, task_id: str) -> Steps[_Known]:
        """All that is known: of a live task its shard's state, of an ended one the row of the view once it is there."""
        if not is_name(task_id):
            return None
        live = self._live.get(task_id)
        if live is None:
            accepted = None if self._accepted is None else self._accepted.get(task_id)
            shown = yield from self._row(task_id, is_needed=accepted is None)
            return shown if shown is not None or accepted is None else merged(accepted, None)
        give_up_at = self._monotonic() + self._settings.view_wait_s
        row: TaskRow | None = None
        for pause_s in pauses():
            if isinstance(live, Task) and is_caught_up(None, live):
                return merged(live, None)
            row = of_same_life((yield from self._row(task_id, is_needed=False)), live)
            if is_caught_up(row, live) or self._monotonic() >= give_up_at:
                break
            yield from pause(pause_s)
            live = self._live.get(task_id) or live
        if isinstance(live, Task):
            return merged(live, row)
        return row if is_caught_up(row, live) else live

    def _row(self, task_id: str, *, is_needed: bool) -> Steps[TaskRow | None]:
        try:
            return (yield from read(lambda: self._view.task(task_id)))
        except TidewheelIOError:
            if is_needed:
                raise
            return None

    def _wait(self, task_id: str, timeout_s: float) -> Steps[TaskView]:
        give_up_at = self._monotonic() + timeout_s
        for pause_s in pauses():
            left_s = give_up_at - self._monotonic()
            if left_s <= 0 or not isinstance(self._live.get(task_id), Task):
                view = yield from self._get(task_id)
                if left_s <= 0 or view.is_final:
                    return view
            yield from pause(min(pause_s, max(left_s, 0.0)))
        raise AssertionError("pauses do not end")

    def _list(self, wanted: TaskFilter, limit: int, cursor: str | None) -> Steps[TaskList]:
        if not 1 <= limit <= PAGE_MAX:
            raise invalid("limit", f"is {limit}", f"1 to {PAGE_MAX}")
        try:
            page: TaskPage = yield from read(lambda: self._view.tasks(wanted, limit, cursor))
        except ValueError as error:
            raise invalid("cursor", "is not one that a list gave", "the cursor of the page before") from error
        return TaskList(tasks=[task_view(row, with_contents=False) for row in page.rows], cursor=page.cursor)

    # --- changing -----------------------------------------------------------------------------------------------------

    def _update(self, task_id: str, update: Update) -> Steps[ChangedView]:
        request = self._update_request(task_id, update)
        yield from self._check_tenant(task_id, update)
        reply = yield from self._asked_with_view(task_id, lambda shown: replace(request, task=shown))
        if reply.outcome is Outcome.ACCEPTED:
            return _changed_view(task_id, reply)
        raise (yield from self._refused(task_id, reply, "only a waiting task can be changed"))

    def _update_request(self, task_id: str, update: Update) -> UpdateTask:
        if not is_name(task_id):
            raise not_found(task_id)
        now = self._clock.now_us()
        check_scheduled_at(update.scheduled_at, now)
        payload, content_type = update.new_payload or (None, None)
        self._check_payload(payload or b"")
        return UpdateTask(
            request_id=self._request_id(),
            task_id=task_id,
            expected_version=update.expected_version,
            scheduled_at=(update.scheduled_at if update.scheduled_at is not None else now)
            if update.is_rescheduled
            else None,
            priority=update.priority,
            payload=payload,
            content_type=content_type,
            metadata=update.metadata,
            reply_to=self._reply_to,
        )

    def _check_tenant(self, task_id: str, update: Update) -> Steps[None]:
        tenant_id = (update.metadata or {}).get("tenant_id")
        if tenant_id is None:
            return
        known = yield from self._newest(task_id)
        if isinstance(known, TaskRow) and known.spec.tenant_id != tenant_id:
            raise invalid("metadata.tenant_id", "cannot change", "the tenant of the task, or absent")

    def _cancel(self, task_id: str, reason: str | None) -> Steps[CancelView]:
        if not is_name(task_id):
            raise not_found(task_id)
        check_reason(reason)
        request = CancelTask(request_id=self._request_id(), task_id=task_id, reason=reason, reply_to=self._reply_to)
        reply = yield from self._asked_with_view(task_id, lambda shown: replace(request, task=_without_payload(shown)))
        if reply.outcome is Outcome.CANCEL_REQUESTED:
            return self._cancel_requested(task_id, reply)
        if reply.outcome is Outcome.ACCEPTED:
            return _cancel_view(task_id, reply.decided_at)
        return (yield from self._cancelled_before(task_id, reply))

    def _asked_with_view(self, task_id: str, build: Callable[[Task | None], Request]) -> Steps[Reply]:
        """Ask the shard. Of a task in the delay wheel it wants to see what the view has, which may lag behind."""
        reply = yield from self._asked(build(None))
        give_up_at = self._monotonic() + self._settings.view_wait_s
        for pause_s in pauses():
            if reply.outcome not in (Outcome.NOT_FOUND, Outcome.VIEW_BEHIND):
                break
            row = yield from self._row(task_id, is_needed=True)
            is_waiting = row is not None and row.status in PARKED_FROM
            if reply.outcome is Outcome.NOT_FOUND and not is_waiting:
                break
            reply = yield from self._asked(build(task_of(row) if row is not None and is_waiting else None))
            if reply.outcome is Outcome.VIEW_BEHIND:
                if self._monotonic() >= give_up_at:
                    break
                yield from pause(pause_s)
        return reply

    def _cancel_requested(self, task_id: str, reply: Reply) -> CancelView:
        live = self._live.get(task_id)
        requested_at = live.cancel_requested_at if isinstance(live, Task) else None
        return CancelView(
            task_id=task_id,
            status=Status.RUNNING,
            cancelled_at=None,
            cancel_requested_at=format_instant(requested_at or reply.decided_at),
        )

    def _cancelled_before(self, task_id: str, reply: Reply) -> Steps[CancelView]:
        known = yield from self._newest(task_id)
        if known is not None and known.status is Status.CANCELLED:
            ended_at = known.ended_at if isinstance(known, EndedTask) else known.completed_at
            return _cancel_view(task_id, ended_at or reply.decided_at)
        raise (yield from self._refused(task_id, reply, "it has ended"))

    def _refused(self, task_id: str, reply: Reply, allowed: str) -> Steps[Refused]:
        """What to answer; of a task that its shard has forgotten, what the view knows."""
        if reply.outcome is Outcome.NOT_FOUND:
            row = yield from self._row(task_id, is_needed=True)
            if row is None:
                return not_found(task_id)
            if is_ended(row):
                return wrong_status(task_id, row.status, allowed)
            return Refused(Refusal(RefusalKind.UNAVAILABLE, f"task {task_id} is not in its shard now; try again"))
        return Refused(refusal_of(reply))

    # --- dead letters -------------------------------------------------------------------------------------------------

    def _redrive(self, task_id: str) -> Steps[ChangedView]:
        allowed = {Status.DEAD, Status.FAILED}
        return _changed_view(task_id, (yield from self._moved(task_id, self._redrive_request, allowed)))

    def _discard(self, task_id: str) -> Steps[None]:
        yield from self._moved(task_id, self._discard_request, {Status.DEAD})

    def _redrive_request(self, row: TaskRow, offset: int) -> Request:
        request_id = self._request_id()
        return RedriveTask(request_id=request_id, task=task_of(row), view_offset=offset, reply_to=self._reply_to)

    def _discard_request(self, row: TaskRow, offset: int) -> Request:
        if not row.is_dead_letter:
            raise not_found_in_queue(row.task_id)
        request_id = self._request_id()
        return DiscardTask(request_id=request_id, task=task_of(row), view_offset=offset, reply_to=self._reply_to)

    def _moved(self, task_id: str, build: Callable[[TaskRow, int], Request], allowed: set[Status]) -> Steps[Reply]:
        """Ask the shard about an ended task with what the view knows of it, again while the view lags behind."""
        give_up_at = self._monotonic() + self._settings.view_wait_s
        for pause_s in pauses():
            row, offset = yield from self._ended_row(task_id, allowed)
            reply = yield from self._asked(build(row, offset))
            if reply.outcome is Outcome.ACCEPTED:
                return reply
            if reply.outcome is not Outcome.VIEW_BEHIND or self._monotonic() >= give_up_at:
                break
            yield from pause(pause_s)
        raise Refused(refusal_of(reply))

    def _ended_row(self, task_id: str, allowed: set[Status]) -> Steps[tuple[TaskRow, int]]:
        # The position first: the row then holds at least what the position promises.
        positions = yield from read(self._view.positions)
        known = yield from self._newest(task_id)
        if known is None:
            raise not_found(task_id)
        if known.status not in allowed:
            raise wrong_status(task_id, known.status, f"only {' or '.join(sorted(allowed))} can be")
        if isinstance(known, EndedTask):
            raise Refused(Refusal(RefusalKind.UNAVAILABLE, "the view lags behind; try again"))
        return known, self._offset(positions, task_id)

    def _offset(self, positions: Mapping[int, Position], task_id: str) -> int:
        position = positions.get(shard_of(task_id, self._shards))
        return 0 if position is None else position.next_offset

    def _redrive_all(self, queue: str) -> Steps[RedriveAllView]:
        give_up_at = self._monotonic() + self._settings.redrive_deadline_s
        redriven = skipped = 0
        cursor: str | None = None
        while True:
            positions = yield from read(self._view.positions)
            page = yield from read(partial(self._dead_page, queue, cursor))
            requests = [self._redrive_request(row, self._offset(positions, row.task_id)) for row in page.rows]
            answers = (yield from ask_all(requests)) if requests else ()
            accepted = sum(1 for one in answers if isinstance(one, Reply) and one.outcome is Outcome.ACCEPTED)
            redriven, skipped, cursor = redriven + accepted, skipped + len(requests) - accepted, page.cursor
            if cursor is None or self._monotonic() >= give_up_at:
                is_complete = cursor is None and skipped == 0
                return RedriveAllView(redriven=redriven, skipped=skipped, is_complete=is_complete)

    def _dead_page(self, queue: str, cursor: str | None) -> TaskPage:
        return self._view.tasks(TaskFilter(queue=queue, is_dead_letter=True), self._settings.redrive_batch, cursor)

    def _purge(self, queue: str, confirmed: str, reason: str | None) -> Steps[PurgeView]:
        if confirmed != queue:
            raise invalid("confirm", "is not the name of the queue", queue)
        check_reason(reason)
        give_up_at = self._monotonic() + self._settings.redrive_deadline_s
        cancelled = skipped = 0
        for status in sorted(WAITING):
            cursor: str | None = None
            while True:
                page = yield from read(partial(self._waiting_page, queue, status, cursor))
                requests = [self._cancel_request(row, reason) for row in page.rows]
                answers = (yield from ask_all(requests)) if requests else ()
                accepted = sum(1 for one in answers if isinstance(one, Reply) and one.outcome is Outcome.ACCEPTED)
                cancelled, skipped, cursor = cancelled + accepted, skipped + len(requests) - accepted, page.cursor
                if cursor is None:
                    break
                if self._monotonic() >= give_up_at:
                    return PurgeView(cancelled=cancelled, skipped=skipped, is_complete=False)
        return PurgeView(cancelled=cancelled, skipped=skipped, is_complete=skipped == 0)

    def _waiting_page(self, queue: str, status: Status, cursor: str | None) -> TaskPage:
        return self._view.tasks(TaskFilter(queue=queue, status=status), self._settings.redrive_batch, cursor)

    def _cancel_request(self, row: TaskRow, reason: str | None) -> CancelTask:
        shown = _without_payload(task_of(row)) if row.status in PARKED_FROM else None
        return CancelTask(
            request_id=self._request_id(),
            task_id=row.task_id,
            reason=reason or f"queue {row.spec.queue} was purged",
            task=shown,
            is_waiting_only=True,
            reply_to=self._reply_to,
        )

    def _asked(self, request: Request) -> Steps[Reply]:
        (answer,) = yield from ask_all([request])
        if isinstance(answer, TidewheelIOError):
            raise answer
        return answer


def _without_payload(task: Task | None) -> Task | None:
    return task and replace(task, spec=replace(task.spec, payload=b""))


def not_found_in_queue(task_id: str) -> Refused:
    """The task is DEAD, and was discarded before."""
    return Refused(Refusal(RefusalKind.NOT_FOUND, f"task {task_id} is not in the dead-letter queue"))


def _submitted(request: SubmitTask, answer: Answer) -> Submitted | Refusal:
    if isinstance(answer, TidewheelIOError):
        return refusal_of_error(answer)
    if answer.outcome not in (Outcome.ACCEPTED, Outcome.DUPLICATE):
        return refusal_of(answer)
    created_at = answer.created_at or answer.decided_at
    scheduled_at = answer.scheduled_at or request.spec.scheduled_at or created_at
    view = _submitted_view(answer.task_id, answer.status or Status.SUBMITTED, scheduled_at, created_at)
    return Submitted(view, answer.outcome is Outcome.DUPLICATE)


def _submitted_view(task_id: str, status: Status, scheduled_at: int, created_at: int) -> SubmittedView:
    return SubmittedView(
        task_id=task_id,
        status=status,
        scheduled_at=format_instant(scheduled_at),
        created_at=format_instant(created_at),
    )


def _cancel_view(task_id: str, cancelled_at: int) -> CancelView:
    return CancelView(
        task_id=task_id, status=Status.CANCELLED, cancelled_at=format_instant(cancelled_at), cancel_requested_at=None
    )


def _changed_view(task_id: str, reply: Reply) -> ChangedView:
    scheduled_at = None if reply.scheduled_at is None else format_instant(reply.scheduled_at)
    return ChangedView(
        task_id=task_id, status=reply.status or Status.SUBMITTED, version=reply.version, scheduled_at=scheduled_at
    )
