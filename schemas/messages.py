"""The vocabulary: every message that crosses a topic, and the values inside it.

All are frozen. Instants are integer microseconds of Unix time (`…_at`), durations say their unit (`…_ms`). Payloads,
results and checkpoints are opaque bytes. A message's Avro schema is `avro/<Name>.avsc`, with the meaning of each field.

The UNKNOWN of an enumeration (but for a verdict) is never chosen: a reader sees it in place of a symbol that only a
newer version knows. An enumeration without it declares in its Avro schema what an older reader sees.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec


class Priority(StrEnum):
    """How urgent a task is among those that wait in its queue."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Status(StrEnum):
    """Where a task is in its life; docs/LIFECYCLE.md draws the way between them."""

    SUBMITTED = "SUBMITTED"
    SCHEDULED = "SCHEDULED"
    BLOCKED = "BLOCKED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    RETRYING = "RETRYING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    DEAD = "DEAD"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"


class Backoff(StrEnum):
    """How the delay grows from one retry to the next."""

    EXPONENTIAL = "exponential"
    LINEAR = "linear"
    FIXED = "fixed"


class Jitter(StrEnum):
    """How chance spreads retries, so that those that failed together do not come back together."""

    FULL = "full"
    EQUAL = "equal"
    DECORRELATED = "decorrelated"
    NONE = "none"


class Verdict(StrEnum):
    """What the handler's side knows of an error: may the same attempt succeed later?"""

    UNKNOWN = "unknown"
    RETRYABLE = "retryable"  # the handler said so
    PERMANENT = "permanent"  # the handler said so
    LIKELY_RETRYABLE = "likely_retryable"  # a guess by the error's class: the lists of the policy go before it
    LIKELY_PERMANENT = "likely_permanent"


class ErrorKind(StrEnum):
    """Who found the error."""

    RAISED = "raised"  # the handler raised it
    TIMEOUT = "timeout"  # the attempt's time was over
    RESULT = "result"  # the handler returned what cannot be stored
    LOST = "lost"  # the worker went away
    DEADLINE = "deadline"  # the task's own deadline passed
    UNKNOWN_TYPE = "unknown_type"  # no worker of the queue knows the task type
    UNKNOWN = "unknown"  # found in a way that only a newer version knows


class NextStep(StrEnum):
    """What follows an attempt that did not succeed."""

    RETRY = "retry"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class Message(msgspec.Struct, frozen=True):
    """Base of everything that is written to a topic."""


# --- values inside messages -------------------------------------------------------------------------------------------


class RetryPolicy(Message, frozen=True, kw_only=True):
    """When a failed attempt is tried again. Delay of retry k, before jitter: exponential `delay·factor^(k-1)`."""

    max_attempts: int = 4
    max_crashes: int = 3
    backoff: Backoff = Backoff.EXPONENTIAL
    jitter: Jitter = Jitter.FULL
    delay_ms: int = 60_000
    factor: float = 2.0
    cap_ms: int = 3_600_000
    retry_on: tuple[str, ...] = ()
    give_up_on: tuple[str, ...] = ()


class UniqueScope(StrEnum):
    """How long a task stands for others that are submitted under its key."""

    WAITING = "waiting"
    LIVE = "live"  # until it has ended
    WINDOW = "window"
    DEBOUNCE = "debounce"  # until nothing is submitted for a time, with the content of the last one
    UNKNOWN = "unknown"


class Uniqueness(Message, frozen=True, kw_only=True):
    """That a task stands for others which are submitted under the same key of its tenant."""

    key: str
    scope: UniqueScope
    window_ms: int = 0
    max_ms: int | None = None


class TaskSpec(Message, frozen=True, kw_only=True):
    """What the submitter asked for. It changes only by an update of a waiting task."""

    task_type: str
    payload: bytes = b"null"
    content_type: str = "application/json"
    queue: str = "default"
    priority: Priority = Priority.MEDIUM
    tenant_id: str = "default"
    metadata: dict[str, str] = {}
    scheduled_at: int | None = None
    start_deadline_at: int | None = None
    timeout_ms: int | None = None
    total_timeout_ms: int | None = None
    lease_ms: int = 300_000
    retry: RetryPolicy = RetryPolicy()
    idempotency_key: str | None = None
    unique: Uniqueness | None = None


class TaskError(Message, frozen=True, kw_only=True):
    """Why an attempt did not succeed. Texts are bounded where they are made (`workers.execution`)."""

    kind: ErrorKind
    type: str
    message: str
    bases: tuple[str, ...] = ()
    traceback: str | None = None
    verdict: Verdict = Verdict.UNKNOWN


class Task(Message, frozen=True, kw_only=True):
    """A live task as its shard knows it; also its record in `shard-state`. The fold of its events (`core.task`)."""

    task_id: str
    spec: TaskSpec
    status: Status
    version: int
    created_at: int
    updated_at: int
    next_run_at: int | None = None
    deadline_at: int | None = None
    attempt: int = 0
    failure_count: int = 0
    crash_count: int = 0
    snooze_count: int = 0
    last_delay_ms: int = 0
    worker_id: str | None = None
    started_at: int | None = None
    start_accepted_at: int | None = None
    cancel_requested_at: int | None = None
    cancel_reason: str | None = None
    checkpoint: bytes | None = None
    last_error: TaskError | None = None
    fingerprint: str | None = None
    traceparent: str | None = None


class OverlapPolicy(StrEnum):
    """What is done when a schedule fires while its run before is not over."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"  # at most one waits
    CANCEL_RUNNING = "cancel_running"
    UNKNOWN = "unknown"


class MisfirePolicy(StrEnum):
    """What is done with nominal times that were missed."""

    NONE = "none"
    LATEST = "latest"
    ALL = "all"  # up to a bound, the latest ones
    UNKNOWN = "unknown"


class GapPolicy(StrEnum):
    """What becomes of wall times that no clock shows; docs/CRON.md tells the default."""

    DEFAULT = "default"
    ONCE = "once"
    SHIFT = "shift"
    SKIP = "skip"


class FoldPolicy(StrEnum):
    """What becomes of wall times that clocks show twice; docs/CRON.md tells the default."""

    DEFAULT = "default"
    FIRST = "first"
    SECOND = "second"
    BOTH = "both"


class ScheduleSpec(Message, frozen=True, kw_only=True):
    """What is run again and again, and when: by one of `cron_expression`, `every_ms` and `calendar`."""

    name: str
    task: TaskSpec
    cron_expression: str | None = None
    timezone: str = "UTC"
    every_ms: int | None = None
    anchor_at: int = 0
    calendar: tuple[int, ...] = ()
    gap: GapPolicy = GapPolicy.DEFAULT
    fold: FoldPolicy = FoldPolicy.DEFAULT
    jitter_ms: int = 0
    start_at: int | None = None
    end_at: int | None = None
    overlap: OverlapPolicy = OverlapPolicy.SKIP
    misfire: MisfirePolicy = MisfirePolicy.LATEST
    misfire_max: int = 10
    misfire_grace_ms: int = 20_000
    max_lateness_ms: int | None = None
    declared_by: str | None = None


class DueRun(Message, frozen=True, kw_only=True):
    """A run that was decided, and whose task is not submitted yet."""

    task_id: str
    nominal_at: int


class Schedule(Message, frozen=True, kw_only=True):
    """A schedule as its shard knows it; also its record in `shard-state`. The fold of its events (`core.schedule`)."""

    schedule_id: str
    spec: ScheduleSpec
    version: int
    created_at: int
    updated_at: int
    is_paused: bool = False
    pause_reason: str | None = None
    considered_at: int = 0
    next_fire_at: int | None = None
    tzdata: str = ""
    last_fired_at: int | None = None
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    due: tuple[DueRun, ...] = ()
    running: tuple[str, ...] = ()
    problem: str | None = None
    fingerprint: str | None = None


class EndedTask(Message, frozen=True, kw_only=True):
    """What a shard remembers of a task that ended, so that late reports and repeated submissions are recognised.

    With `due_at` it has not ended: it waits in the delay wheel, and is known here for as long as a submission of it may
    be repeated.
    """

    task_id: str
    status: Status
    version: int
    attempt: int
    ended_at: int
    created_at: int
    scheduled_at: int
    keep_until: int
    fingerprint: str | None = None
    due_at: int | None = None
    is_skipped: bool = False


# --- requests: what clients ask of a task (topic task-requests) -------------------------------------------------------


class SubmitTask(Message, frozen=True, kw_only=True):
    """Run a task."""

    request_id: str
    spec: TaskSpec
    submitted_at: int
    task_id: str | None = None
    fingerprint: str | None = None
    reply_to: int | None = None
    traceparent: str | None = None


class CancelTask(Message, frozen=True, kw_only=True):
    """Stop a task: at once if it waits, by signal if it runs. One in the delay wheel needs `task`, as it is shown."""

    request_id: str
    task_id: str
    reason: str | None = None
    reply_to: int | None = None
    task: Task | None = None
    is_waiting_only: bool = False


class UpdateTask(Message, frozen=True, kw_only=True):
    """Change a waiting task. An absent field stays as it is. One in the delay wheel needs `task`, as it is shown."""

    request_id: str
    task_id: str
    expected_version: int | None = None
    scheduled_at: int | None = None
    priority: Priority | None = None
    payload: bytes | None = None
    content_type: str | None = None
    metadata: dict[str, str] | None = None
    reply_to: int | None = None
    task: Task | None = None


class RedriveTask(Message, frozen=True, kw_only=True):
    """Run a DEAD or FAILED task again, with fresh attempts. Carries what the view knew, up to `view_offset`."""

    request_id: str
    task: Task
    view_offset: int
    reply_to: int | None = None


class DiscardTask(Message, frozen=True, kw_only=True):
    """Take a DEAD task out of the dead-letter queue. Carries what the view knew, up to `view_offset`."""

    request_id: str
    task: Task
    view_offset: int
    reply_to: int | None = None


class CreateSchedule(Message, frozen=True, kw_only=True):
    """Make a schedule."""

    request_id: str
    schedule_id: str
    spec: ScheduleSpec
    is_paused: bool = False
    fingerprint: str | None = None
    reply_to: int | None = None


class UpdateSchedule(Message, frozen=True, kw_only=True):
    """Change a schedule: what it asks for is replaced as a whole."""

    request_id: str
    schedule_id: str
    spec: ScheduleSpec
    expected_version: int | None = None
    reply_to: int | None = None


class ScheduleAction(StrEnum):
    """What is done to a schedule as a whole."""

    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"
    UNKNOWN = "unknown"


class ControlSchedule(Message, frozen=True, kw_only=True):
    """Pause, resume or delete a schedule."""

    request_id: str
    schedule_id: str
    action: ScheduleAction
    reason: str | None = None
    reply_to: int | None = None


class RunSchedule(Message, frozen=True, kw_only=True):
    """Run a schedule now; or, with a range, those nominal times in it that it has not run, if they are few enough.

    `done` are those which the view, brought up to `view_offset`, shows to have been run.
    """

    request_id: str
    schedule_id: str
    first_at: int | None = None
    last_at: int | None = None
    done: tuple[int, ...] = ()
    view_offset: int = 0
    runs_max: int = 100
    reply_to: int | None = None


# --- workflows: asked for on task-requests too ------------------------------------------------------------------------


class JoinRule(StrEnum):
    """What must have become of the nodes that a node needs before it runs."""

    ALL_SUCCEEDED = "all_succeeded"
    NONE_FAILED = "none_failed"  # each has succeeded or was skipped
    NONE_FAILED_ONE_SUCCEEDED = "none_failed_one_succeeded"
    ONE_SUCCEEDED = "one_succeeded"
    AT_LEAST = "at_least"  # a number of them has succeeded
    ONE_FAILED = "one_failed"  # for what is done about a failure
    ALL_DONE = "all_done"
    UNKNOWN = "unknown"


class OnFailure(StrEnum):
    """What becomes of the rest of a workflow when a node has failed."""

    CONTINUE = "continue"  # what does not need it goes on
    CANCEL = "cancel"
    UNKNOWN = "unknown"


class WorkflowStatus(StrEnum):
    """Where a workflow is in its life."""

    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"


class WorkflowNode(Message, frozen=True, kw_only=True):
    """A node of a workflow: a task that runs when its rule is met."""

    name: str
    template: int
    payload: bytes
    needs: tuple[int, ...] = ()
    join: JoinRule = JoinRule.ALL_SUCCEEDED
    at_least: int = 0


class WorkflowSpec(Message, frozen=True, kw_only=True):
    """What a workflow is made of."""

    name: str
    tenant_id: str = "default"
    specs: tuple[TaskSpec, ...]
    nodes: tuple[WorkflowNode, ...]
    on_failure: OnFailure = OnFailure.CONTINUE
    timeout_ms: int | None = None
    metadata: dict[str, str] = {}


class Workflow(Message, frozen=True, kw_only=True):
    """A workflow as its shard knows it; without its nodes once it has ended."""

    workflow_id: str
    spec: WorkflowSpec
    status: WorkflowStatus
    version: int
    created_at: int
    updated_at: int
    deadline_at: int | None = None
    stopped_as: WorkflowStatus | None = None
    reason: str | None = None
    keep_until: int | None = None
    fingerprint: str | None = None
    traceparent: str | None = None


class SubmitWorkflow(Message, frozen=True, kw_only=True):
    """Run a workflow."""

    request_id: str
    workflow_id: str
    spec: WorkflowSpec
    submitted_at: int
    fingerprint: str | None = None
    reply_to: int | None = None
    traceparent: str | None = None


class CancelWorkflow(Message, frozen=True, kw_only=True):
    """End a workflow: what waits never starts, what runs is told to stop."""

    request_id: str
    workflow_id: str
    reason: str | None = None
    reply_to: int | None = None


TaskRequest: TypeAlias = SubmitTask | CancelTask | UpdateTask | RedriveTask | DiscardTask
ScheduleRequest: TypeAlias = CreateSchedule | UpdateSchedule | ControlSchedule | RunSchedule
WorkflowRequest: TypeAlias = SubmitWorkflow | CancelWorkflow
Request: TypeAlias = TaskRequest | ScheduleRequest | WorkflowRequest


# --- reports: what workers tell (topic task-reports) ------------------------------------------------------------------


class AttemptStarted(Message, frozen=True, kw_only=True):
    """A worker begins an attempt. `task_version` is that of the ready record: an update in between voids it."""

    task_id: str
    task_version: int
    attempt: int
    worker_id: str
    started_at: int


class AttemptSucceeded(Message, frozen=True, kw_only=True):
    """The handler returned."""

    task_id: str
    attempt: int
    worker_id: str
    finished_at: int
    result: bytes = b"null"
    content_type: str = "application/json"


class AttemptFailed(Message, frozen=True, kw_only=True):
    """The handler raised, or its time was over."""

    task_id: str
    attempt: int
    worker_id: str
    finished_at: int
    error: TaskError
    retry_after_ms: int | None = None


class AttemptSnoozed(Message, frozen=True, kw_only=True):
    """The handler asks to be called again later; this does not use up an attempt."""

    task_id: str
    attempt: int
    worker_id: str
    finished_at: int
    delay_ms: int
    reason: str | None = None


class AttemptCancelled(Message, frozen=True, kw_only=True):
    """A running attempt ended because of a cancel signal."""

    task_id: str
    attempt: int
    worker_id: str
    finished_at: int


NO_FREE_SLOT = "no free slot"  # why a record is given back: the shard holds its type back until a slot is free
NOT_FRESH = "not fresh"  # it was there before the worker was: void maybe, or what ended the worker before


class AttemptReturned(Message, frozen=True, kw_only=True):
    """A worker gives a task back: unstarted (no free slot, shutting down) or started and stopped at shutdown."""

    task_id: str
    attempt: int
    worker_id: str
    returned_at: int
    is_started: bool
    reason: str


class AttemptCrashed(Message, frozen=True, kw_only=True):
    """The process that ran the handler died; the worker itself lives."""

    task_id: str
    attempt: int
    worker_id: str
    finished_at: int
    detail: str


class AttemptCheckpointed(Message, frozen=True, kw_only=True):
    """A long-running handler saved how far it came; the next attempt is given it."""

    task_id: str
    attempt: int
    worker_id: str
    checkpointed_at: int
    checkpoint: bytes


class RunningAttempt(Message, frozen=True, kw_only=True):
    """An attempt that a worker's heartbeat vouches for."""

    task_id: str
    attempt: int


class WorkerHeartbeat(Message, frozen=True, kw_only=True):
    """A worker lives, runs these attempts of the shard, and has so many free slots. `is_last` says goodbye."""

    worker_id: str
    sent_at: int
    free_slots: int
    running: tuple[RunningAttempt, ...] = ()
    is_last: bool = False


Report: TypeAlias = (
    AttemptStarted
    | AttemptSucceeded
    | AttemptFailed
    | AttemptSnoozed
    | AttemptCancelled
    | AttemptReturned
    | AttemptCrashed
    | AttemptCheckpointed
    | WorkerHeartbeat
)


# --- what shards send after an event was acknowledged -----------------------------------------------------------------


class ReadyTask(Message, frozen=True, kw_only=True):
    """An attempt to be started by a worker (topics ready.<queue>.<priority>).

    `is_suspect`: a worker may have died of it before its start was known. It is run only when its start is in the log.
    """

    task_id: str
    task_version: int
    attempt: int
    shard: int
    task_type: str
    queue: str
    priority: Priority
    tenant_id: str
    payload: bytes
    content_type: str
    metadata: dict[str, str]
    scheduled_at: int
    created_at: int
    lease_ms: int
    timeout_ms: int | None = None
    deadline_at: int | None = None
    failure_count: int = 0
    crash_count: int = 0
    max_attempts: int = 1
    checkpoint: bytes | None = None
    idempotency_key: str | None = None
    traceparent: str | None = None
    is_suspect: bool = False
    epoch: int = 0


class SignalKind(StrEnum):
    """What a worker is told about an attempt."""

    CANCEL = "cancel"  # the task was cancelled: stop it cooperatively, kill it after the grace
    REVOKE = "revoke"  # the attempt is not yours (any more): stop it, report nothing
    UNKNOWN = "unknown"  # a word that only a newer version knows: leave the attempt alone


EVERY_WORKER = ""  # a signal's worker_id when nobody knows which worker has the ready record


class WorkerSignal(Message, frozen=True, kw_only=True):
    """A word to one worker about one attempt (topic worker-signals).

    With `task_version` it is about the start from just that ready record: an attempt whose start was refused keeps its
    number, so the same worker may well be given it again. A worker that knows of a higher `epoch` of the shard ignores
    it: whoever sent it does not own the shard any more. 0: the sender does not tell.
    """

    worker_id: str
    task_id: str
    attempt: int
    kind: SignalKind
    reason: str
    task_version: int | None = None
    grace_ms: int = 10_000
    epoch: int = 0


class Outcome(StrEnum):
    """How a request was decided. Everything but ACCEPTED and DUPLICATE is a refusal, and changed nothing."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CANCEL_REQUESTED = "cancel_requested"
    CONFLICT = "conflict"
    NOT_FOUND = "not_found"
    WRONG_STATUS = "wrong_status"
    VERSION_MISMATCH = "version_mismatch"
    VIEW_BEHIND = "view_behind"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    UNKNOWN = "unknown"
    TOO_MANY = "too_many"  # of its tenant


class Reply(Message, frozen=True, kw_only=True):
    """The decision on one request, sent once it is durable."""

    request_id: str
    outcome: Outcome
    task_id: str
    status: Status | None = None
    version: int = 0
    created_at: int | None = None
    scheduled_at: int | None = None
    decided_at: int = 0
    detail: str | None = None


class Replies(Message, frozen=True, kw_only=True):
    """The decisions of one batch for one gateway (topic replies, partition = the gateway's)."""

    replies: tuple[Reply, ...]


class InvalidRecord(Message, frozen=True, kw_only=True):
    """A record of an input topic that led to nothing, as it was, and why (topic task-requests-invalid).

    Sent at least once: copies have the same `topic`, `partition` and `offset`, which say where the record stood.
    """

    topic: str
    partition: int
    offset: int
    reason: str
    at: int
    key: bytes | None = None
    value: bytes | None = None


class ForwardedRequest(Message, frozen=True, kw_only=True):
    """A request that stood in a partition of `task-requests` that is not its task's; a shard sends it on, once.

    Sent at least once: the shard that takes it knows copies by `partition` and `offset`, where the request stood.
    `task_id` is the id that the task has, even if the request names none.
    """

    task_id: str
    partition: int
    offset: int
    value: bytes
    key: bytes | None = None


class ParkedTask(Message, frozen=True, kw_only=True):
    """A task that waits in the delay wheel (topics delay.<level>): all that is needed to take it back into memory."""

    task: Task
    due_at: int


class ParkMarker(Message, frozen=True, kw_only=True):
    """Records of a task in the wheel below `version` are void, until all slots up to `due_at` were read."""

    task_id: str
    version: int
    due_at: int


# --- events: what happened (topic task-events) ------------------------------------------------------------------------


class TaskSubmitted(Message, frozen=True, kw_only=True):
    """A submission was accepted. `status` is where the task begins."""

    spec: TaskSpec
    status: Status
    next_run_at: int
    deadline_at: int | None = None
    fingerprint: str | None = None


class TaskReleased(Message, frozen=True, kw_only=True):
    """The due time, or the time of the retry, came."""


class TaskUnblocked(Message, frozen=True, kw_only=True):
    """The tasks that it waited for are done."""

    next_run_at: int


class TaskStarted(Message, frozen=True, kw_only=True):
    """A worker began an attempt; the first to say so has it."""

    attempt: int
    worker_id: str
    started_at: int


class TaskSucceeded(Message, frozen=True, kw_only=True):
    """The task ended with a result."""

    attempt: int
    worker_id: str
    finished_at: int
    result: bytes
    content_type: str


class TaskAttemptFailed(Message, frozen=True, kw_only=True):
    """An attempt failed; `next_step` says what comes of it, `retry_at` when."""

    attempt: int
    worker_id: str
    finished_at: int
    error: TaskError
    failure_count: int
    next_step: NextStep
    retry_at: int | None = None
    delay_ms: int = 0


class TaskSnoozed(Message, frozen=True, kw_only=True):
    """The handler asked to be called again at `next_run_at`."""

    attempt: int
    worker_id: str
    finished_at: int
    snooze_count: int
    next_run_at: int
    reason: str | None = None


class TaskDeferred(Message, frozen=True, kw_only=True):
    """A due task of low priority is to wait until `next_run_at`, since so much waits in its queue."""

    next_run_at: int


class TaskAttemptLost(Message, frozen=True, kw_only=True):
    """An attempt ended without a word of its handler. `crash_count` grew, unless it was given back at a shutdown."""

    attempt: int
    worker_id: str
    error: TaskError
    crash_count: int
    next_step: NextStep
    retry_at: int | None = None


class TaskUpdated(Message, frozen=True, kw_only=True):
    """A waiting task was changed; `spec` is the whole new one."""

    spec: TaskSpec
    status: Status
    next_run_at: int
    deadline_at: int | None = None


class TaskCancelRequested(Message, frozen=True, kw_only=True):
    """A running task is to stop; its worker was told."""

    reason: str | None = None


class TaskCancelled(Message, frozen=True, kw_only=True):
    """The task ended because somebody said so."""

    reason: str | None = None


class TaskExpired(Message, frozen=True, kw_only=True):
    """A deadline of the task passed: that of its start (FAILED), or that of the whole (DEAD)."""

    error: TaskError
    status: Status


class TaskCheckpointed(Message, frozen=True, kw_only=True):
    """The running attempt saved how far it came."""

    attempt: int
    checkpoint: bytes


class TaskRedriven(Message, frozen=True, kw_only=True):
    """An operator runs an ended task again. Carries the task, since its shard had forgotten it."""

    task: Task


class TaskDiscarded(Message, frozen=True, kw_only=True):
    """An operator took a dead task out of the dead-letter queue."""


class RejectedRecord(Message, frozen=True, kw_only=True):
    """What was written, byte for byte; no value: the record had none, or one too large to be kept."""

    key: bytes | None = None
    value: bytes | None = None


class TaskRejected(Message, frozen=True, kw_only=True):
    """A request was refused, or was a repetition of one; nothing changed.

    With `record`, nobody waits for a reply: an `InvalidRecord` follows.
    """

    request: str
    outcome: Outcome
    detail: str | None = None
    record: RejectedRecord | None = None


class RequestForwarded(Message, frozen=True, kw_only=True):
    """A request belongs to another shard; a `ForwardedRequest` with the same bytes follows."""

    shard: int
    value: bytes
    key: bytes | None = None


class ShardOpened(Message, frozen=True, kw_only=True):
    """A new owner begins. Events of lower epochs that come later in the log are void."""

    owner: str


class FireCause(StrEnum):
    """Why a schedule fired."""

    TIME = "time"
    MADE_UP = "made_up"  # for a nominal time that was missed
    TRIGGER = "trigger"
    UNKNOWN = "unknown"


class SkipReason(StrEnum):
    """Why a nominal time had no run."""

    OVERLAP = "overlap"
    MISSED = "missed"
    TAKEN = "taken"  # a task has its id already
    UNKNOWN = "unknown"


class ScheduleCreated(Message, frozen=True, kw_only=True):
    """A schedule was made."""

    spec: ScheduleSpec
    is_paused: bool = False
    next_fire_at: int | None = None
    tzdata: str = ""
    fingerprint: str | None = None


class ScheduleUpdated(Message, frozen=True, kw_only=True):
    """A schedule was changed, or its next nominal time by new rules of its time zone."""

    spec: ScheduleSpec
    considered_at: int
    next_fire_at: int | None = None
    tzdata: str = ""


class SchedulePaused(Message, frozen=True, kw_only=True):
    """A schedule fires no more until it is resumed."""

    reason: str | None = None


class ScheduleResumed(Message, frozen=True, kw_only=True):
    """A schedule fires again."""

    next_fire_at: int | None = None
    tzdata: str = ""


class ScheduleDeleted(Message, frozen=True, kw_only=True):
    """A schedule is no more; its runs go on."""

    reason: str | None = None


class ScheduleFired(Message, frozen=True, kw_only=True):
    """A nominal time came, or somebody asked for a run: its task is submitted next."""

    nominal_at: int
    task_id: str
    cause: FireCause
    next_fire_at: int | None = None
    tzdata: str = ""
    missed: int = 0


class ScheduleBackfilled(Message, frozen=True, kw_only=True):
    """Somebody asked for runs of nominal times that had none: their tasks are submitted next, as overlap allows."""

    runs: tuple[DueRun, ...]


class ScheduleSkipped(Message, frozen=True, kw_only=True):
    """Nominal times had no run, the latest of them at `nominal_at`; `missed` counts those noticed too late."""

    nominal_at: int
    reason: SkipReason
    next_fire_at: int | None = None
    tzdata: str = ""
    missed: int = 0


class ScheduleFlagged(Message, frozen=True, kw_only=True):
    """The next nominal time cannot be computed; the schedule does not fire until it is changed."""

    problem: str


class LimitGrant(Message, frozen=True, kw_only=True):
    """Attempts of one shard that a limit lets go."""

    shard: int
    attempts: tuple[str, ...]


class LimitChanged(Message, frozen=True, kw_only=True):
    """Who holds what of a limit's key (the entity) from now on. It comes to the same however often it is folded."""

    used: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    granted: tuple[LimitGrant, ...] = ()


class TaskSkipped(Message, frozen=True, kw_only=True):
    """A node of a workflow is not run. It never was a task before, and has ended with this."""

    is_failure: bool
    reason: str


class WorkflowSubmitted(Message, frozen=True, kw_only=True):
    """A workflow was accepted. Its nodes become tasks as their rules are met."""

    spec: WorkflowSpec
    deadline_at: int | None = None
    fingerprint: str | None = None


class WorkflowStopped(Message, frozen=True, kw_only=True):
    """A workflow is to end: nodes that have not begun are skipped, tasks that live are cancelled."""

    status: WorkflowStatus
    reason: str


class WorkflowEnded(Message, frozen=True, kw_only=True):
    """All nodes of a workflow have ended."""

    status: WorkflowStatus


EventBody: TypeAlias = (
    TaskSubmitted
    | TaskReleased
    | TaskUnblocked
    | TaskStarted
    | TaskSucceeded
    | TaskAttemptFailed
    | TaskSnoozed
    | TaskAttemptLost
    | TaskUpdated
    | TaskCancelRequested
    | TaskCancelled
    | TaskExpired
    | TaskCheckpointed
    | TaskRedriven
    | TaskDiscarded
    | TaskRejected
    | RequestForwarded
    | ShardOpened
    | ScheduleCreated
    | ScheduleUpdated
    | SchedulePaused
    | ScheduleResumed
    | ScheduleDeleted
    | ScheduleFired
    | ScheduleBackfilled
    | ScheduleSkipped
    | ScheduleFlagged
    | LimitChanged
    | TaskDeferred
    | TaskSkipped
    | WorkflowSubmitted
    | WorkflowStopped
    | WorkflowEnded
)


class Origin(Message, frozen=True, kw_only=True):
    """Where a forwarded request first stood on `task-requests`."""

    partition: int
    offset: int


class Event(Message, frozen=True, kw_only=True):
    """A fact. It happened when it was acknowledged on its partition of `task-events`, and never otherwise.

    `version` counts the entity's events from 1; 0 marks one that changes no entity (a refusal, an opening).
    `source_topic` and `source_offset` name the input that was decided; absent for what the clock caused.
    `origin` names the place in another partition from which that input was forwarded; absent if it was not.
    `base` is the task as it was before, if it came out of the delay wheel: the events before this one may be so old
    that no checkpoint and no log has them. Its payload is there if the task goes on with it.
    """

    entity_id: str
    tenant_id: str
    version: int
    epoch: int
    at: int
    body: EventBody
    source_topic: str | None = None
    source_offset: int | None = None
    traceparent: str | None = None
    origin: Origin | None = None
    base: Task | None = None


class QueuePolicy(Message, frozen=True, kw_only=True):
    """What operators say of a queue. Of several of one queue the last one in the topic holds."""

    queue: str
    set_at: int
    is_paused: bool = False
    pause_reason: str | None = None
    pending_max: int | None = None
    is_drained: bool = False
    priority: Priority | None = None
    timeout_ms: int | None = None
    total_timeout_ms: int | None = None
    max_attempts: int | None = None


class TenantPolicy(Message, frozen=True, kw_only=True):
    """What operators say of a tenant. Of several of one tenant the last one in the topic holds."""

    tenant_id: str
    set_at: int
    weight: int = 1
    submits_per_s: int | None = None
    pending_max: int | None = None


class LimitStrategy(StrEnum):
    """What is done when one more attempt comes than a limit of concurrency allows."""

    WAIT = "wait"
    CANCEL_OLDEST = "cancel_oldest"
    REJECT = "reject"  # the one that comes is cancelled
    UNKNOWN = "unknown"


class LimitPolicy(Message, frozen=True, kw_only=True):
    """How many attempts may start in a period, or run at a time; `scheduler.core.limit_keys` tells what is allowed."""

    name: str
    set_at: int
    count: int
    key: str = ""
    where: dict[str, str] = {}
    period_ms: int | None = None
    burst: int | None = None
    strategy: LimitStrategy = LimitStrategy.WAIT
    is_removed: bool = False


Policy: TypeAlias = QueuePolicy | TenantPolicy | LimitPolicy


# --- what shards tell each other (topic shard-messages) ---------------------------------------------------------------


class LimitWordKind(StrEnum):
    """What is said of attempts; the first two to the home of a key, the others from it."""

    USED = "used"
    RETURNED = "returned"
    GRANTED = "granted"
    CHECK = "check"
    CANCEL = "cancel"
    UNKNOWN = "unknown"


class LimitWord(Message, frozen=True, kw_only=True):
    """What one shard tells another of attempts (`<task id>:<number>`) and one key."""

    kind: LimitWordKind
    key: str
    attempts: tuple[str, ...]


class LimitWish(Message, frozen=True, kw_only=True):
    """An attempt that waits for a limit."""

    attempt: str
    priority: Priority


class LimitAsk(Message, frozen=True, kw_only=True):
    """What a shard wants of the home of a key: all of it, or more than before."""

    key: str
    is_whole: bool
    wishes: tuple[LimitWish, ...]


class ShardMessage(Message, frozen=True, kw_only=True):
    """What the owner of one shard tells the owner of another. It may be lost: what matters is said again."""

    shard: int
    epoch: int
    number: int
    heard_epoch: int = 0
    heard: int = 0
    words: tuple[LimitWord, ...] = ()
    asks: tuple[LimitAsk, ...] = ()


class LimitHeld(Message, frozen=True, kw_only=True):
    """A limit's key as a checkpoint keeps it. `level` is in tokens times `period_us`; both 0 for concurrency."""

    key: str
    holders: dict[str, int] = {}
    level: int = 0
    period_us: int = 0


class QueueStats(Message, frozen=True, kw_only=True):
    """How much there is of one queue, priority and tenant in one shard. No tenant: all that are not told of alone."""

    queue: str
    priority: Priority
    tenant_id: str
    pending: int
    running: int
    throttled: int = 0
    started: int
    oldest_at: int | None = None
    due_soon: int = 0
    waited_us: int = 0


class LimitStats(Message, frozen=True, kw_only=True):
    """What waits in one shard for one key of a limit; and what is held of it, if its home is there."""

    key: str
    waiting: int
    held: int


class ShardStats(Message, frozen=True, kw_only=True):
    """What waits and runs in a shard. Of several of one shard the last one holds."""

    shard: int
    epoch: int
    at: int
    queues: tuple[QueueStats, ...]
    limits: tuple[LimitStats, ...] = ()


class ShardCheckpoint(Message, frozen=True, kw_only=True):
    """How far `shard-state` reaches: the fold of the events before `next_offset`.

    `forwarded` tells by partition (as text) up to where requests that were forwarded from there have been decided.
    `opened`, `next_offsets` and `waiting` are the marks of the delay wheel; see `scheduler.core.wheel`.
    """

    epoch: int
    next_offset: int
    positions: dict[str, int]
    taken_at: int
    forwarded: dict[str, int] = {}
    opened: tuple[int, ...] = ()
    next_offsets: dict[str, int] = {}
    waiting: dict[str, int] = {}
