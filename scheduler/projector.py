"""The projector folds the events into the view: what readers see of tasks, their attempts, results, and of schedules.

It never decides and never writes an event. Where an event leads is what `core.task.evolve` says; here is added what
only readers want: results, attempts, the time of the end. The fold of schedules is in `schedule_fold`. Position and
rows are one write, so nothing is applied twice, and a view that was thrown away comes out the same, of all tasks and
schedules whose events the log still holds from the first on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import structlog
from msgspec import UNSET

from scheduler.core.schedule import SCHEDULE_BODIES
from scheduler.core.schedules import DOUBLED_WITHIN
from scheduler.core.task import TERMINAL, TRANSITIONS, IllegalTransition, evolve
from scheduler.core.workflow import BODIES as WORKFLOW_BODIES
from scheduler.ports import (
    AttemptOutcome,
    Batch,
    Log,
    Member,
    Position,
    Reader,
    Record,
    ScheduleChange,
    TaskChange,
    TaskRow,
    TopicPartition,
    View,
)
from scheduler.schedule_fold import Gone, schedule_changes_of
from schemas.codec import Codec
from schemas.errors import DecodeError, Fatal, Retriable, Undecodable, UnknownSchema
from schemas.messages import (
    Event,
    Schedule,
    ShardOpened,
    Status,
    Task,
    TaskAttemptFailed,
    TaskAttemptLost,
    TaskCancelled,
    TaskDiscarded,
    TaskExpired,
    TaskRedriven,
    TaskSkipped,
    TaskSnoozed,
    TaskStarted,
    TaskSubmitted,
    TaskSucceeded,
)
from schemas.topics import TASK_EVENTS

BATCH_MAX = 2_000  # records in one write of the view: more does not make an event cheaper
GROUP = "projectors"
POLL_S = 0.5  # longest wait for events before a stop is noticed
# From the first event until it is applied, at rest and at most: a short task is then one write of the view, not three,
# and the projector does not get in the way of those who are just about to start the task. It grows with the load.
LINGER_S, LINGER_S_MAX = 0.005, 0.05
LINGER_FULL = 60  # events of one step that make it wait the longest
LAG_EVERY_S = 1.0  # how often a projector without news makes sure that there are none
RETRY_S = 0.5  # between tries while the view or the registry does not answer
KNOWN_MAX = 32_768  # tasks remembered; others are looked up in the view when an event of them comes
SCHEDULES_KNOWN_MAX = 10_000  # the same of schedules, each of which takes some kilobytes

_What = TypeVar("_What")  # what is remembered of an entity

_log = structlog.get_logger(__name__)

NOT_SHOWN = (*WORKFLOW_BODIES, TaskSkipped)  # of workflows the view has nothing yet but their tasks


# --- the fold ---------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """What the fold must remember of a task between its events. `running` is the number of the attempt that runs."""

    version: int
    updated_at: int
    running: int | None
    crash_count: int


class Fold(NamedTuple):
    """What events did to rows, and which of them no row can follow, each with the reason."""

    changes: list[TaskChange]
    refused: list[tuple[Event, str]]


def changes_of(events: Iterable[Event], known: dict[str, Known]) -> Fold:
    """One change for each task of which there is news, in the order of their first events. Brings `known` up to date.

    The events are valid ones (see `is_void`) in the order of the log; `known` has their tasks as the view has them.
    An event that its task has had already is dropped: a producer may append one twice.
    """
    changes: dict[str, TaskChange] = {}
    refused: list[tuple[Event, str]] = []
    for event in events:
        task_id = event.entity_id
        before = known.get(task_id)
        if event.version == 0 or not _is_news(event, before):
            continue
        try:
            columns = columns_of(event)
        except (IllegalTransition, KeyError) as error:  # of a newer version, or no writer of ours
            refused.append((event, str(error)))
            continue
        change = changes.get(task_id)
        if change is None or isinstance(event.body, TaskSubmitted):
            is_new = isinstance(event.body, TaskSubmitted)
            change = changes[task_id] = TaskChange(task_id=task_id, columns={}, attempts={}, is_new=is_new)
        change.columns.update(columns)
        for attempt, values in attempts_of(event, before).items():
            change.attempts.setdefault(attempt, {}).update(values)
        known[task_id] = _known_after(event, before, columns)
    return Fold(list(changes.values()), refused)


def is_void(event: Event, epoch: int) -> bool:
    """Whether a stale owner wrote it: `epoch` is the highest that was opened before it in its partition."""
    return event.epoch <= epoch if isinstance(event.body, ShardOpened) else event.epoch < epoch


def _is_news(event: Event, before: Known | None) -> bool:
    if before is None or event.version > before.version:
        return True
    # An id may be used again when its shard has forgotten the first task; the same submission twice has the same time.
    return isinstance(event.body, TaskSubmitted) and event.at > before.updated_at


_SHARED = tuple(name for name in Task.__struct_fields__ if name in TaskRow.__struct_fields__ and name != "task_id")
_shared_values = attrgetter(*_SHARED)


def _blank(status: Status) -> Task:
    """A task of which nothing is known but where it stands: what an event sets in it is what the event changes."""
    unknown: dict[str, Any] = dict.fromkeys(Task.__struct_fields__, UNSET)
    return Task(**(unknown | {"status": status}))


_BLANKS = {
    body: _blank(min(status for status in row.before if status is not None))
    for body, row in TRANSITIONS.items()
    if body is not TaskSubmitted
}


def columns_of(event: Event) -> dict[str, Any]:
    """The columns that an event sets, with their new values. Raises IllegalTransition."""
    body = event.body
    after = evolve(_BLANKS.get(type(body)), event)
    values = zip(_SHARED, _shared_values(after), strict=True)
    columns = {name: value for name, value in values if value is not UNSET}
    if columns.get("worker_id", UNSET) is None:
        del columns["worker_id"]  # readers go on seeing who had it last
    if after.status in TERMINAL and not isinstance(body, TaskDiscarded):
        columns["completed_at"] = getattr(body, "finished_at", event.at)
        columns["next_run_at"] = None
        columns["is_dead_letter"] = after.status is Status.DEAD
    match body:
        case TaskSucceeded():
            columns["result"] = body.result
            columns["result_content_type"] = body.content_type
        case TaskRedriven():
            columns["completed_at"] = None
            columns["is_dead_letter"] = False
        case TaskDiscarded():
            columns["is_dead_letter"] = False
    return columns


def attempts_of(event: Event, before: Known | None) -> dict[int, dict[str, Any]]:
    """The columns of attempts that an event sets, by attempt number."""
    body = event.body
    match body:
        case TaskStarted():
            return {body.attempt: {"worker_id": body.worker_id, "started_at": body.started_at}}
        case TaskSucceeded():
            return {body.attempt: _ended(body.finished_at, AttemptOutcome.SUCCEEDED)}
        case TaskAttemptFailed():
            return {body.attempt: _ended(body.finished_at, AttemptOutcome.FAILED) | {"error": body.error}}
        case TaskSnoozed():
            return {body.attempt: _ended(body.finished_at, AttemptOutcome.SNOOZED)}
        case TaskAttemptLost():
            is_returned = before is not None and body.crash_count == before.crash_count
            outcome = AttemptOutcome.RETURNED if is_returned else AttemptOutcome.LOST
            return {body.attempt: _ended(event.at, outcome) | {"error": body.error}}
    if before is None or before.running is None:
        return {}
    match body:
        case TaskCancelled():
            return {before.running: _ended(event.at, AttemptOutcome.CANCELLED)}
        case TaskExpired():
            return {before.running: _ended(event.at, AttemptOutcome.FAILED) | {"error": body.error}}
    return {}


def _ended(at: int, outcome: AttemptOutcome) -> dict[str, Any]:
    return {"finished_at": at, "outcome": outcome}


def _known_after(event: Event, before: Known | None, columns: dict[str, Any]) -> Known:
    status = columns.get("status")
    running = before.running if before else None
    if isinstance(event.body, TaskStarted):
        running = event.body.attempt
    elif status is not Status.RUNNING:
        running = None
    crash_count = columns.get("crash_count", before.crash_count if before else 0)
    return Known(event.version, event.at, running, crash_count)


def known_of(row: TaskRow) -> Known:
    """What the fold must know of a task that the view has already."""
    running = row.attempt if row.status is Status.RUNNING else None
    return Known(row.version, row.updated_at, running, row.crash_count)


# --- the loop ---------------------------------------------------------------------------------------------------------


class Skipped(NamedTuple):
    """A record, or its event, that changed nothing."""

    where: str
    reason: str
    detail: str


_REASONS: dict[type[DecodeError], str] = {UnknownSchema: "unknown_schema", Undecodable: "undecodable"}


def _linger_s(applied: int) -> float:
    return LINGER_S + (LINGER_S_MAX - LINGER_S) * min(1.0, applied / LINGER_FULL)


class _Valid(NamedTuple):
    """The events that count, the highest epoch opened up to their end, and what is passed over with its reason."""

    tasks: list[tuple[Record, Event]]
    schedules: list[tuple[Record, Event]]
    epoch: int
    skipped: list[Skipped]


class _Write(NamedTuple):
    """What is on its way to the view, and what there is to say when it has arrived."""

    batches: list[Batch]
    skipped: list[tuple[int, Skipped]]  # by partition
    done: Future[None]


class Projector:
    """Keeps a view up to date with the events. Owns its log connection and is the view's only writer.

    While one batch of events is written, the next is folded: two threads share the work. An error of either throws away
    what was not applied; then it is read and folded again, from where the view stands.

    One thread calls `step` or `run`; `applied`, `stalled_s` and `skipped` may be read from any.
    """

    def __init__(
        self,
        log: Log,
        view: View,
        codec: Codec,
        partitions: int | None = None,
        topic: str = TASK_EVENTS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Project so many partitions, from where the view stands; or, with None, those that the group gives us.

        Raises Fatal if the view is ahead of the log.
        """
        self.skipped: Counter[str] = Counter()  # records that changed nothing, by reason
        self._log = log
        self._view = view
        self._codec = codec
        self._topic = topic
        self._folded: dict[int, Position] = {}
        self._applied: dict[int, int] = {}
        self._resumed_at: dict[int, int] = {}
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._schedules: OrderedDict[str, Schedule | Gone] = OrderedDict()
        self._write: _Write | None = None
        self._is_astray = False  # something failed: what was folded is not what is applied
        self._monotonic = monotonic
        self._moved_at = self._lag_at = monotonic()
        self._member = log.member(GROUP, [topic]) if partitions is None else None
        self._source: Reader | Member = self._member or log.reader()
        if partitions is not None:
            self._begin(range(partitions))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="view-writer")

    def applied(self, partition: int) -> int:
        """The offset of the first event of `partition`, which is one of ours, that is not in the view yet."""
        return self._applied[partition]

    def partitions(self) -> int:
        """How many partitions are ours now."""
        return len(self._applied)

    def lag(self) -> int:
        """How many records the log has beyond what was applied; for the thread that calls `step`."""
        return sum(
            max(0, self._log.end_offset(TopicPartition(self._topic, partition)) - applied)
            for partition, applied in self._applied.items()
        )

    def stalled_s(self) -> float:
        """Seconds since events were applied or none were there to be; more than a few mean that it is stuck."""
        return self._monotonic() - self._moved_at

    def run(self, stop: threading.Event, on_applied: Callable[[], None] | None = None) -> None:
        """Step until `stop` is set, which is noticed within POLL_S; what is only in the way for now is tried again.

        `on_applied` is called after each write that moved a position.
        """
        while not stop.is_set():
            try:
                passed, has_moved = self._advance(0)
                if passed < BATCH_MAX:
                    has_moved |= self._settle()
                if has_moved and on_applied is not None:
                    on_applied()
                if passed < BATCH_MAX:
                    self._log.poll(POLL_S)
                    stop.wait(_linger_s(passed))
            except Retriable as error:
                _log.warning("projector_waits", reason=str(error), retry_s=RETRY_S)
                stop.wait(RETRY_S)
                self._stay()

    def step(self, timeout_s: float) -> int:
        """Apply what is there, waiting up to `timeout_s` for the first record; says how many records were passed.

        Raises Retriable (nothing is lost, the next step tries again) and Fatal.
        """
        passed, _ = self._advance(timeout_s)
        self._settle()
        return passed

    def close(self) -> None:
        """Finish what is being written and stop reading; the connection and the view belong to whoever made them."""
        self._writer.shutdown()
        self._source.close()

    def _advance(self, timeout_s: float) -> tuple[int, bool]:
        """Fold what is there and begin to write it: how many records there were, and whether the last write moved."""
        try:
            if self._is_astray:
                self._start_over()
            records = self._take(timeout_s)
            folds = [
                self._fold(partition, list(of_partition))
                for partition, of_partition in groupby(sorted(records, key=_place), key=lambda record: record.partition)
            ]
        except Retriable:
            self._is_astray = True
            raise
        has_moved = self._settle()
        if folds:
            batches = [batch for batch, _ in folds]
            skipped = [(batch.partition, one) for batch, why in folds for one in why]
            self._write = _Write(batches, skipped, self._writer.submit(self._view.apply, batches))
        elif not has_moved:
            self._note_rest()
        return len(records), has_moved

    def _settle(self) -> bool:
        """Wait for the write that is under way, if there is one; whether it moved a position."""
        write, self._write = self._write, None
        if write is None:
            return False
        try:
            write.done.result()
        except Retriable:
            self._is_astray = True
            raise
        for batch in write.batches:
            if batch.partition in self._applied:  # it may have gone to another in the meantime
                self._applied[batch.partition] = batch.position.next_offset
        self._note(write.skipped)
        self._moved_at = self._monotonic()
        return True

    def _note_rest(self) -> None:
        """No news: that is well if there are none to be had, which is a question to the log for each partition."""
        now = self._monotonic()
        if now >= self._lag_at:
            self._lag_at = now + LAG_EVERY_S
            if not self.lag():
                self._moved_at = now

    def _take(self, timeout_s: float) -> Sequence[Record]:
        self._log.poll(0)
        self._follow()
        records = self._source.take(BATCH_MAX)
        if not records and timeout_s > 0:
            self._log.poll(timeout_s)
            self._follow()
            records = self._source.take(BATCH_MAX)
        return records

    def _stay(self) -> None:
        """Remain in the group while the view is away: who does not poll is given up."""
        try:
            self._log.poll(0)
            self._follow()
        except Retriable as error:
            _log.warning("projector_waits", reason=str(error), retry_s=RETRY_S)

    def _follow(self) -> None:
        """Give up what the group gave to others, who may write news of it; begin what it gave us."""
        if self._member is None:
            return
        assigned = frozenset(partition for _, partition in self._member.assigned())
        lost = self._applied.keys() - assigned
        for partition in lost:
            del self._folded[partition], self._applied[partition]
        if lost:
            self._forget()
        came = assigned - self._applied.keys()
        if came:
            self._settle()  # it may be of one that we gave up just now
            self._begin(sorted(came))

    def _start_over(self) -> None:
        """Go on where the view stands, whatever was on its way."""
        self._settle()
        self._forget()
        self._begin(sorted(self._applied))
        self._is_astray = False

    def _forget(self) -> None:
        self._known.clear()
        self._schedules.clear()

    def _begin(self, partitions: Iterable[int]) -> None:
        at = self._view.positions()
        for number in partitions:
            position, partition = at.get(number, Position(next_offset=0, epoch=0)), TopicPartition(self._topic, number)
            end_offset = self._log.end_offset(partition)
            if position.next_offset > end_offset:
                raise Fatal(
                    f"the view has {self._topic}[{number}] up to {position.next_offset}, but the log ends at "
                    f"{end_offset}: it is the view of another log; remove it, and it is made anew"
                )
            self._source.seek(partition, position.next_offset)
            self._folded[number] = position
            self._applied[number] = self._resumed_at[number] = position.next_offset

    def _fold(self, partition: int, records: list[Record]) -> tuple[Batch, list[Skipped]]:
        """What the records do to rows, and which of them do nothing."""
        valid = self._valid(records, self._folded[partition].epoch)
        known = self._known_before(valid.tasks)
        fold = changes_of((event for _, event in valid.tasks), known)
        _remember(self._known, known, KNOWN_MAX)
        schedules, refused = self._fold_schedules(valid.schedules)
        position = self._folded[partition] = Position(records[-1].offset + 1, valid.epoch)
        skipped = valid.skipped + [
            Skipped(f"{event.entity_id} version {event.version}", "illegal", why)
            for event, why in (*fold.refused, *refused)
        ]
        return Batch(partition, fold.changes, position, schedules), skipped

    def _fold_schedules(
        self, events: list[tuple[Record, Event]]
    ) -> tuple[Sequence[ScheduleChange], list[tuple[Event, str]]]:
        if not events:
            return (), []
        known = self._schedules_before(events)
        fold = schedule_changes_of((event for _, event in events), known)
        _remember(self._schedules, known, SCHEDULES_KNOWN_MAX)
        return fold.changes, fold.refused

    def _valid(self, records: list[Record], epoch: int) -> _Valid:
        tasks: list[tuple[Record, Event]] = []
        schedules: list[tuple[Record, Event]] = []
        skipped: list[Skipped] = []
        for record in records:
            try:
                event = self._codec.decode(record.value)
            except DecodeError as error:
                skipped.append(Skipped(f"offset {record.offset}", _REASONS[type(error)], str(error)))
                continue
            if not isinstance(event, Event):
                skipped.append(Skipped(f"offset {record.offset}", "not_an_event", type(event).__name__))
            elif is_void(event, epoch):
                why = f"epoch {event.epoch} after {epoch} was opened"
                skipped.append(Skipped(f"offset {record.offset}", "void", why))
            elif isinstance(event.body, ShardOpened):
                epoch = event.epoch
            elif type(event.body) in SCHEDULE_BODIES:
                schedules.append((record, event))
            elif not isinstance(event.body, NOT_SHOWN):
                tasks.append((record, event))
        return _Valid(tasks, schedules, epoch, skipped)

    def _known_before(self, events: list[tuple[Record, Event]]) -> dict[str, Known]:
        """The tasks of `events` as the view has them; tasks that begin here are absent."""
        known, unknown = self._split(events, self._known)
        if unknown:
            known |= {task_id: known_of(row) for task_id, row in self._view.rows(unknown).items()}
        return known

    def _schedules_before(self, events: list[tuple[Record, Event]]) -> dict[str, Schedule | Gone]:
        """The same of schedules."""
        known, unknown = self._split(events, self._schedules)
        if unknown:
            known |= self._view.schedule_rows(unknown)
        return known

    def _split(
        self, events: list[tuple[Record, Event]], remembered: Mapping[str, _What]
    ) -> tuple[dict[str, _What], list[str]]:
        """What is remembered of the entities of `events`, and which others may be in the view."""
        known: dict[str, _What] = {}
        unknown: list[str] = []
        looked_at: set[str] = set()
        for record, event in events:
            entity_id = event.entity_id
            if event.version == 0 or entity_id in looked_at:
                continue
            looked_at.add(entity_id)
            found = remembered.get(entity_id)
            if found is not None:
                known[entity_id] = found
            elif event.version > 1 or self._may_be_doubled(record):
                unknown.append(entity_id)
        return known, unknown

    def _may_be_doubled(self, record: Record) -> bool:
        """Whether the first of two equal records may lie before the place where this projector began."""
        resumed_at = self._resumed_at[record.partition]
        return resumed_at > 0 and record.offset < resumed_at + DOUBLED_WITHIN

    def _note(self, skipped: list[tuple[int, Skipped]]) -> None:
        """Count what was passed over, and say so once for each reason: a stale owner may have written thousands."""
        first = {(partition, one.reason): one for partition, one in reversed(skipped)}
        counts = Counter((partition, one.reason) for partition, one in skipped)
        for (partition, reason), count in counts.items():
            self.skipped[reason] += count
            one = first[partition, reason]
            _log.warning(
                "events_skipped", reason=reason, count=count, partition=partition, first=one.where, detail=one.detail
            )


def _remember(remembered: OrderedDict[str, _What], known: Mapping[str, _What], size_max: int) -> None:
    for entity_id, now in known.items():
        remembered[entity_id] = now
        remembered.move_to_end(entity_id)
    while len(remembered) > size_max:
        remembered.popitem(last=False)


def _place(record: Record) -> tuple[int, int]:
    return record.partition, record.offset
