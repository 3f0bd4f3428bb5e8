"""What must hold after every step, seen from outside: by folding the raw log as any reader would.

The number before a message is that of the invariant in docs/decisions/0002-the-shard.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from scheduler.core.parking import PARKED_FROM
from scheduler.core.schedule import SCHEDULE_BODIES, evolve_schedule, next_due, schedule_of_run, with_run
from scheduler.core.shard import FORWARDED_BEFORE, ShardSettings
from scheduler.core.task import TERMINAL, WAITING, evolve
from scheduler.core.wheel import Marks
from scheduler.core.workflow import BODIES as WORKFLOW_BODIES
from scheduler.core.workflow import workflow_of
from scheduler.host import CHECKPOINT_KEY, OWNER_KEY, Phase, ShardHost
from scheduler.ports import Entry, Record, TopicPartition
from schemas.codec import Codec
from schemas.errors import DecodeError
from schemas.ids import keyed_task_id, record_task_id, shard_of, unique_root_of
from schemas.messages import (
    AttemptStarted,
    EndedTask,
    Event,
    FireCause,
    ForwardedRequest,
    InvalidRecord,
    LimitPolicy,
    Message,
    Outcome,
    ParkedTask,
    ParkMarker,
    ReadyTask,
    Replies,
    Report,
    Request,
    RequestForwarded,
    Schedule,
    ScheduleCreated,
    ScheduleFired,
    ScheduleSkipped,
    ShardCheckpoint,
    ShardOpened,
    Status,
    SubmitTask,
    Task,
    TaskAttemptFailed,
    TaskCheckpointed,
    TaskRedriven,
    TaskRejected,
    TaskReleased,
    TaskSkipped,
    TaskSnoozed,
    TaskStarted,
    TaskSubmitted,
    TaskSucceeded,
    UniqueScope,
    WorkflowStatus,
)
from schemas.topics import INPUT_TOPICS, TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS, TASK_REQUESTS_INVALID, delay_topic
from schemas.wheel import WheelShape
from tests.simulation.workflows import Flows
from tests.simulation.world import SimStates, World

Place = tuple[str, int, int]  # topic, partition, offset
Deleted = dict[str, tuple[int, int]]  # epoch and version of the last deletion under an id

S = 1_000_000
CLOCK_ERROR_US = 2 * S  # how wrong a simulated clock may be
WHEEL = WheelShape(widths_us=(2 * S, 8 * S, 32 * S), leads_us=(4 * S, 4 * S, 4 * S), slots=4)
AT_ONCE = LimitPolicy(name="accounts", set_at=0, key="{metadata.account}", count=1)
PACE = LimitPolicy(name="pace", set_at=0, where={"queue": "bulk"}, count=1, period_ms=2_000, burst=2)
LIMITS = (AT_ONCE, PACE)
SETTINGS = ShardSettings(ended_kept_us=20 * S, idempotency_window_us=120 * S, wheel=WHEEL, unpacked_max=2)


class Violated(AssertionError):
    """An invariant does not hold."""


class Facts:
    """The valid history, kept up to date as events land, and what it says of every task."""

    def __init__(self, world: World, codec: Codec) -> None:
        self._world, self._codec = world, codec
        self.codec = codec
        self._read: dict[int, int] = defaultdict(int)
        self._parked: dict[TopicPartition, list[ParkedTask | None]] = defaultdict(list)
        self.epochs: dict[int, int] = defaultdict(int)
        self.tasks: dict[str, Task] = {}
        self.schedules: dict[str, Schedule] = {}
        self.flows = Flows()
        self.deleted_as: Deleted = {}
        self.fired: dict[str, int] = {}  # the runs that were decided, by when their schedule was made
        self.made: set[str] = set()  # all schedules
        self.deleted: set[int] = set()  # when schedules were made that are no more
        self.history: dict[str, list[tuple[int, Task]]] = defaultdict(list)
        self.pending_versions: set[tuple[str, int]] = set()
        self.decided: Counter[tuple[str, int, int]] = Counter()
        self.starts: Counter[tuple[str, int]] = Counter()
        self.rejections: set[bytes] = set()
        self.outcomes: Counter[Status] = Counter()
        self.owing: dict[int, dict[int, Place]] = defaultdict(dict)  # by events partition and offset: what is to land
        self.owed: set[Place] = set()
        self.forwarded: set[Place] = set()
        self.arrived: Counter[Place] = Counter()  # what was forwarded, by how often it was decided where it belongs
        self.landed = Landed(world, codec)
        self.running: dict[str, set[str]] = defaultdict(set)  # by account
        self.rooted: dict[str, list[str]] = defaultdict(list)  # tasks by the root of their unique key
        self.paced: list[int] = []  # when attempts began under PACE
        self.events = 0
        world.on_append.append(self.check_effect)

    def read(self) -> None:
        """Take in what landed since the last call."""
        for shard in range(self._world.shards):
            records = self._world.partitions[TopicPartition(TASK_EVENTS, shard)]
            for record in records[self._read[shard] :]:
                event = self._codec.decode(record.value or b"")
                assert isinstance(event, Event)
                if isinstance(event.body, ShardOpened):
                    self.epochs[shard] = max(self.epochs[shard], event.epoch)
                elif event.epoch >= self.epochs[shard]:
                    self._take(shard, record.offset, event, record.value or b"")
            self._read[shard] = len(records)

    def _take(self, shard: int, offset: int, event: Event, raw: bytes) -> None:
        is_new = self._fold(offset, event) if event.version else raw not in self.rejections
        if not event.version:
            self.rejections.add(raw)
        if not is_new:
            return
        self.events += 1
        self._note_origin(shard, offset, event)
        if event.source_topic is not None:
            source = event.source_topic, shard, event.source_offset or 0
            self.decided[source] += 1
            if self.decided[source] > 1:
                raise Violated(f"3: input {source} was decided twice, again as {event}")

    def _note_origin(self, shard: int, offset: int, event: Event) -> None:
        body, origin = event.body, event.origin
        place = (event.source_topic or "", shard, event.source_offset or 0)
        if origin is not None:
            place = (TASK_REQUESTS, origin.partition, origin.offset)
            if not (isinstance(body, TaskRejected) and body.detail == FORWARDED_BEFORE):
                self.arrived[place] += 1
                if self.arrived[place] > 1:
                    raise Violated(f"3: what was forwarded from {place} was decided twice, again as {event}")
        if isinstance(body, RequestForwarded):
            self.forwarded.add(place)
        if isinstance(body, RequestForwarded) or (isinstance(body, TaskRejected) and body.record is not None):
            self.owing[shard][offset] = place
            self.owed.add(place)

    def _fold(self, offset: int, event: Event) -> bool:
        """Whether the event is its task's next; checks timing and starts."""
        if type(event.body) in SCHEDULE_BODIES:
            return self._fold_schedule(event)
        if isinstance(event.body, (*WORKFLOW_BODIES, TaskSkipped)):
            return self._fold_workflow(event)
        before, body = self.tasks.get(event.entity_id), event.body
        is_next = event.version == before.version + 1 if before else isinstance(body, TaskSubmitted)
        if not is_next:
            if before and isinstance(body, TaskSubmitted) and event.at != before.created_at:
                raise Violated(f"3: task {event.entity_id} was accepted a second time: {event}")
            return False
        self._check_base(before, event)
        self._check_timing_and_attempt(before, event)
        live = None if before and before.status in TERMINAL and isinstance(body, TaskRedriven) else before
        after = evolve(live, event)  # raises if the table does not allow it (invariant 5)
        self.tasks[event.entity_id] = after
        self._check_run(before, after)
        self._note_limited(before, after, event)
        self._check_unique(before, after)
        fold_run(self.schedules, after)
        self.history[event.entity_id].append((offset, after))
        if after.status is Status.PENDING:
            self.pending_versions.add((event.entity_id, after.version))
        if after.status in TERMINAL:
            self.outcomes[after.status] += 1
        return True

    def _fold_workflow(self, event: Event) -> bool:
        try:
            return self.flows.fold(event, self.tasks)
        except AssertionError as error:
            raise Violated(f"11: {error}: {event}") from error

    def _fold_schedule(self, event: Event) -> bool:
        schedule_id, body = event.entity_id, event.body
        before = self.schedules.get(schedule_id)
        if not is_next_of_schedule(before, self.deleted_as, event):
            return False
        after = evolve_schedule(before, event)
        self.made.add(schedule_id)
        if isinstance(body, ScheduleFired | ScheduleSkipped) and before is not None:
            is_trigger = isinstance(body, ScheduleFired) and body.cause is FireCause.TRIGGER
            if not is_trigger and body.nominal_at <= before.considered_at:
                raise Violated(f"4: {schedule_id}, decided up to {before.considered_at}, decided again: {event}")
            if not is_trigger and event.at < body.nominal_at:
                raise Violated(f"4: {schedule_id} fired early: {event}")
        if isinstance(body, ScheduleFired) and before is not None:
            if body.task_id in self.fired:
                raise Violated(f"4: {body.task_id} was fired twice: {event}")
            self.fired[body.task_id] = before.created_at
        if after is None:
            self.deleted.add(self.schedules.pop(schedule_id).created_at)
            self.deleted_as[schedule_id] = event.epoch, event.version
        else:
            self.schedules[schedule_id] = after
        return True

    def _note_limited(self, before: Task | None, after: Task, event: Event) -> None:
        account = after.spec.metadata.get("account")
        if account is not None and before is not None and before.status is Status.RUNNING:
            self.running[account].discard(after.task_id)
        if account is not None and after.status is Status.RUNNING:
            self.running[account].add(after.task_id)
        if isinstance(event.body, TaskStarted) and after.spec.queue == "bulk":
            self.paced.append(event.body.started_at)

    def _check_unique(self, before: Task | None, after: Task) -> None:
        """Of one key and scope there are never two that would stand for each other."""
        unique = after.spec.unique
        if unique is None or before is not None:
            return
        root = unique_root_of(after.spec.tenant_id, unique.key)
        for task_id in self.rooted[root]:
            other = self.tasks[task_id]
            stands = {
                UniqueScope.LIVE: other.status not in TERMINAL,
                UniqueScope.WAITING: other.status in WAITING,
                UniqueScope.WINDOW: other.created_at + unique.window_ms * 1_000 > after.created_at,
                UniqueScope.DEBOUNCE: other.status is Status.SCHEDULED and not other.attempt,
            }
            if stands[unique.scope] and task_id == self.rooted[root][-1]:
                raise Violated(f"10: {after.task_id} came although {task_id} stands for it, {_brief(other)}")
        self.rooted[root].append(after.task_id)

    def _check_run(self, before: Task | None, after: Task) -> None:
        is_node = workflow_of(after.task_id) in self.flows.specs
        is_run = schedule_of_run(after.task_id) is not None and after.spec.unique is None and not is_node
        if is_run and before is None and after.task_id not in self.fired:
            raise Violated(f"4: {after.task_id} was submitted without a fire")

    def _check_base(self, before: Task | None, event: Event) -> None:
        """What an event says of how the task was before is true, but for the payload."""
        if event.base is None or before is None:
            return
        if without_payload(event.base) != without_payload(before):
            raise Violated(f"2: {event} goes on from another task than {before}")

    def _check_timing_and_attempt(self, before: Task | None, event: Event) -> None:
        body, task_id = event.body, event.entity_id
        if before is None:
            return
        if isinstance(body, TaskReleased) and event.at < (before.next_run_at or 0):
            raise Violated(f"4: {task_id}, due at {before.next_run_at}, was released at {event.at}")
        if isinstance(body, TaskStarted):
            self.starts[task_id, body.attempt] += 1
            if self.starts[task_id, body.attempt] > 1 or body.attempt != before.attempt + 1:
                raise Violated(f"6: attempt {body.attempt} of {task_id} was started after {before.attempt}")
            self._check_started_version(before, event)
        elif isinstance(body, TaskSucceeded | TaskAttemptFailed | TaskSnoozed | TaskCheckpointed):
            ended_by = body.attempt, getattr(body, "worker_id", before.worker_id)
            if ended_by != (before.attempt, before.worker_id):
                raise Violated(f"6: of {task_id} {ended_by} ended, not {before.attempt} on {before.worker_id}")

    def _check_started_version(self, before: Task, event: Event) -> None:
        """What started is what the last update left."""
        partition = TopicPartition(event.source_topic or "", shard_of(event.entity_id, self._world.shards))
        report = self._codec.decode(self._world.partitions[partition][event.source_offset or 0].value or b"")
        if isinstance(report, AttemptStarted) and report.task_version != before.version:
            raise Violated(f"6: {event.entity_id} v{before.version} was started as v{report.task_version}")

    def view(self, task_id: str, lag: int) -> tuple[Task | None, int]:
        """The task as a projector shows it that is `lag` events behind, and the offset that it has applied up to."""
        shard = shard_of(task_id, self._world.shards)
        offset = max(0, self._read[shard] - lag)
        shown = [task for at, task in self.history[task_id] if at < offset]
        return (shown[-1] if shown else None), offset

    def parked_in(self, partition: TopicPartition) -> list[ParkedTask | None]:
        """What has landed in a slot, by offset."""
        known, records = self._parked[partition], self._world.partitions[partition]
        for record in records[len(known) :]:
            message = decoded(self.codec, record.value)
            known.append(message if isinstance(message, ParkedTask) else None)
        return known

    def schedules_of(self, shard: int) -> dict[str, Schedule]:
        """The schedules of a shard."""
        return {i: one for i, one in self.schedules.items() if shard_of(i, self._world.shards) == shard}

    def is_waiting(self, task_id: str, version: int) -> bool:
        """Whether the task still is as a record in the wheel has it: others are known to have ended, or come late."""
        task = self.tasks.get(task_id)
        return task is not None and task.version == version and task.status in PARKED_FROM

    # --- invariant 1: an effect follows a valid, landed event -----------------------------------------------------

    def check_effect(self, who: str, entry: Entry) -> None:
        """Called at every append of anyone, before it travels."""
        if entry.topic in (TASK_EVENTS, TASK_REPORTS) or (entry.topic == TASK_REQUESTS and who == "client"):
            return
        self.read()
        if entry.topic.startswith("delay.") and entry.value is None:
            return
        message: Message = self._codec.decode(entry.value or b"")
        if isinstance(message, ParkedTask) and message.task not in (
            task for _, task in self.history[message.task.task_id]
        ):
            raise Violated(f"1: {who} parked {message.task}, of which no valid event tells")
        if (place := place_of(message)) is not None and place not in self.owed:
            raise Violated(f"1: {who} sent {message}, of which no valid event tells")
        if isinstance(message, ReadyTask):
            if (message.task_id, message.task_version) not in self.pending_versions:
                raise Violated(
                    f"1: {who} sent {message.task_id} v{message.task_version}, which no valid event made pending"
                )
        elif isinstance(message, Replies):
            for reply in message.replies:
                told = (self.tasks, self.flows.known, self.fired, self.made)
                is_told = any(reply.task_id in one for one in told)
                if reply.outcome is Outcome.ACCEPTED and not is_told:
                    raise Violated(f"1: {who} acknowledged {reply.task_id}, of which no valid event tells")


def is_next_of_schedule(before: Schedule | None, deleted_as: Deleted, event: Event) -> bool:
    """Whether an event of a schedule counts."""
    if before is not None:
        return event.version == before.version + 1
    epoch, version = deleted_as.get(event.entity_id, (-1, 0))
    return isinstance(event.body, ScheduleCreated) and (event.epoch > epoch or event.version == version + 1)


def fold_run(schedules: dict[str, Schedule], task: Task) -> None:
    """Let the schedule of a run know of it."""
    schedule = schedules.get(schedule_of_run(task.task_id) or "")
    if schedule is not None:
        is_live = task.status not in TERMINAL
        schedules[schedule.schedule_id] = with_run(schedule, task.task_id, is_live=is_live)


def without_payload(task: Task) -> Task:
    """The task with an empty payload."""
    return replace(task, spec=replace(task.spec, payload=b""))


def place_of(message: Message) -> Place | None:
    """Where the record stood that an owed effect repeats."""
    if isinstance(message, ForwardedRequest):
        return TASK_REQUESTS, message.partition, message.offset
    if isinstance(message, InvalidRecord):
        return message.topic, message.partition, message.offset
    return None


class Landed:
    """The effects that are owed and have landed."""

    def __init__(self, world: World, codec: Codec) -> None:
        self._world, self._codec = world, codec
        self._read: Counter[TopicPartition] = Counter()
        self.invalid: dict[Place, InvalidRecord] = {}
        self.forwarded: dict[Place, ForwardedRequest] = {}

    def read(self) -> set[Place]:
        """Where the records stood that have landed again by now."""
        for shard in range(self._world.shards):
            for topic in (TASK_REQUESTS, TASK_REQUESTS_INVALID):
                partition = TopicPartition(topic, shard)
                for record in self._world.partitions[partition][self._read[partition] :]:
                    self._take(decoded(self._codec, record.value))
                self._read[partition] = len(self._world.partitions[partition])
        return self.invalid.keys() | self.forwarded.keys()

    def _take(self, message: Message | None) -> None:
        if isinstance(message, InvalidRecord):
            self.invalid[message.topic, message.partition, message.offset] = message
        elif isinstance(message, ForwardedRequest):
            self.forwarded[TASK_REQUESTS, message.partition, message.offset] = message


def decoded(codec: Codec, value: bytes | None) -> Message | None:
    """The message, if it is one."""
    try:
        return codec.decode(value)
    except DecodeError:
        return None


def check_hosts(facts: Facts, hosts: list[ShardHost]) -> None:
    """Invariant 2: an owner that has nothing in flight holds just what the log says."""
    for host in hosts:
        is_current = host.phase is Phase.ACTIVE and host.shard.state.epoch == facts.epochs[host.shard_id]
        if not is_current or host.has_unacknowledged():
            continue
        wheel = host.shard.parking.wheel
        tasks = parked(facts, host.shard_id, wheel.marks(), host.shard.parking.markers) | dict(host.shard.state.tasks)
        expected = _live(facts, host.shard_id)
        if tasks != expected:
            raise Violated(f"2: shard {host.shard_id} differs from its log in {_difference(tasks, expected)}")
        for workflow_id, one in host.shard.state.workflows.items():
            known = facts.flows.known.get(workflow_id)
            if one.status is WorkflowStatus.RUNNING and one != known:
                raise Violated(f"2: shard {host.shard_id} has {one}, not {known}")
        schedules = {schedule.schedule_id: schedule for schedule in host.shard.state.schedules}
        if schedules != facts.schedules_of(host.shard_id):
            raise Violated(f"2: shard {host.shard_id} has {schedules}, not {facts.schedules_of(host.shard_id)}")


def parked(facts: Facts, shard: int, marks: Marks, markers: Mapping[str, ParkMarker]) -> dict[str, Task]:
    """What the slots of a shard hold beyond what was read of them, and no marker voids; the last word of each task."""
    tasks: dict[str, Task] = {}
    for level in SETTINGS.wheel.levels:
        for slot in range(SETTINGS.wheel.slots):
            partition = TopicPartition(delay_topic(level), shard * SETTINGS.wheel.slots + slot)
            for message in facts.parked_in(partition)[marks.next_offsets.get(f"{level}/{slot}", 0) :]:
                if message is None:
                    continue
                task, marker = message.task, markers.get(message.task.task_id)
                is_void = marker is not None and task.version < marker.version
                is_late = message.due_at // SETTINGS.wheel.widths_us[level] <= marks.opened[level]
                if (
                    not is_void
                    and not is_late
                    and (task.task_id not in tasks or tasks[task.task_id].version < task.version)
                ):
                    tasks[task.task_id] = task
    return {task_id: task for task_id, task in tasks.items() if facts.is_waiting(task_id, task.version)}


def check_checkpoint(facts: Facts, states: SimStates, codec: Codec, shard: int, world: World) -> None:
    """Invariant 2 again: the checkpoint and the valid events after it give what all events give."""
    stored = {key: codec.decode(value) for key, value in states.states[shard].items() if key != OWNER_KEY}
    checkpoint = stored.pop(CHECKPOINT_KEY, None)
    if not isinstance(checkpoint, ShardCheckpoint):
        return
    landed = facts.landed.read()
    for offset, place in facts.owing[shard].items():
        if offset < checkpoint.next_offset and place not in landed:
            raise Violated(f"1: the checkpoint of shard {shard} is beyond event {offset}; what follows is not there")
    markers = {marker.task_id: marker for marker in stored.values() if isinstance(marker, ParkMarker)}
    marks = Marks(checkpoint.opened, checkpoint.next_offsets, checkpoint.waiting)
    tasks = {task.task_id: task for task in stored.values() if isinstance(task, Task)}
    ended = {task.task_id: task for task in stored.values() if isinstance(task, EndedTask)}
    schedules = {one.schedule_id: one for one in stored.values() if isinstance(one, Schedule)}
    deleted_as: Deleted = {}
    epoch = checkpoint.epoch
    for record in world.partitions[TopicPartition(TASK_EVENTS, shard)][checkpoint.next_offset :]:
        event = codec.decode(record.value or b"")
        assert isinstance(event, Event)
        if isinstance(event.body, ShardOpened):
            epoch = max(epoch, event.epoch)
        elif event.epoch >= epoch and event.version:
            _fold_into(tasks, ended, schedules, deleted_as, event)
    expected = _live(facts, shard)
    tasks = parked(facts, shard, marks, markers) | tasks
    if schedules != facts.schedules_of(shard):
        raise Violated(f"2: the checkpoint of shard {shard} leads to {schedules}, not {facts.schedules_of(shard)}")
    if tasks != expected:
        raise Violated(f"2: the checkpoint of shard {shard} leads to other tasks: {_difference(tasks, expected)}")


def _fold_into(
    tasks: dict[str, Task],
    ended: dict[str, EndedTask],
    schedules: dict[str, Schedule],
    deleted_as: Deleted,
    event: Event,
) -> None:
    if isinstance(event.body, (*WORKFLOW_BODIES, TaskSkipped)):
        return
    if type(event.body) in SCHEDULE_BODIES:
        schedule = schedules.get(event.entity_id)
        if is_next_of_schedule(schedule, deleted_as, event):
            after_event = evolve_schedule(schedule, event)
            if after_event is None:
                del schedules[event.entity_id]
                deleted_as[event.entity_id] = event.epoch, event.version
            else:
                schedules[event.entity_id] = after_event
        return
    known = ended.get(event.entity_id)
    before = tasks.get(event.entity_id) or (event.base if known is None or known.due_at is not None else None)
    if before is not None:
        is_next = event.version == before.version + 1
    elif isinstance(event.body, TaskRedriven):
        is_next = event.version == event.body.task.version + 1
    else:
        is_next = isinstance(event.body, TaskSubmitted) and event.entity_id not in ended
    if is_next:
        after = evolve(before, event)
        fold_run(schedules, after)
        tasks[event.entity_id] = after
        if after.status in TERMINAL:
            del tasks[event.entity_id]
            ended[event.entity_id] = EndedTask(
                task_id=after.task_id, status=after.status, version=after.version, attempt=0, ended_at=0, created_at=0,
                scheduled_at=0, keep_until=0,
            )  # fmt: skip
        else:
            ended.pop(event.entity_id, None)


def _live(facts: Facts, shard: int) -> dict[str, Task]:
    return {
        task_id: task
        for task_id, task in facts.tasks.items()
        if task.status not in TERMINAL and shard_of(task_id, facts._world.shards) == shard
    }


def _difference(ours: dict[str, Task], theirs: dict[str, Task]) -> str:
    ids = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    return "; ".join(f"{i}: {_brief(ours.get(i))}, should be {_brief(theirs.get(i))}" for i in ids[:3])


def _brief(task: Task | None) -> str:
    return f"{task.status} v{task.version}" if task else "absent"


def check_due(facts: Facts, world: World) -> None:
    """In the calm a run that was decided is submitted soon, unless it must wait for another."""
    for schedule in facts.schedules.values():
        run = next_due(schedule)
        if run is not None and run.nominal_at < world.now - 10 * S:
            raise Violated(f"4: {run} is due and was not submitted")


def check_at_once(facts: Facts) -> None:
    """Invariant 9: what is in the logs at any moment has no more attempts running than a limit allows."""
    for account, running in facts.running.items():
        if len(running) > AT_ONCE.count:
            raise Violated(f"9: of account {account} run {sorted(running)}, more than {AT_ONCE.count}")


def check_pace(facts: Facts) -> None:
    """Invariant 9: in no interval more starts than the burst and what came meanwhile; from each start to each other."""
    period_us, burst = (PACE.period_ms or 0) * 1_000, PACE.burst or 0
    highest = -(1 << 62)  # of what the starts before demand of the time of this one
    for number, at in enumerate(sorted(facts.paced)):
        highest = max(highest, at * PACE.count - number * period_us)
        if at * PACE.count - (number + 1 - burst) * period_us < highest:
            raise Violated(f"9: too many starts in the time before {at}, the {number + 1}th start")


def check_end(facts: Facts, world: World, hosts: list[ShardHost]) -> None:
    """After the chaos and a long time: all was decided, all has ended, nothing is left in memory."""
    for shard in range(world.shards):
        for record in world.partitions[TopicPartition(TASK_REQUESTS, shard)]:
            if facts.decided[TASK_REQUESTS, shard, record.offset] != 1:
                raise Violated(f"3: request {record.offset} of shard {shard} was never decided")
    check_inputs(facts, world)
    check_pace(facts)
    forgotten = [i for i, made_at in facts.fired.items() if i not in facts.tasks and made_at not in facts.deleted]
    if forgotten:
        raise Violated(f"4: fired, and never submitted: {forgotten}")
    if problem := facts.flows.problem(facts.tasks):
        raise Violated(f"11: {problem}")
    unfinished = {i: task for i, task in facts.tasks.items() if task.status not in TERMINAL}
    if unfinished:
        raise Violated(f"3: never ended: {[f'{i} {_brief(t)}' for i, t in sorted(unfinished.items())[:5]]}")
    for host in hosts:
        left = host.shard.memory()
        if any(left.values()):
            raise Violated(f"7: shard {host.shard_id} still holds {left}")


def check_inputs(facts: Facts, world: World) -> None:
    """All that was written led to its task, or is among the invalid records as it was."""
    facts.landed.read()
    for place in facts.forwarded:
        if facts.arrived[place] != 1 or place not in facts.landed.forwarded:
            raise Violated(f"3: {place} was forwarded, and decided {facts.arrived[place]} times where it belongs")
    for topic in INPUT_TOPICS:
        for shard in range(world.shards):
            for record in world.partitions[TopicPartition(topic, shard)]:
                _check_input(facts, record)


def _check_input(facts: Facts, record: Record) -> None:
    message = decoded(facts._codec, record.value)
    place = record.topic, record.partition, record.offset
    is_request = record.topic == TASK_REQUESTS
    is_taken = isinstance(message, Request | ForwardedRequest) if is_request else isinstance(message, Report)
    if isinstance(message, SubmitTask) and is_request:
        is_valid = message.spec.task_type != "no name"
        if is_valid and _task_id(message, place) not in facts.tasks and message.spec.unique is None:
            raise Violated(f"3: of the submission at {place} no task came")
        if not is_valid and _task_id(message, place) not in facts.tasks and message.reply_to is None:
            is_taken = False  # else it is a duplicate of an earlier one, which is told before its content is looked at
    if not is_taken:
        found = facts.landed.invalid.get(place)
        if found is None or (found.key, found.value) != (record.key, record.value):
            raise Violated(f"3: what was written at {place} is not as it was among the invalid records: {found}")


def _task_id(request: SubmitTask, place: Place) -> str:
    key = request.spec.idempotency_key
    return request.task_id or (keyed_task_id(request.spec.tenant_id, key) if key else record_task_id(*place))
