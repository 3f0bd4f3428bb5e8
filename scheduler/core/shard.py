"""The state machine of one partition: inputs and time in, events and their effects out.

`handle` and `fire_timers` decide, and fold what they decided at once; the effects they return may be released only
when the events are acknowledged. What is kept beside the folded state (timers, dispatch, who was heard when) is
derived from it or forgotten at no harm, and built anew by `on_loaded`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from scheduler.core import decisions, routing
from scheduler.core.admission import Admission, AdmissionSettings
from scheduler.core.decisions import NOTHING, Decision
from scheduler.core.desk import LOST, Effects, Source, name_or_nothing, rejected
from scheduler.core.dispatch import Dispatch, PartitionsOf
from scheduler.core.gate import DepthKey, attempt_of
from scheduler.core.limits import ShardLimits
from scheduler.core.parking import PARKED_FROM, Parking, ToPark
from scheduler.core.policies import Policies
from scheduler.core.schedule import (
    SCHEDULE_BODIES,
    schedule_of_run,
)
from scheduler.core.schedules import Schedules
from scheduler.core.shard_schedules import SCHEDULE, ShardSchedules
from scheduler.core.shard_workflows import WORKFLOW, ShardWorkflows
from scheduler.core.tally import Tally
from scheduler.core.task import TERMINAL, WAITING, evolve
from scheduler.core.tasks import Tasks
from scheduler.core.timers import Timers
from scheduler.core.uniqueness import Standing, Uniques, rested, standing, unique_problem
from scheduler.core.wheel import Place, Wheel
from scheduler.core.workflow import BODIES as WORKFLOW_BODIES
from scheduler.core.workflow import workflow_of
from schemas.ids import unique_root
from schemas.limits import CHECKPOINT_MAX
from schemas.messages import (
    NO_FREE_SLOT,
    NOT_FRESH,
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
    Event,
    EventBody,
    ForwardedRequest,
    LimitChanged,
    LimitHeld,
    Message,
    Origin,
    Outcome,
    ParkedTask,
    ParkMarker,
    ReadyTask,
    RedriveTask,
    Reply,
    Report,
    Request,
    RequestForwarded,
    Schedule,
    ScheduleRequest,
    ShardMessage,
    ShardStats,
    Status,
    SubmitTask,
    Task,
    TaskCancelled,
    TaskDeferred,
    TaskDiscarded,
    TaskRedriven,
    TaskRejected,
    TaskReleased,
    TaskRequest,
    TaskSkipped,
    TaskSpec,
    TaskStarted,
    TaskSubmitted,
    TaskUpdated,
    UniqueScope,
    UpdateTask,
    WorkerHeartbeat,
    WorkerSignal,
    Workflow,
    WorkflowEnded,
    WorkflowRequest,
)
from schemas.priorities import Weights
from schemas.topics import INPUT_TOPICS
from schemas.wheel import WheelShape

DERIVED_PER_STEP = 1_000  # tasks, after a load, before others may go on
TIMERS_PER_STEP = 500  # a herd of timers is released in batches, so that inputs are not kept waiting
RECHECK_US = 200_000  # how soon a silent worker is judged again while its reports may still be unread


class ShardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What may differ between clusters."""

    shards: int = 1  # of the cluster; the host sets it to the partitions of task-requests
    tasks_max: int = 1_000_000  # live tasks of a shard: 1.5 KB each beside the payload, packed ones 0.7 KB
    tasks_bytes_max: int = 1 << 30  # of their payloads and checkpoints
    unpacked_max: int = 10_000  # pending tasks beyond which those that come are packed while they wait
    ended_max: int = 1_000_000  # ended ones that it remembers, nearly all for their idempotency key: 0.6 KB each
    ended_kept_us: int = 30_000_000  # so long an ended task is recognised: longer than the view lags
    idempotency_window_us: int = 24 * 3600 * 1_000_000
    worker_timeout_us: int = 6_000_000  # three heartbeats
    wheel: WheelShape = WheelShape()
    schedules_max: int = 1_000_000  # 0.7 KB each
    workflows_max: int = 100_000
    near_max: int = (
        200_000  # tasks that are not packed beyond which no slot of the wheel is read, until some have ended
    )
    markers_max: int = 1_000_000  # changed or cancelled tasks in the wheel: 0.3 KB each
    admission: AdmissionSettings = AdmissionSettings()
    weights: Weights = Weights()  # of priorities


FORWARDED_BEFORE = "it was forwarded here before"
TAKEN = "an earlier task has this id, which waited in the delay wheel"
TASK, MARKER, LIMIT = "task/", "marker/", "limit/"  # begin the keys of what checkpoints hold
Entity: TypeAlias = Task | EndedTask | ParkMarker | Schedule | LimitHeld | Workflow
FOREVER = 1 << 62  # of what is remembered until somebody says otherwise
FORWARD_MAX = 1_000_000  # of one that is forwarded: to such a topic, with an envelope; valid ones are smaller


class ShardState:
    """The fold of a shard's valid events: the same on every owner."""

    def __init__(self) -> None:
        self.tasks = Tasks()
        self.ended: dict[str, EndedTask] = {}
        self.schedules = Schedules()
        self.workflows: dict[str, Workflow] = {}
        self.uniques = Uniques()
        self.epoch = 0
        self.positions: dict[str, int] = {}
        self.forwarded: dict[int, int] = {}  # by partition: what was forwarded from there is decided below this offset


class Shard:
    """One owner's copy of a shard."""

    def __init__(
        self, shard: int, settings: ShardSettings, rng: Random, now: int, policies: Policies | None = None
    ) -> None:
        """`policies` is what holds for the whole process, kept up to date by others; None: nothing was said."""
        self.shard = shard
        self.state = ShardState()
        self.parking = Parking(Wheel(settings.wheel, now))
        self._stored: set[str] = set()  # keys of entities that the checkpoints hold, without those of schedules
        self.changed: set[str] = set()  # keys of entities that the next checkpoint must write or remove
        self.statuses: Counter[Status] = Counter()  # of the live tasks
        self.forgotten_offset = -1  # all that is forgotten had its last event at or before this one
        self.drained_at = 0  # when all reports that were there had been read
        self.stale_reports = 0
        self.invalid_records = 0  # inputs that led to nothing, and are kept for people to look at
        self._settings = settings
        self._rng = rng
        self._acknowledged_offset = -1  # of the last event that is known to be in the log
        self._is_loaded = False
        self._was_behind = True  # until it is known that all overdue slots were read
        self._timers = Timers()
        policies = policies or Policies()
        self._dispatch = Dispatch(policies, settings.weights)
        self._admission = Admission(settings.admission, policies, settings.shards)
        self._schedules = ShardSchedules(self, self.state.schedules, settings.schedules_max)
        kept_us = {False: settings.ended_kept_us, True: settings.idempotency_window_us}
        self._workflows = ShardWorkflows(self, self.state.workflows, settings.workflows_max, kept_us)
        self._limits = ShardLimits(shard, settings.shards, policies, self._dispatch.gate, self.known)
        self._heard: dict[str, int] = {}
        self._running: dict[str, set[str]] = {}
        self._tally = Tally()
        self._staying: set[str] = set()  # due far ahead, but not to be parked
        self._suspects: set[str] = set()  # pending that an owner, or a worker, may have died of before
        self._worker_heard: dict[str, int] = {}
        self._forget: list[tuple[int, str, int]] = []  # a heap: when to forget, whom, and the offset of its last event

    # --- state ---------------------------------------------------------------------------------------------------

    def evolve(self, event: Event) -> None:
        """Fold an event. One that is not its entity's next is dropped: it is void, or was folded already."""
        self._note_positions(event)
        if type(event.body) in SCHEDULE_BODIES:
            self._schedules.evolve(event)
        elif isinstance(event.body, WORKFLOW_BODIES):
            self._workflows.evolve(event)
        elif isinstance(event.body, LimitChanged):
            self._limits.fold(event, event.body)
        elif event.version != 0 and self._is_next(event):
            self._evolve_task(event)

    def _note_positions(self, event: Event) -> None:
        state = self.state
        if event.source_topic is not None and event.source_offset is not None:
            # A doubled event may come after later ones: a position never moves back.
            position = state.positions.get(event.source_topic, 0)
            state.positions[event.source_topic] = max(position, event.source_offset + 1)
        if (origin := event.origin) is not None:
            state.forwarded[origin.partition] = max(state.forwarded.get(origin.partition, 0), origin.offset + 1)

    def _evolve_task(self, event: Event) -> None:
        state = self.state
        task_id = event.entity_id
        before = state.tasks.get(task_id) or event.base
        ended = state.ended.get(task_id)
        if isinstance(event.body, TaskDiscarded):
            self._end(self._discarded(ended, event))
            return
        if isinstance(event.body, TaskSkipped):
            self._end(self._skipped(event, event.body))
            self._workflows.note(task_id, state.ended[task_id])
            return
        after = evolve(before, event)
        if before is not None and isinstance(event.body, TaskUpdated | TaskCancelled):
            self._void_parked(before, event.version)
        was_in_memory = task_id in state.tasks
        if after.status in TERMINAL:
            self._end(self._ended(after))
            state.tasks.pop(task_id, None)  # last, since other threads read: it is always known as one or other
        else:
            state.tasks[task_id] = after
            self.changed.add(TASK + task_id)
            if ended is not None:
                del state.ended[task_id]
        if isinstance(event.body, TaskSubmitted | TaskRedriven):
            state.uniques.note(task_id)
        self.parking.unrecorded.discard(task_id)
        if self._is_loaded:
            self._track(before if was_in_memory else None, after, event.at)
            if self.state.workflows:
                self._workflows.note(task_id, self.known(task_id))
        if len(self.state.schedules) and (schedule_id := schedule_of_run(task_id)) is not None:
            self._schedules.note_run(schedule_id, after)

    def _void_parked(self, before: Task, version: int) -> None:
        due_at = decisions.wake_at(before, 0) if before.status in PARKED_FROM else None
        if self.parking.mark(before.task_id, version, due_at):
            self.changed.add(MARKER + before.task_id)

    def _end(self, ended: EndedTask) -> None:
        """Remember what is not in memory as a whole any more."""
        self.state.ended[ended.task_id] = ended
        key = TASK + ended.task_id
        if self._is_checkpointed(ended) or self.is_stored(key):
            self.changed.add(key)
        else:
            self.changed.discard(key)  # it came and went between two checkpoints: never written

    def _is_checkpointed(self, ended: EndedTask) -> bool:
        """Whether it is remembered over restarts: for its idempotency key, or since an overdue slot may tell of it."""
        return self._was_behind or ended.keep_until > ended.ended_at + self._settings.ended_kept_us

    def _is_next(self, event: Event) -> bool:
        known, body = self.known(event.entity_id), event.body
        if known is None and event.base is not None:
            return event.version == event.base.version + 1
        if isinstance(known, EndedTask) and isinstance(body, TaskSubmitted):
            # The id is used anew. Its first task was forgotten by then, if not by the checkpoint that is loaded.
            return event.version == 1 and event.at >= known.keep_until
        if known is not None:
            return event.version == known.version + 1
        if isinstance(body, TaskRedriven):
            return event.version == body.task.version + 1
        return isinstance(body, TaskDiscarded) or (isinstance(body, TaskSubmitted | TaskSkipped) and event.version == 1)

    def known(self, task_id: str) -> Task | EndedTask | None:
        """The task if it lives, what is remembered of it if it ended lately, else None. Safe from any thread."""
        return self.state.tasks.get(task_id) or self.state.ended.get(task_id)

    def kind_of(self, entity_id: str) -> str | None:
        """Whether there is a schedule or a workflow of this id, with whose tasks those of another would be mixed up."""
        if entity_id in self.state.schedules:
            return "schedule"
        return "workflow" if entity_id in self.state.workflows else None

    def entity(self, key: str) -> Entity | bytes | None:
        """What a checkpoint must hold under a key of `changed`, or its bytes; None: nothing."""
        kind, _, entity_id = key.partition("/")
        if kind + "/" == MARKER:
            return self.parking.markers.get(entity_id)
        if kind + "/" == SCHEDULE:
            return self.state.schedules.kept(entity_id)
        if kind + "/" == WORKFLOW:
            return self.state.workflows.get(entity_id)
        if kind + "/" == LIMIT:
            return self._limits.limiter.held(entity_id)
        if (kept := self.state.tasks.kept(entity_id)) is not None:
            return kept
        ended = self.state.ended.get(entity_id)
        return ended if ended is not None and self._is_checkpointed(ended) else None

    def _ended(self, task: Task, due_at: int | None = None) -> EndedTask:
        settings, unique = self._settings, task.spec.unique
        kept_us = settings.ended_kept_us if task.spec.idempotency_key is None else settings.idempotency_window_us
        if unique is not None and unique.scope is UniqueScope.WINDOW:
            kept_us = max(kept_us, unique.window_ms * 1_000)
        return EndedTask(
            task_id=task.task_id,
            status=task.status,
            version=task.version,
            attempt=task.attempt,
            ended_at=task.updated_at,
            created_at=task.created_at,
            scheduled_at=task.spec.scheduled_at or task.created_at,
            # An idempotency key is remembered from the submission on, whatever happened since; a node until its
            # workflow has ended.
            keep_until=FOREVER
            if self._workflows.is_node(task.task_id)
            else max(task.updated_at + settings.ended_kept_us, task.created_at + kept_us),
            fingerprint=task.fingerprint,
            due_at=due_at,
        )

    def _skipped(self, event: Event, body: TaskSkipped) -> EndedTask:
        return replace(_unknown_before(event, Status.CANCELLED, FOREVER), is_skipped=not body.is_failure)

    def release(self, task_id: str, now: int) -> None:
        """A task that ended is remembered for its workflow no more."""
        ended = self.state.ended.get(task_id)
        if ended is not None and ended.keep_until == FOREVER:
            self._end(replace(ended, keep_until=now + self._settings.ended_kept_us))

    def _discarded(self, ended: EndedTask | None, event: Event) -> EndedTask:
        if ended is not None:
            keep_until = max(ended.keep_until, event.at + self._settings.ended_kept_us)
            return replace(ended, version=event.version, keep_until=keep_until)
        # Forgotten long ago: remembered again for a while, so that a view that lags can't discard or redrive it twice.
        return _unknown_before(event, Status.DEAD, event.at + self._settings.ended_kept_us)

    # --- loading -------------------------------------------------------------------------------------------------

    def restore(self, entity: Entity) -> None:
        """Take an entity from a checkpoint."""
        if isinstance(entity, ParkMarker):
            self._stored.add(MARKER + entity.task_id)
            self.parking.restore(entity)
            return
        if isinstance(entity, LimitHeld):
            self._stored.add(LIMIT + entity.key)
            self._limits.restore(entity)
            return
        if isinstance(entity, Schedule):
            self._schedules.restore(entity)
            return
        if isinstance(entity, Workflow):
            self._stored.add(WORKFLOW + entity.workflow_id)
            self._workflows.restore(entity)
            return
        self._stored.add(TASK + entity.task_id)
        if isinstance(entity, Task):
            self.state.tasks[entity.task_id] = entity
            if entity.status is Status.PENDING and len(self.state.tasks) > self._settings.unpacked_max:
                self.state.tasks.pack(entity.task_id)
        else:
            self.state.ended[entity.task_id] = entity

    def on_loaded(self, now: int, offset: int) -> None:
        """All events up to `offset` are folded: derive the rest and begin to act."""
        for _ in self.derive(now, offset):
            pass

    def derive(self, now: int, offset: int) -> Iterator[None]:
        """Derive the rest, as `on_loaded` does, in small steps: of a million tasks it takes many seconds."""
        self._is_loaded = True
        self._acknowledged_offset = offset
        tasks = self.state.tasks
        pending: list[tuple[int, str]] = []
        rooted = [
            (ended.created_at, ended.task_id) for ended in self.state.ended.values() if unique_root(ended.task_id)
        ]
        for number, task in enumerate(tasks.snapshot()):
            if number % DERIVED_PER_STEP == DERIVED_PER_STEP - 1:
                yield
            self._track(None, task, now)
            self._offer_to_wheel(task)
            if task.status is Status.PENDING:
                pending.append((task.next_run_at or 0, task.task_id))
            if unique_root(task.task_id):
                rooted.append((task.created_at, task.task_id))
        self.state.uniques.derive(rooted)
        for number, (_, task_id) in enumerate(sorted(pending)):
            if number % DERIVED_PER_STEP == DERIVED_PER_STEP - 1:
                yield
            self._may_go(tasks[task_id], now)
            self._suspects.add(task_id)
        for ended in sorted(self.state.ended.values(), key=lambda ended: ended.keep_until):
            self._will_forget(ended, offset)
        yield from self._workflows.derive()
        self._limits.on_loaded(now)

    def _track(self, before: Task | None, after: Task, now: int) -> None:
        task_id, status = after.task_id, after.status
        self._staying.discard(task_id)
        self.statuses[status] += 1
        if before is not None:
            self.statuses[before.status] -= 1
            if before.status is Status.PENDING:
                self._admission.leaves(before)
                self._suspects.discard(task_id)
                self._dispatch.started(task_id) if status is Status.RUNNING else self._dispatch.forget(task_id)
            elif before.status is Status.RUNNING and status is not Status.RUNNING:
                self._heard.pop(task_id, None)
                self._running.get(before.worker_id or "", set()).discard(task_id)
                self._tally.ended(before)
            elif before.status in PARKED_FROM:
                self._tally.due.add(before, -1)
        if status in TERMINAL:
            del self.statuses[status]
            self._timers.cancel(task_id)
            return
        if status is Status.PENDING:
            self._admission.enters(after)
        if status is Status.RUNNING and (before is None or before.status is not Status.RUNNING):
            self._heard[task_id] = now
            self._running.setdefault(after.worker_id or "", set()).add(task_id)
            self._expect(after.worker_id or "", now)
            self._tally.began(before, after, now)
        elif status in PARKED_FROM:
            self._tally.due.add(after)
        self._set_timer(after)

    def _set_timer(self, task: Task) -> None:
        at = decisions.wake_at(task, self._heard.get(task.task_id, 0))
        if at is None:
            self._timers.cancel(task.task_id)
        else:
            self._timers.set(task.task_id, at)

    # --- inputs --------------------------------------------------------------------------------------------------

    def handle(self, message: Message, source: Source, now: int) -> Effects:
        """Decide one input and fold what follows. Messages that a shard does not take raise TypeError."""
        if isinstance(message, Request):
            request = routing.identified(message, source.topic, self.shard, source.offset)
            home = routing.home_of(routing.entity_id_of(request), self.shard, self._settings.shards)
            if home != self.shard:
                return self._forward(request, home, source, now)
            return self._handle_request(request, source, now)
        if isinstance(message, WorkerHeartbeat):
            return self._handle_heartbeat(message, now)
        if isinstance(message, Report):
            return self._handle_report(message, source, now)
        if isinstance(message, ShardMessage):
            return self._handle_shard_message(message, now)
        raise TypeError(f"{type(message).__name__} is no input of a shard")

    def refuse(self, source: Source, reason: str, now: int) -> Effects:
        """Decide that an input is none that can be taken."""
        body = rejected("", Decision(None, Outcome.INVALID, reason), source, is_kept=True)
        is_input = source.topic in INPUT_TOPICS  # a record of the wheel is not read in the order of one partition
        return self.happened(self.event("", "", 0, body, now, source if is_input else None))

    def handle_forwarded(self, forwarded: ForwardedRequest, request: Request, source: Source, now: int) -> Effects:
        """Decide the request that another shard sent here. It is not sent on; a copy of it changes nothing."""
        partition, offset = forwarded.partition, forwarded.offset
        is_another = 0 <= partition < self._settings.shards and partition != self.shard
        if not (is_another and 0 <= offset < decisions.COUNT_MAX):
            return self.refuse(source, f"no request can be forwarded here from [{partition}] offset {offset}", now)
        source = source._replace(
            key=forwarded.key, value=forwarded.value, origin=Origin(partition=partition, offset=offset)
        )
        if offset < self.state.forwarded.get(partition, 0):
            body = TaskRejected(request=type(request).__name__, outcome=Outcome.DUPLICATE, detail=FORWARDED_BEFORE)
            return self.happened(self.event("", "", 0, body, now, source))
        if isinstance(request, SubmitTask) and request.task_id is None:
            request = replace(request, task_id=forwarded.task_id)
        home = routing.home_of(routing.entity_id_of(request), self.shard, self._settings.shards)
        if home != self.shard:
            return self.refuse(source, f"it was forwarded to shard {self.shard}, but belongs to {home}", now)
        return self._handle_request(request, source, now)

    def _forward(self, request: Request, home: int, source: Source, now: int) -> Effects:
        if source.value is None or source.size() > FORWARD_MAX:
            return self.refuse(source, f"it belongs to partition {home}, and is too large to be forwarded", now)
        body = RequestForwarded(shard=home, value=source.value, key=source.key)
        return self.happened(self.event(routing.entity_id_of(request), "", 0, body, now, source))

    def happened(self, event: Event) -> Effects:
        """Fold an event that was decided now."""
        if isinstance(event.body, TaskRejected) and event.body.record is not None:
            self.invalid_records += 1
        self.evolve(event)
        return Effects([event], [], [], [])

    def _handle_request(self, request: Request, source: Source, now: int) -> Effects:
        if isinstance(request, ScheduleRequest):
            return self._schedules.handle(request, source, now)
        if isinstance(request, WorkflowRequest):
            return self._workflows.handle(request, source, now)
        entity = request.task if isinstance(request, RedriveTask | DiscardTask) else request
        task_id = routing.entity_id_of(request)
        known = self._as_shown(request, now) or self.known(task_id)
        stands = self._standing(request, now) if known is None and isinstance(request, SubmitTask) else None
        if stands is not None:
            known, decision, task_id = stands.known, stands.decision, stands.known.task_id
        else:
            decision = self._decide_request(known, request, now)
        spec = request.spec if isinstance(request, SubmitTask) else None
        tenant_id = spec.tenant_id if spec else known.spec.tenant_id if isinstance(known, Task) else ""
        if decision.body is None:
            is_kept = request.reply_to is None and decision.outcome in LOST
            body = rejected(type(request).__name__, decision, source, is_kept=is_kept)
            event = self.event(name_or_nothing(task_id), name_or_nothing(tenant_id), 0, body, now, source)
        elif isinstance(known, Task):
            event = self._next_event(known, decision.body, source, now)
        else:
            version = 0 if spec else known.version if known else entity.version  # type: ignore[union-attr]
            event = self.event(task_id, tenant_id, version + 1, decision.body, now, source)
            if isinstance(request, SubmitTask) and request.traceparent is not None:
                event = replace(event, traceparent=request.traceparent)
        signals = self._signals(known, decision)  # of how it stood before
        effects = self.happened(event)._replace(signals=signals)
        if request.reply_to is not None:
            effects.replies.append((request.reply_to, self._reply(request.request_id, task_id, decision, now)))
        return effects

    def _as_shown(self, request: TaskRequest, now: int) -> Task | None:
        """The task in the wheel that is to be changed, if it is there as the request shows it."""
        shown = request.task if isinstance(request, CancelTask | UpdateTask) else None
        if shown is None or shown.task_id != request.task_id or decisions.shown_problem(shown, now):  # type: ignore[union-attr]
            return None
        known = self.known(shown.task_id)
        is_here = isinstance(known, Task) or (known is not None and known.due_at is None)
        if is_here or (known is not None and known.version != shown.version):
            return None
        is_parked = self.parking.is_parked_as(shown, decisions.wake_at(shown, 0))
        return shown if is_parked and len(self.parking.markers) < self._settings.markers_max else None

    def _decide_request(self, known: Task | EndedTask | None, request: TaskRequest, now: int) -> Decision:
        match request:
            case SubmitTask():
                return self._decide_submit(known, request, now)
            case CancelTask():
                return decisions.decide_cancel(known, request)
            case UpdateTask():
                return decisions.decide_update(known, request, now)
            case RedriveTask():
                if reason := self.is_full(request.task.spec, now):
                    return Decision(None, Outcome.OVERLOADED, reason)
                return decisions.decide_redrive(known, request, request.view_offset > self.forgotten_offset, now)
            case DiscardTask():
                return decisions.decide_discard(known, request, request.view_offset > self.forgotten_offset)

    def _standing(self, request: SubmitTask, now: int) -> Standing | None:
        """The task that stands for this submission, if there is one, and what becomes of it."""
        if request.spec.unique is None or unique_problem(request) is not None:
            return None
        others = (self.known(task_id) for task_id in self.state.uniques.latest(request.task_id or ""))
        return next((found for other in others if (found := standing(other, request, now))), None)

    def _decide_submit(self, known: Task | EndedTask | None, request: SubmitTask, now: int) -> Decision:
        if (schedule_of_run(request.task_id or "") or "") in self.state.schedules:
            return Decision(None, Outcome.INVALID, "task_id begins like those of the runs of a schedule")
        if (workflow_of(request.task_id or "") or "") in self._workflows:
            return Decision(None, Outcome.INVALID, "task_id begins like those of the tasks of a workflow")
        if problem := unique_problem(request):
            return Decision(None, Outcome.INVALID, problem)
        request = rested(request, now)
        if isinstance(known, EndedTask) and known.keep_until <= now:
            known = None  # to be forgotten in the very moment
        if known is None and (reason := self.is_full(request.spec, now)):
            return Decision(None, Outcome.OVERLOADED, reason)
        decision = decisions.decide_submit(known, request, now)
        if decision.body is not None and (
            refused := self._admission.refusal(request.spec, min(now, request.submitted_at))
        ):
            return Decision(None, refused.outcome, refused.detail)
        return self._put_off(decision, now)

    def _put_off(self, decision: Decision, now: int) -> Decision:
        """A new task of low priority for a crowded queue waits in the delay wheel."""
        body = decision.body
        if isinstance(body, TaskSubmitted) and body.status is Status.PENDING and self._admission.overflows(body.spec):
            until = decisions.deferred_until(now, now)
            return decision._replace(body=replace(body, status=Status.SCHEDULED, next_run_at=until))
        return decision

    def is_full(self, spec: TaskSpec, now: int) -> str | None:
        """Why no task like this can be taken in; None: it can."""
        settings = self._settings
        if len(self.state.tasks) >= settings.tasks_max:
            return f"the shard holds {settings.tasks_max:,} tasks"
        if self.state.tasks.bytes >= settings.tasks_bytes_max:
            return f"the tasks of the shard have {settings.tasks_bytes_max:,} bytes"
        if len(self.state.ended) < settings.ended_max:
            return None
        if self._is_behind(now):  # then nothing that ended is forgotten
            return f"{settings.ended_max} tasks ended since there was room to read what is due in the delay wheel"
        is_in_window = spec.unique is not None and spec.unique.scope is UniqueScope.WINDOW
        if spec.idempotency_key is not None or is_in_window:
            return f"the shard remembers {settings.ended_max} ended tasks for their keys"
        return None

    def _reply(self, request_id: str, task_id: str, decision: Decision, now: int) -> Reply:
        known = self.known(task_id)
        scheduled_at = None
        if isinstance(known, Task):
            scheduled_at = known.spec.scheduled_at or known.created_at
        elif known is not None:
            scheduled_at = known.scheduled_at
        return Reply(
            request_id=request_id,
            outcome=decision.outcome,
            task_id=task_id,
            status=known.status if known else None,
            version=known.version if known else 0,
            created_at=known.created_at if known else None,
            scheduled_at=scheduled_at,
            decided_at=now,
            detail=decision.detail,
        )

    def _handle_report(self, report: Report, source: Source, now: int) -> Effects:
        known = self.known(report.task_id)  # type: ignore[union-attr]
        if isinstance(report, AttemptStarted):
            return self.applied(known, decisions.decide_started(known, report), source, now)
        if isinstance(report, AttemptReturned) and not report.is_started:
            if isinstance(known, Task) and known.status is Status.PENDING and report.attempt == known.attempt + 1:
                if report.reason == NOT_FRESH:
                    self._suspects.add(known.task_id)
                self._dispatch.given_back(known, now, is_full=report.reason == NO_FREE_SLOT)
            return Effects.none()
        if not isinstance(known, Task) or not decisions.is_current(known, report):  # type: ignore[arg-type]
            self.stale_reports += 1
            return Effects.none()
        self._heard[known.task_id] = now
        if isinstance(report, AttemptCheckpointed) and len(report.checkpoint) > CHECKPOINT_MAX:
            size = len(report.checkpoint)
            return self.refuse(source, f"checkpoint has {size} bytes; at most {CHECKPOINT_MAX} are allowed", now)
        return self.applied(known, self._decide_report(known, report, now), source, now)

    def _decide_report(self, task: Task, report: Report, now: int) -> Decision:
        match report:
            case AttemptSucceeded():
                return decisions.decide_succeeded(task, report)
            case AttemptFailed():
                return decisions.decide_failed(task, report, now, self._rng)
            case AttemptSnoozed():
                return decisions.decide_snoozed(task, report, now)
            case AttemptCancelled():
                return decisions.decide_cancelled(task, report)
            case AttemptCrashed():
                return decisions.decide_lost(task, report.detail, is_crash=True)
            case AttemptReturned():
                return decisions.decide_lost(task, f"given back: {report.reason}", is_crash=False)
            case AttemptCheckpointed():
                return decisions.decide_checkpointed(task, report)
        return NOTHING

    def _handle_heartbeat(self, heartbeat: WorkerHeartbeat, now: int) -> Effects:
        worker_id = heartbeat.worker_id
        if heartbeat.free_slots > 0:
            self._dispatch.unblock()
        effects = Effects.none()
        vouched = set()
        for running in heartbeat.running:
            task = self.state.tasks.get(running.task_id)
            if task is None or (task.status, task.attempt, task.worker_id) != (
                Status.RUNNING,
                running.attempt,
                worker_id,
            ):
                reason = "the attempt is not this worker's any more"
                revoke = decisions.revoke_signal(running.task_id, running.attempt, worker_id, reason)
                effects.signals.append(self._signed(revoke))
                continue
            vouched.add(task.task_id)
            self._heard[task.task_id] = now
            if task.cancel_requested_at is not None:
                effects.signals.append(self._signed(decisions.cancel_signal(task)))
        # A worker's reports come in order: what it does not name now, it neither runs nor has reported on.
        reason = "its worker shut down" if heartbeat.is_last else "its worker does not run it"
        for task_id in sorted(self._running.get(worker_id, set()) - vouched):
            self._lose(task_id, reason, effects, now, is_crash=not heartbeat.is_last)
        self._expect(worker_id, now)
        return effects

    def _lose(self, task_id: str, reason: str, effects: Effects, now: int, *, is_crash: bool) -> None:
        task = self.state.tasks[task_id]
        decision = decisions.decide_lost(task, reason, is_crash=is_crash)
        effects.extend(self.applied(task, decision, None, now))

    def applied(self, task: Task | EndedTask | None, decision: Decision, source: Source | None, now: int) -> Effects:
        """Fold what was decided of a task, if anything was."""
        effects = Effects([], [], self._signals(task, decision), [])
        if decision.body is not None and isinstance(task, Task):
            event = self._next_event(task, decision.body, source, now)
            self.evolve(event)
            effects.events.append(event)
        return effects

    def _next_event(self, task: Task, body: EventBody, source: Source | None, now: int) -> Event:
        return Event(
            entity_id=task.task_id,
            tenant_id=task.spec.tenant_id,
            version=task.version + 1,
            epoch=self.state.epoch,
            at=now,
            body=body,
            source_topic=source.topic if source else None,
            source_offset=source.offset if source else None,
            traceparent=task.traceparent,
            origin=source.origin if source else None,
            base=self._base(task, body),
        )

    def _base(self, task: Task, body: EventBody) -> Task | None:
        """The task as a load must find it, if its slot alone tells of it; without its payload if that is not needed."""
        if task.task_id in self.state.tasks and task.task_id not in self.parking.unrecorded:
            return None
        if isinstance(body, TaskReleased | TaskDeferred):  # it goes on as it is
            return task
        return replace(task, spec=replace(task.spec, payload=b""))

    def _signals(self, task: Task | EndedTask | None, decision: Decision) -> list[WorkerSignal]:
        is_changed = decision.body is not None and not isinstance(decision.body, TaskStarted)
        if is_changed and isinstance(task, Task) and self._dispatch.is_out(task.task_id):
            # Its ready record is void now; a worker that has it in its buffer can save itself the start.
            return [self._signed(decisions.void_signal(task))]
        return [self._signed(decision.signal)] if decision.signal else []

    def _signed(self, signal: WorkerSignal) -> WorkerSignal:
        """With the epoch, by which workers know the words of an owner that does not know yet that it was followed."""
        return replace(signal, epoch=self.state.epoch)

    def event(
        self,
        entity_id: str,
        tenant_id: str,
        version: int,
        body: EventBody,
        now: int,
        source: Source | None,
        traceparent: str | None = None,
    ) -> Event:
        """An event of this owner."""
        return Event(
            entity_id=entity_id,
            tenant_id=tenant_id,
            version=version,
            epoch=self.state.epoch,
            at=now,
            body=body,
            source_topic=source.topic if source else None,
            source_offset=source.offset if source else None,
            traceparent=traceparent,
            origin=source.origin if source else None,
        )

    # --- time ----------------------------------------------------------------------------------------------------

    def fire_timers(self, now: int) -> Effects:
        """Decide what the clock caused by `now`; a herd takes several calls.

        What is due in a window whose slot was not read yet waits until it was, so that all goes out in order.
        """
        effects = Effects.none()
        until = now if self.is_crowded() else min(now, self.parking.wheel.read_until() - 1)
        for key in self._timers.pop_due(until, TIMERS_PER_STEP):
            if key.startswith(_WORKER):
                self._judge_worker(key.removeprefix(_WORKER), effects, now)
            elif (task := self.state.tasks.get(key)) is not None:
                self._fire(task, effects, now)
        effects.extend(self._schedules.fire_due(now, TIMERS_PER_STEP))
        effects.extend(self._workflows.act(now, TIMERS_PER_STEP))
        return effects

    def _fire(self, task: Task, effects: Effects, now: int) -> None:
        heard_at = self._heard.get(task.task_id, 0)
        if heard_at > self.drained_at - task.spec.lease_ms * 1000:
            heard_at = max(heard_at, now - task.spec.lease_ms * 1000 + RECHECK_US)  # its heartbeat may be unread
        decision = decisions.decide_timer(task, heard_at, now, self._rng)
        if task.attempt == 0 and isinstance(decision.body, TaskReleased) and self._admission.overflows(task.spec):
            asked_at = max(task.created_at, task.spec.scheduled_at or 0)
            decision = Decision(TaskDeferred(next_run_at=decisions.deferred_until(asked_at, now)))
        if decision.body is None:
            self._timers.set(task.task_id, decisions.wake_at(task, heard_at) or now + RECHECK_US)
        else:
            effects.extend(self.applied(task, decision, None, now))

    def _expect(self, worker_id: str, now: int) -> None:
        if self._running.get(worker_id):
            self._worker_heard[worker_id] = now
            self._timers.set(_WORKER + worker_id, now + self._settings.worker_timeout_us)

    def _judge_worker(self, worker_id: str, effects: Effects, now: int) -> None:
        running = self._running.get(worker_id, set())
        heard_at = self._worker_heard.get(worker_id, now)
        if running and self.drained_at < heard_at + self._settings.worker_timeout_us:
            self._timers.set(_WORKER + worker_id, now + RECHECK_US)  # its heartbeat may be among the unread reports
            return
        seconds = (now - heard_at) / 1e6
        for task_id in sorted(running):
            self._lose(task_id, f"its worker was silent for {seconds:.1f} s", effects, now, is_crash=True)
        self._running.pop(worker_id, None)
        self._worker_heard.pop(worker_id, None)

    def excuse_silence(self, now: int) -> None:
        """Nobody could be heard for a while, since this process stood still: every silence begins anew."""
        self._heard = dict.fromkeys(self._heard, now)
        for worker_id in self._worker_heard:
            self._expect(worker_id, now)

    def next_at(self) -> int | None:
        """When the shard must be called again even without an input."""
        forget_at = self._forget[0][0] if self._forget else None
        parts = (self._timers, self._dispatch, self._limits, self.state.schedules, self._workflows)
        instants = [forget_at, self._open_at(), *(part.next_at() for part in parts)]
        return min((at for at in instants if at is not None), default=None)

    # --- limits --------------------------------------------------------------------------------------------------

    def _handle_shard_message(self, message: ShardMessage, now: int) -> Effects:
        """What another shard tells of limits. It may be lost, and is no input of the log: no event names it."""
        effects = Effects.none()
        heard = self._limits.hear(message, self.state.epoch)
        for task_id in heard.free:
            self._dispatch.admit(self.state.tasks[task_id])
        for key, attempt in heard.cancelled:
            self._make_room(key, attempt, effects, now)
        return effects

    def _make_room(self, key: str, attempt: str, effects: Effects, now: int) -> None:
        """Cancel a task for another one, as the strategy of a limit wants it."""
        task = self.state.tasks.get(attempt.rpartition(":")[0])
        if task is None or task.status not in (Status.PENDING, Status.RUNNING) or attempt_of(task) != attempt:
            return
        if task.cancel_requested_at is None:
            request = CancelTask(request_id="", task_id=task.task_id, reason=f"no room under the limit {key}")
            effects.extend(self.applied(task, decisions.decide_cancel(task, request), None, now))

    def decide_limits(self, now: int) -> Effects:
        """Decide on the keys whose home is here, and tell other shards what there is to tell."""
        effects = Effects.none()
        for key, changed, _ in self._limits.decide(now):
            if changed != LimitChanged():
                effects.events.append(self.event(key, "", 0, changed, now, None))
        self.changed.update(LIMIT + key for key in self._limits.touched())
        effects.messages.extend(self._limits.messages(now, self.state.epoch))
        return effects

    # --- the delay wheel -----------------------------------------------------------------------------------------

    def _offer_to_wheel(self, task: Task) -> None:
        due_at = decisions.wake_at(task, 0)
        if task.status not in PARKED_FROM or due_at is None or self.parking.wheel.place_for(due_at) is None:
            return
        # A change of a parked task is made of what the view shows, which lacks checkpoints; and runs are here because
        # their schedule may have to cancel them.
        # Those that stand for others have to be known when the others come.
        is_run = (schedule_of_run(task.task_id) or "") in self.state.schedules
        is_bound = is_run or task.spec.unique is not None or self._workflows.is_node(task.task_id)
        if task.checkpoint is not None or is_bound:
            self._staying.add(task.task_id)
        else:
            self.parking.offer(task, due_at)

    def _is_behind(self, now: int) -> bool:
        """Whether a slot that is overdue was not read yet."""
        return self.parking.wheel.read_until() <= now

    def is_crowded(self) -> bool:
        """Whether no more tasks are to be read from the wheel now: what is due goes on, and makes room.

        What stays here until a far retry would make none for days: it does not count.
        """
        tasks, settings = self.state.tasks, self._settings
        is_full = len(tasks) >= settings.tasks_max // 2 or tasks.bytes >= settings.tasks_bytes_max // 2
        return is_full or len(tasks) - tasks.packed - len(self._staying) >= settings.near_max

    def _open_at(self) -> int | None:
        return None if self.is_crowded() else self.parking.wheel.next_at()

    def to_park(self, limit: int) -> list[ToPark]:
        """Records to be written to the wheel; `parked` tells that they are there."""
        return self.parking.take(self.state.tasks, limit)

    def parked(self, record: ToPark, now: int) -> None:
        """A record is in its slot, and will be met there: it stands for its task, unless that has changed."""
        task = record.task
        if self.state.tasks.get(task.task_id) is not task:
            return
        trace = self._ended(task, record.due_at)
        if trace.keep_until > now or self._is_behind(now):  # an overdue slot may hold an earlier version of it
            self._end(trace)
            self._will_forget(trace, self._acknowledged_offset)
        else:
            self.unstore(TASK + task.task_id)
        del self.state.tasks[task.task_id]  # last, since other threads read
        self._tally.due.add(task, -1)
        self.statuses[task.status] -= 1
        self._timers.cancel(task.task_id)
        self.parking.unrecorded.discard(task.task_id)
        self.parking.wheel.note_parked(record.place)

    def note_changed(self, key: str) -> None:
        """Let the next checkpoint have the entity of this key as it is then."""
        self.changed.add(key)

    def unstore(self, key: str) -> None:
        """Let the next checkpoint not have it."""
        if self.is_stored(key):
            self.changed.add(key)
        else:
            self.changed.discard(key)

    def is_stored(self, key: str) -> bool:
        """Whether the checkpoints may hold it. Of schedules always: to remember a million keys would cost more."""
        return key in self._stored or key.startswith(SCHEDULE)

    def note_stored(self, key: str, *, is_stored: bool) -> None:
        """A checkpoint has it, or has it no more."""
        if not is_stored:
            self._stored.discard(key)
        elif not key.startswith(SCHEDULE):
            self._stored.add(key)

    def next_to_open(self, now: int) -> Place | None:
        """The window whose slot is to be read now. None: all were, or memory is full."""
        wheel = self.parking.wheel
        if now < wheel.next_at() or self.is_crowded():
            return None
        wheel.close_due(now)
        return wheel.next_to_open()

    def unpark(self, record: ParkedTask, place: Place, source: Source, now: int) -> Effects:
        """Take a task back that was read from its slot, unless the record is void or there twice."""
        task = record.task
        if self.parking.wheel.is_late(record.due_at, place) or self.parking.is_void(task):
            return Effects.none()
        known = self.known(task.task_id)
        if known is not None and known.created_at != task.created_at:
            return self._meet(known, record, source, now)
        is_parked = isinstance(known, EndedTask) and known.due_at is not None and known.version == task.version
        if known is None or is_parked:
            self._take_back(task, now)
        return Effects.none()

    def _take_back(self, task: Task, now: int) -> None:
        self.state.tasks[task.task_id] = task
        self.state.ended.pop(task.task_id, None)
        self.changed.add(TASK + task.task_id)
        self.parking.unrecorded.add(task.task_id)
        self._track(None, task, now)
        self._offer_to_wheel(task)

    def _meet(self, known: Task | EndedTask, record: ParkedTask, source: Source, now: int) -> Effects:
        """Two tasks under one id: the second was taken while the first was parked, and forgotten. The first one wins.

        A second one that waits is cancelled for it. One that has begun is not undone: then the first is given up, and
        its record kept for people to look at.
        """
        read = record.task
        is_first = read.created_at < known.created_at
        if not (is_first and isinstance(known, Task) and known.status in WAITING):
            return self.refuse(source, f"another task with the id {read.task_id} was accepted", now)
        effects = self.applied(known, Decision(TaskCancelled(reason=TAKEN)), None, now)
        base = replace(read, version=known.version + 1)
        body = TaskUpdated(
            spec=read.spec,
            status=read.status,
            next_run_at=read.next_run_at or record.due_at,
            deadline_at=read.deadline_at,
        )
        effects.extend(self.applied(base, Decision(body), None, now))
        return effects

    def expire_markers(self) -> None:
        """Drop the markers that no record in the wheel can meet any more."""
        for task_id in self.parking.expire():
            self.unstore(MARKER + task_id)

    # --- after the acknowledgement -------------------------------------------------------------------------------

    def acknowledged(self, events: Iterable[Event], offset: int, now: int) -> None:
        """The events are in the log, the last one at `offset`: what became pending may be sent out."""
        tasks, ended, self._acknowledged_offset = self.state.tasks, self.state.ended, offset
        for event in events:
            task = tasks.get(event.entity_id)
            if task is not None:
                if task.version != event.version:
                    continue
                self._dispatch.gate.settle(task, now)
                if task.status is Status.PENDING:
                    self._may_go(task, now)
                elif task.status in PARKED_FROM:
                    self._offer_to_wheel(task)
            elif event.version and (known := ended.get(event.entity_id)) and known.version == event.version:
                self._dispatch.gate.settle(known, now)
                self._will_forget(known, offset)
            elif isinstance(event.body, WorkflowEnded):
                for task_id in self._workflows.acknowledged(event.entity_id):
                    if (known := ended.get(task_id)) is not None:
                        self._will_forget(known, offset)

    def _may_go(self, task: Task, now: int) -> None:
        """A task is pending, durably: it waits for its turn, packed if there are many."""
        self._dispatch.offer(task, now)
        if self.statuses[Status.PENDING] > self._settings.unpacked_max:
            self.state.tasks.pack(task.task_id)

    def dispatch(self, now: int, partitions_of: PartitionsOf) -> list[tuple[int, ReadyTask]]:
        """Records to be sent, each with its ready partition."""
        tasks = self.state.tasks
        self._dispatch.follow_policies(tasks, now)
        picked = self._dispatch.pick(now, partitions_of, tasks.size)
        return [(out.partition, self._ready(tasks.unpack(out.task_id), out.is_again)) for out in picked]

    def not_sent(self, task_ids: Sequence[str], now: int) -> None:
        """Ready records of these tasks, in the order of `dispatch`, may not have been taken: they go out anew."""
        for task_id in reversed(task_ids):
            task = self.state.tasks.get(task_id)
            if task is not None and task.status is Status.PENDING:
                self._suspects.add(task_id)  # a worker may have it after all
                self._dispatch.not_sent(task, now)

    def _ready(self, task: Task, is_again: bool) -> ReadyTask:
        spec = task.spec
        return ReadyTask(
            task_id=task.task_id,
            task_version=task.version,
            attempt=task.attempt + 1,
            shard=self.shard,
            task_type=spec.task_type,
            queue=spec.queue,
            priority=spec.priority,
            tenant_id=spec.tenant_id,
            payload=spec.payload,
            content_type=spec.content_type,
            metadata=spec.metadata,
            scheduled_at=spec.scheduled_at or task.created_at,
            created_at=task.created_at,
            lease_ms=spec.lease_ms,
            timeout_ms=spec.timeout_ms,
            deadline_at=task.deadline_at,
            failure_count=task.failure_count,
            crash_count=task.crash_count,
            max_attempts=spec.retry.max_attempts,
            checkpoint=task.checkpoint,
            idempotency_key=spec.idempotency_key,
            traceparent=task.traceparent,
            is_suspect=is_again or task.crash_count > 0 or task.task_id in self._suspects,
            epoch=self.state.epoch,
        )

    def depth(self) -> Counter[DepthKey]:
        """How many pending tasks there are. Safe from any thread."""
        return self._dispatch.depth()

    def stats(self, now: int) -> ShardStats:
        """What waits and runs here now."""
        state = self.state
        return self._tally.stats(self.shard, state.epoch, now, self._dispatch, self._limits.limiter, state.tasks)

    def memory(self) -> dict[str, int]:
        """How many entries each structure holds; all are zero when nothing lives and enough time has passed."""
        return {
            "tasks": len(self.state.tasks),
            "ended": len(self.state.ended),
            "timers": len(self._timers),
            "pending": sum(self._dispatch.depth().values()),
            "heard": len(self._heard),
            "suspects": len(self._suspects),
            "admitted": self._admission.pending(),
            "held": self._dispatch.gate.held(),
            "limits": len(self._limits.limiter),
            "staying": len(self._staying),
            "running": self._tally.running(),
            "due": len(self._tally.due),
            "workers": len(self._running) + len(self._worker_heard),
            "to forget": len(self._forget),
            "uniques": len(self.state.uniques),
            "workflows": len(self.state.workflows),
            "markers": len(self.parking.markers),
            "parked": sum(count for _, _, count in self.parking.wheel.waiting()),
        }

    # --- forgetting ----------------------------------------------------------------------------------------------

    def _will_forget(self, ended: EndedTask, offset: int) -> None:
        if ended.keep_until != FOREVER:
            heapq.heappush(self._forget, (ended.keep_until, ended.task_id, offset))

    def forget_ended(self, now: int) -> None:
        """Drop what is remembered of tasks that ended long enough ago, and of which no overdue slot can tell again."""
        self._was_behind = self._is_behind(now)
        if self._was_behind:
            return
        while self._forget and self._forget[0][0] <= now:
            keep_until, task_id, offset = heapq.heappop(self._forget)
            ended = self.state.ended.get(task_id)
            if ended is not None and ended.keep_until == keep_until:
                del self.state.ended[task_id]
                self.state.uniques.forget(task_id)
                self.unstore(TASK + task_id)
                self.forgotten_offset = max(self.forgotten_offset, offset)


def _unknown_before(event: Event, status: Status, keep_until: int) -> EndedTask:
    """A task of which nothing is known here but the event that leaves it ended."""
    return EndedTask(
        task_id=event.entity_id,
        status=status,
        version=event.version,
        attempt=0,
        ended_at=event.at,
        created_at=event.at,
        scheduled_at=event.at,
        keep_until=keep_until,
    )


_WORKER = "worker/"  # a task id has no slash, so that the keys of both kinds of timers never meet
