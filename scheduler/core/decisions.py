"""One function per input: what happens to a task, given what is known of it. Pure: nothing is changed here.

Each takes the task as the state has it, the input and the time, and says at most one thing that happened (`body`).
A refusal is a decision too: it answers, it changes nothing.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from scheduler.core.policy import is_permanent, retry_delay_ms
from scheduler.core.task import WAITING, deadline_of
from schemas.ids import NAME_RULE, is_name
from schemas.limits import ATTEMPTS_MAX, DURATION_MS_MAX, METADATA_MAX, PAYLOAD_MAX, SCHEDULE_AHEAD_US_MAX
from schemas.messages import (
    EVERY_WORKER,
    AttemptCancelled,
    AttemptCheckpointed,
    AttemptCrashed,
    AttemptFailed,
    AttemptReturned,
    AttemptSnoozed,
    AttemptStarted,
    AttemptSucceeded,
    CancelTask,
    DiscardTask,
    EndedTask,
    ErrorKind,
    EventBody,
    NextStep,
    Outcome,
    Priority,
    RedriveTask,
    SignalKind,
    Status,
    SubmitTask,
    Task,
    TaskAttemptFailed,
    TaskAttemptLost,
    TaskCancelled,
    TaskCancelRequested,
    TaskCheckpointed,
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
    TaskUpdated,
    UpdateTask,
    Verdict,
    WorkerSignal,
)

CANCEL_GRACE_MS = 10_000  # what a cancelled handler gets before its process is killed
TEXT_MAX = 255  # characters: these travel with every ready record, which must not outgrow what a broker takes
CLASS_NAMES_MAX, CLASS_NAME_MAX = 64, 256
REASON_MAX = 1_024  # characters of why a task is cancelled
COUNT_MAX = 1 << 40  # of events or attempts of a task that an operator brings back, and of offsets: room for more
# How long a task is put off at least, so that it leaves memory for the wheel, and at most, so that it is not forgotten.
DEFER_US, DEFER_US_MAX = 120_000_000, 3_600_000_000
BACKSTOP_US = 10_000_000  # how much later than the worker the shard itself ends an attempt: its clock may differ

Known = Task | EndedTask | None


class Decision(NamedTuple):
    """What happened (None: nothing), how the one who asked is answered, and what a worker must be told."""

    body: EventBody | None = None
    outcome: Outcome = Outcome.ACCEPTED
    detail: str | None = None
    signal: WorkerSignal | None = None


NOTHING = Decision()


def _refused(outcome: Outcome, detail: str) -> Decision:
    return Decision(None, outcome, detail)


# --- requests ---------------------------------------------------------------------------------------------------------


def decide_submit(known: Known, request: SubmitTask, now: int) -> Decision:
    """Accept a task; the first one under an id wins."""
    if known is not None:
        return _repeated(known, request)
    problem = problem_of(request, now)
    if problem:
        return _refused(Outcome.INVALID, problem)
    spec = request.spec
    due_at = max(spec.scheduled_at or now, now)
    body = TaskSubmitted(
        spec=spec,
        status=Status.SCHEDULED if due_at > now else Status.PENDING,
        next_run_at=due_at,
        deadline_at=deadline_of(spec.total_timeout_ms, due_at),
        fingerprint=request.fingerprint,
    )
    return Decision(body)


def _repeated(known: Task | EndedTask, request: SubmitTask) -> Decision:
    theirs, ours = request.fingerprint, known.fingerprint
    if theirs is not None and ours is not None and theirs != ours:
        return _refused(Outcome.CONFLICT, "another task with other content has this id or idempotency key")
    return _refused(Outcome.DUPLICATE, "this task was submitted before")


def problem_of(request: SubmitTask, now: int) -> str | None:
    """Why a submission can't be accepted, naming the field and what is allowed; None if it can.

    The API says the same earlier and in more detail; this guards against producers that write to the topic directly.
    """
    spec = request.spec
    names = (
        (request.task_id, "task_id"),
        (spec.task_type, "task_type"),
        (spec.queue, "queue"),
        (spec.tenant_id, "tenant_id"),
    )
    for name, field in names:
        if name is None or not is_name(name):
            return f"{field} must be {NAME_RULE}"
    if len(spec.payload) > PAYLOAD_MAX:
        return f"payload has {len(spec.payload)} bytes; at most {PAYLOAD_MAX} are allowed"
    if sum(len(key.encode()) + len(value.encode()) for key, value in spec.metadata.items()) > METADATA_MAX:
        return f"metadata must have at most {METADATA_MAX} bytes"
    problem = _text_problem(request)
    if problem:
        return problem
    if spec.scheduled_at is not None and not 0 <= spec.scheduled_at <= now + SCHEDULE_AHEAD_US_MAX:
        return "scheduled_at must be within a hundred years"
    return _range_problem(spec)


def _text_problem(request: SubmitTask) -> str | None:
    spec = request.spec
    texts = (
        ("content_type", spec.content_type),
        ("idempotency_key", spec.idempotency_key),
        ("fingerprint", request.fingerprint),
        ("traceparent", request.traceparent),
    )
    for field, text in texts:
        if text is not None and len(text) > TEXT_MAX:
            return f"{field} has {len(text)} characters; at most {TEXT_MAX} are allowed"
    for field, names in (("retry_on", spec.retry.retry_on), ("give_up_on", spec.retry.give_up_on)):
        if len(names) > CLASS_NAMES_MAX or any(len(name) > CLASS_NAME_MAX for name in names):
            return f"{field} must have at most {CLASS_NAMES_MAX} names of at most {CLASS_NAME_MAX} characters"
    return None


def _range_problem(spec: TaskSpec) -> str | None:
    retry = spec.retry
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("timeout_ms", spec.timeout_ms, 1, DURATION_MS_MAX),
        ("total_timeout_ms", spec.total_timeout_ms, 1, DURATION_MS_MAX),
        ("lease_ms", spec.lease_ms, 1, DURATION_MS_MAX),
        ("max_attempts", retry.max_attempts, 1, ATTEMPTS_MAX),
        ("max_crashes", retry.max_crashes, 1, ATTEMPTS_MAX),
        ("delay_ms", retry.delay_ms, 0, DURATION_MS_MAX),
        ("cap_ms", retry.cap_ms, 0, DURATION_MS_MAX),
        ("factor", retry.factor, 1, 1000),
    )
    for field, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            return f"{field} must be from {low} to {high}"
    return None


def decide_cancel(known: Known, request: CancelTask) -> Decision:
    """Stop a waiting task at once, ask a running one to stop, refuse for one that has ended."""
    if known is None or (isinstance(known, EndedTask) and known.due_at is not None):
        return _elsewhere(known, request)
    if known.status is Status.CANCELLED:
        return _refused(Outcome.DUPLICATE, "cancelled before")
    if isinstance(known, EndedTask):
        return _refused(Outcome.WRONG_STATUS, f"the task is {known.status}")
    if request.reason is not None and len(request.reason) > REASON_MAX:
        return _refused(Outcome.INVALID, f"reason must have at most {REASON_MAX} characters")
    if known.status in WAITING:
        return Decision(TaskCancelled(reason=request.reason))
    if request.is_waiting_only:
        return _refused(Outcome.WRONG_STATUS, f"the task is {known.status}")
    if known.cancel_requested_at is not None:
        return Decision(None, Outcome.CANCEL_REQUESTED, "requested before", cancel_signal(known))
    body = TaskCancelRequested(reason=request.reason)
    return Decision(body, Outcome.CANCEL_REQUESTED, None, cancel_signal(known, request.reason))


def _elsewhere(known: Known, request: CancelTask | UpdateTask) -> Decision:
    """Why a task that is not in memory cannot be changed; one in the wheel is `known` if it was shown as it is."""
    if request.task is not None:
        return _refused(Outcome.VIEW_BEHIND, "it is neither in memory nor in the delay wheel as shown: try again")
    if known is not None:
        return _refused(Outcome.VIEW_BEHIND, "it waits in the delay wheel: send the task along as the view shows it")
    return _refused(Outcome.NOT_FOUND, "no live task has this id")


def decide_update(known: Known, request: UpdateTask, now: int) -> Decision:
    """Change a task that waits; what is out to a worker already is void by its version."""
    if known is None or (isinstance(known, EndedTask) and known.due_at is not None):
        return _elsewhere(known, request)
    if isinstance(known, EndedTask) or known.status not in WAITING:
        return _refused(Outcome.WRONG_STATUS, f"the task is {known.status}; only a waiting one can be changed")
    if request.expected_version not in (None, known.version):
        return _refused(
            Outcome.VERSION_MISMATCH, f"the task has version {known.version}, not {request.expected_version}"
        )
    spec = known.spec
    spec = replace(
        spec,
        scheduled_at=spec.scheduled_at if request.scheduled_at is None else request.scheduled_at,
        priority=request.priority or spec.priority,
        payload=spec.payload if request.payload is None else request.payload,
        content_type=request.content_type or spec.content_type,
        metadata=spec.metadata if request.metadata is None else request.metadata,
    )
    next_run_at = _updated_due_at(known, request, spec, now)
    body = TaskUpdated(
        spec=spec,
        status=_waiting_status(known.status, next_run_at, now),
        next_run_at=next_run_at,
        deadline_at=known.deadline_at
        if request.scheduled_at is None
        else deadline_of(spec.total_timeout_ms, next_run_at),
    )
    problem = problem_of(SubmitTask(request_id="", spec=spec, submitted_at=now, task_id=known.task_id), now)
    return _refused(Outcome.INVALID, problem) if problem else Decision(body)


def _updated_due_at(known: Task, request: UpdateTask, spec: TaskSpec, now: int) -> int:
    if request.scheduled_at is not None:
        return max(request.scheduled_at, now)
    if known.status is Status.SCHEDULED and known.attempt == 0 and spec.priority is not Priority.LOW:
        return max(spec.scheduled_at or known.created_at, now)  # it may have been put off as one of low priority
    return known.next_run_at or now


def _waiting_status(status: Status, next_run_at: int, now: int) -> Status:
    if status is Status.BLOCKED:
        return Status.BLOCKED
    if next_run_at <= now:
        return Status.PENDING
    return Status.RETRYING if status is Status.RETRYING else Status.SCHEDULED


def decide_redrive(known: Known, request: RedriveTask, is_view_ahead: bool, now: int) -> Decision:
    """Run an ended task again, if it still stands as the view showed it."""
    refusal = _refuse_ended(known, request.task, {Status.DEAD, Status.FAILED}, is_view_ahead)
    if refusal is None and (problem := shown_problem(request.task, now)):
        refusal = _refused(Outcome.INVALID, problem)
    return refusal or Decision(TaskRedriven(task=request.task))


def shown_problem(shown: Task, now: int) -> str | None:
    """What is wrong with a task that the shard does not have and takes from a request; never, if the view gave it."""
    if problem := _count_problem(shown):
        return problem
    submission = SubmitTask(
        request_id="",
        spec=shown.spec,
        submitted_at=now,
        task_id=shown.task_id,
        fingerprint=shown.fingerprint,
        traceparent=shown.traceparent,
    )
    return problem_of(submission, now)


def _count_problem(shown: Task) -> str | None:
    if not is_name(shown.task_id):
        return f"task_id must be {NAME_RULE}"
    if any(not 0 <= count < COUNT_MAX for count in (shown.version, shown.attempt, shown.snooze_count)):
        return f"version, attempt and snooze_count must be counts below {COUNT_MAX}"
    return None


def decide_discard(known: Known, request: DiscardTask, is_view_ahead: bool) -> Decision:
    """Give a dead task up for good, if it still stands as the view showed it."""
    refusal = _refuse_ended(known, request.task, {Status.DEAD}, is_view_ahead)
    if refusal is None and (problem := _count_problem(request.task)):
        refusal = _refused(Outcome.INVALID, problem)
    return refusal or Decision(TaskDiscarded())


def _refuse_ended(known: Known, shown: Task, allowed: set[Status], is_view_ahead: bool) -> Decision | None:
    status = shown.status if known is None else known.status
    if isinstance(known, Task) or status not in allowed:
        return _refused(Outcome.WRONG_STATUS, f"the task is {status}, not {' or '.join(sorted(allowed))}")
    if known is None:
        # Forgotten: the view is believed if it has seen all that was forgotten; else the task may have moved on.
        return None if is_view_ahead else _refused(Outcome.VIEW_BEHIND, "the view lags behind; try again")
    if known.version != shown.version:
        return _refused(Outcome.VIEW_BEHIND, f"the task has version {known.version}, the view showed {shown.version}")
    return None


# --- reports ----------------------------------------------------------------------------------------------------------

_AttemptEnd = (
    AttemptSucceeded
    | AttemptFailed
    | AttemptSnoozed
    | AttemptCancelled
    | AttemptCrashed
    | AttemptReturned
    | AttemptCheckpointed
)


def is_current(known: Known, report: _AttemptEnd) -> bool:
    """Whether the report is about the attempt that runs; a report of a lost lease changes nothing."""
    return (
        isinstance(known, Task)
        and known.status is Status.RUNNING
        and known.attempt == report.attempt
        and known.worker_id == report.worker_id
    )


def decide_started(known: Known, report: AttemptStarted) -> Decision:
    """The first start of an attempt has it; any other is revoked."""
    if isinstance(known, Task):
        is_next = known.status is Status.PENDING and report.attempt == known.attempt + 1
        if is_next and report.task_version == known.version:
            body = TaskStarted(attempt=report.attempt, worker_id=report.worker_id, started_at=report.started_at)
            return Decision(body)
        is_same = known.attempt == report.attempt and known.worker_id == report.worker_id
        if known.status is Status.RUNNING and is_same:
            return NOTHING
    signal = revoke_signal(report.task_id, report.attempt, report.worker_id, "the start came too late")
    return Decision(signal=replace(signal, task_version=report.task_version))


def decide_succeeded(task: Task, report: AttemptSucceeded) -> Decision:
    """A result stands even if a cancel was on its way."""
    body = TaskSucceeded(
        attempt=report.attempt,
        worker_id=report.worker_id,
        finished_at=report.finished_at,
        result=report.result,
        content_type=report.content_type,
    )
    return Decision(body)


def decide_failed(task: Task, report: AttemptFailed, now: int, rng: Random) -> Decision:
    """Retry, or end as FAILED (permanent error) or DEAD (attempts used up, or no time left)."""
    failures = task.failure_count + 1
    next_step, retry_at, delay_ms = _after_failure(task, failures, report, now, rng)
    body = TaskAttemptFailed(
        attempt=report.attempt,
        worker_id=report.worker_id,
        finished_at=report.finished_at,
        error=report.error,
        failure_count=failures,
        next_step=next_step,
        retry_at=retry_at,
        delay_ms=delay_ms,
    )
    return Decision(body)


def _after_failure(
    task: Task, failures: int, report: AttemptFailed, now: int, rng: Random
) -> tuple[NextStep, int | None, int]:
    policy = task.spec.retry
    if task.cancel_requested_at is not None:
        return NextStep.CANCELLED, None, 0
    if is_permanent(policy, report.error):
        return NextStep.FAILED, None, 0
    if failures >= policy.max_attempts:
        return NextStep.DEAD, None, 0
    delay_ms = retry_delay_ms(policy, failures, task.last_delay_ms, rng)
    if report.retry_after_ms is not None:
        delay_ms = max(0, min(report.retry_after_ms, DURATION_MS_MAX))
    retry_at = now + delay_ms * 1000
    if task.deadline_at is not None and retry_at >= task.deadline_at:
        return NextStep.DEAD, None, 0
    return NextStep.RETRY, retry_at, delay_ms


def decide_snoozed(task: Task, report: AttemptSnoozed, now: int) -> Decision:
    """Call the handler again later; neither a failure nor a crash is counted."""
    if task.cancel_requested_at is not None:
        return Decision(TaskCancelled(reason=task.cancel_reason))
    delay_ms = max(0, min(report.delay_ms, DURATION_MS_MAX))
    body = TaskSnoozed(
        attempt=report.attempt,
        worker_id=report.worker_id,
        finished_at=report.finished_at,
        snooze_count=task.snooze_count + 1,
        next_run_at=now + delay_ms * 1000,
        reason=report.reason,
    )
    return Decision(body)


def decide_cancelled(task: Task, report: AttemptCancelled) -> Decision:
    """The handler stopped as it was told to."""
    if task.cancel_requested_at is None:
        return decide_lost(task, "its worker stopped it without being asked to", is_crash=False)
    return Decision(TaskCancelled(reason=task.cancel_reason))


def decide_lost(task: Task, reason: str, *, is_crash: bool) -> Decision:
    """An attempt that ended without a word of its handler: again at once, or DEAD after `max_crashes`."""
    crashes = task.crash_count + (1 if is_crash else 0)
    next_step = NextStep.RETRY
    if task.cancel_requested_at is not None:
        next_step = NextStep.CANCELLED
    elif is_crash and crashes >= task.spec.retry.max_crashes:
        next_step = NextStep.DEAD
    message = f"attempt {task.attempt} on worker {task.worker_id}: {reason}"
    error = TaskError(kind=ErrorKind.LOST, type="tidewheel.AttemptLost", message=message)
    body = TaskAttemptLost(
        attempt=task.attempt, worker_id=task.worker_id or "", error=error, crash_count=crashes, next_step=next_step
    )
    return Decision(body)


def decide_checkpointed(task: Task, report: AttemptCheckpointed) -> Decision:
    """Keep how far the attempt came, for the next one."""
    return Decision(TaskCheckpointed(attempt=report.attempt, checkpoint=report.checkpoint))


# --- the clock --------------------------------------------------------------------------------------------------------


def wake_at(task: Task, heard_at: int) -> int | None:
    """When the clock may change the task: the earliest of its due time, deadlines, timeouts and the end of its lease.

    `heard_at` is when its worker last vouched for the running attempt.
    """
    instants: list[int] = []
    if task.status is Status.RUNNING:
        instants.append(heard_at + task.spec.lease_ms * 1000)
        instants.extend(at for at in (_timeout_at(task), _cancel_at(task)) if at is not None)
        if task.deadline_at is not None:
            instants.append(task.deadline_at + BACKSTOP_US)
        return min(instants)
    if task.status in (Status.SCHEDULED, Status.RETRYING) and task.next_run_at is not None:
        instants.append(task.next_run_at)
    instants.extend(at for at in (task.deadline_at, _start_deadline_at(task)) if at is not None)
    return min(instants, default=None)


def deferred_until(asked_at: int, now: int) -> int:
    """When a due task that is put off is looked at again: after as long again as it has waited, within bounds."""
    return now + min(DEFER_US_MAX, max(DEFER_US, now - asked_at))


def _start_deadline_at(task: Task) -> int | None:
    return task.spec.start_deadline_at if task.attempt == 0 else None


def _timeout_at(task: Task) -> int | None:
    if task.spec.timeout_ms is None or task.start_accepted_at is None:
        return None
    # From when the start was accepted: the worker's clock may be any number of seconds away from this one.
    return task.start_accepted_at + task.spec.timeout_ms * 1000 + BACKSTOP_US


def _cancel_at(task: Task) -> int | None:
    if task.cancel_requested_at is None:
        return None
    return task.cancel_requested_at + CANCEL_GRACE_MS * 1000 + BACKSTOP_US


def decide_timer(task: Task, heard_at: int, now: int, rng: Random) -> Decision:
    """What the time `now` does to the task; nothing if it is not due for anything."""
    if task.status is Status.RUNNING:
        return _decide_running_timer(task, heard_at, now, rng)
    if _is_past(task.deadline_at, now):
        return Decision(_expired(task, Status.DEAD, "the task's total time is over"))
    if _is_past(_start_deadline_at(task), now):
        return Decision(_expired(task, Status.FAILED, "it did not start before its start deadline"))
    if task.status in (Status.SCHEDULED, Status.RETRYING) and _is_past(task.next_run_at, now):
        return Decision(TaskReleased())
    return NOTHING


def _decide_running_timer(task: Task, heard_at: int, now: int, rng: Random) -> Decision:
    revoke = revoke_signal(task.task_id, task.attempt, task.worker_id or "", "its time is over")
    if _is_past(_cancel_at(task), now):
        return Decision(TaskCancelled(reason=task.cancel_reason), signal=revoke)
    if _is_past(None if task.deadline_at is None else task.deadline_at + BACKSTOP_US, now):
        return Decision(_expired(task, Status.DEAD, "the task's total time is over"), signal=revoke)
    if _is_past(_timeout_at(task), now):
        return decide_failed(task, _timed_out(task, now), now, rng)._replace(signal=revoke)
    if _is_past(heard_at + task.spec.lease_ms * 1000, now):
        return decide_lost(task, "the lease expired without a heartbeat", is_crash=True)._replace(signal=revoke)
    return NOTHING


def _is_past(at: int | None, now: int) -> bool:
    return at is not None and at <= now


def _expired(task: Task, status: Status, message: str) -> TaskExpired:
    error = TaskError(kind=ErrorKind.DEADLINE, type="tidewheel.DeadlineExceeded", message=message)
    return TaskExpired(error=error, status=status)


def _timed_out(task: Task, now: int) -> AttemptFailed:
    message = f"no report within {task.spec.timeout_ms} ms of the start"
    error = TaskError(
        kind=ErrorKind.TIMEOUT,
        type="tidewheel.AttemptTimeout",
        message=message,
        bases=("TimeoutError", "OSError", "Exception", "BaseException"),
        verdict=Verdict.LIKELY_RETRYABLE,
    )
    return AttemptFailed(
        task_id=task.task_id, attempt=task.attempt, worker_id=task.worker_id or "", finished_at=now, error=error
    )


# --- signals ----------------------------------------------------------------------------------------------------------


def cancel_signal(task: Task, reason: str | None = None) -> WorkerSignal:
    """Tell the worker of a running task to stop it."""
    return WorkerSignal(
        worker_id=task.worker_id or "",
        task_id=task.task_id,
        attempt=task.attempt,
        kind=SignalKind.CANCEL,
        reason=reason or task.cancel_reason or "cancelled",
        grace_ms=CANCEL_GRACE_MS,
    )


def revoke_signal(task_id: str, attempt: int, worker_id: str, reason: str) -> WorkerSignal:
    """Tell a worker that an attempt is not its own, or not any more."""
    return WorkerSignal(
        worker_id=worker_id, task_id=task_id, attempt=attempt, kind=SignalKind.REVOKE, reason=reason, grace_ms=0
    )


def void_signal(task: Task) -> WorkerSignal:
    """Tell all workers that the ready record of a pending task, as it stands, must not be started."""
    signal = revoke_signal(task.task_id, task.attempt + 1, EVERY_WORKER, "the task was changed or cancelled")
    return replace(signal, task_version=task.version)
