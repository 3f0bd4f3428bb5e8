"""What the scheduler and the workers need of the world, shaped by them and not by any driver.

A **Log** is one client's connection to the partitions. `append` and `wake` may be called from any thread; everything
else belongs to the one thread that calls `poll`. Every adapter passes the contract tests in tests/contract.
All calls raise only the classes of `schemas.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from schemas.errors import TidewheelIOError
from schemas.messages import Message, Priority, Schedule, Status, TaskError, TaskSpec


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class Entry(NamedTuple):
    """A record to be appended."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None


class Record(NamedTuple):
    """A record at its place in the log."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


# Called once per append, from `poll` of the same connection, in the order of the appends to a partition: the offsets of
# the entries in their order, or what went wrong (then any of the entries may or may not be in the log). An adapter that
# was not told an offset gives -1.
OnAck = Callable[[Sequence[int] | TidewheelIOError], None]


class Reader(Protocol):
    """Reads given partitions from given offsets, in order, without a group."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read `partition` from `offset` on; an offset that retention already removed means the oldest one kept."""

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` records that are there now; an empty answer is no proof that there is nothing."""

    def close(self) -> None:
        """Stop reading; idempotent. From then on `take` gives nothing, and `seek` raises Fatal."""


class Member(Protocol):
    """One of a group that shares the partitions of some topics: each partition belongs to one live member."""

    def assigned(self) -> frozenset[TopicPartition]:
        """What belongs to this member now. A partition given to it is silent until `seek` or `resume`."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Begin an assigned partition at `offset` (for owners that keep their positions elsewhere)."""

    def resume(self, partition: TopicPartition) -> None:
        """Begin an assigned partition where the group committed last, or at its oldest record."""

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` records of begun partitions, in order in each partition."""

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Remember the next offset to read, for whoever is assigned the partition later. Never moves backwards."""

    def close(self) -> None:
        """Leave; the partitions go to the other members. Idempotent."""


class Log(Protocol):
    """A connection to the log."""

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""

    def ready_partitions(self, topic: str) -> int:
        """How many partitions of a ready topic can be written now; at once, from the thread that polls.

        0: none. The adapter creates the topic, or tries again by itself what it was refused, and says so.
        """

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Send entries, in order in each partition, after all that this connection appended before. Does not wait.

        Leaves no holes: when an append fails, so does all that was appended until one `poll` has reported it all.
        Only an append of nothing but ready records may fail by itself, since nothing follows from these.
        Raises Retriable if the bounded buffer is full (nothing of the call was taken).
        """

    def poll(self, timeout_s: float) -> None:
        """Give the adapter the thread: flush, call `on_ack`s; then, if nothing is new, wait for news or `timeout_s`.

        News are acknowledgements, records for a reader or member of this connection, changed assignments, `wake`.
        """

    def wake(self) -> None:
        """End a waiting `poll`, or the next one."""

    def reader(self) -> Reader:
        """A reader of explicit partitions."""

    def member(self, group: str, topics: Iterable[str]) -> Member:
        """Join a group. Topics that do not exist yet are created, or waited for, as the adapter documents."""

    def end_offset(self, partition: TopicPartition) -> int:
        """The offset that the next readable record will have, at least."""

    def is_disturbed(self) -> bool:
        """Whether parts of the log cannot be reached just now, so that who is not heard of may not be to blame."""

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Records below `before_offset` are not needed any more; a hint, the log may keep them."""

    def close(self) -> None:
        """Leave the groups and release what is held. What was not acknowledged may be lost. Idempotent."""


class StateStore(Protocol):
    """Shard checkpoints: a map of keys to bytes per shard, changed atomically by the one who fenced it last."""

    def fence(self, shard: int) -> int | None:
        """Become the writer of the shard's state; the token of whoever was it before is void from then on.

        None while that takes its time in the background: to be called again a little later.
        """

    def load(self, shard: int) -> Iterable[tuple[bytes, bytes]] | None:
        """All that the last committed change left, for who has fenced the shard.

        None while that takes its time in the background: to be called again a little later.
        """

    def commit(
        self,
        shard: int,
        token: int,
        changes: Iterable[tuple[bytes, bytes | None]],
        on_done: Callable[[TidewheelIOError | None], None],
    ) -> None:
        """Apply all changes (None removes) or none, in the background; `on_done` is called once, from any thread.

        `changes` is iterated in the background thread too, so that a caller may encode lazily there.
        Fenced: another one took over, nothing was written.
        """

    def close(self) -> None:
        """Finish what was begun; idempotent."""


class MessageCodec(Protocol):
    """Messages to bytes and back."""

    def encode(self, message: Message) -> bytes:
        """The bytes of a message."""

    def decode(self, value: bytes) -> Message:
        """The message; raises DecodeError."""


class Clock(Protocol):
    """The wall clock."""

    def now_us(self) -> int:
        """Microseconds of Unix time."""


# --- the view ---------------------------------------------------------------------------------------------------------


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    RETURNED = "returned"
    SNOOZED = "snoozed"
    CANCELLED = "cancelled"


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a task, as the view shows it; without an outcome it still runs."""

    attempt: int
    worker_id: str | None = None
    started_at: int | None = None
    finished_at: int | None = None
    outcome: AttemptOutcome | None = None
    error: TaskError | None = None


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task as the view shows it: the fold of its events up to `offset` of its partition."""

    task_id: str
    spec: TaskSpec
    status: Status
    version: int
    created_at: int
    updated_at: int
    next_run_at: int | None = None
    deadline_at: int | None = None
    started_at: int | None = None
    completed_at: int | None = None
    attempt: int = 0
    failure_count: int = 0
    crash_count: int = 0
    snooze_count: int = 0
    worker_id: str | None = None
    result: bytes | None = None
    result_content_type: str | None = None
    last_error: TaskError | None = None
    cancel_requested_at: int | None = None
    cancel_reason: str | None = None
    is_dead_letter: bool = False
    fingerprint: str | None = None
    traceparent: str | None = None
    attempts: tuple[AttemptRow, ...] = ()


class TaskChange(msgspec.Struct, kw_only=True):
    """What a run of events did to one row: new values by column name of `TaskRow`; absent columns keep theirs.

    `attempts` holds, by attempt number, new values by column name of `AttemptRow`. With `is_new` the task begins here:
    nothing stays of an earlier one under this id, whose shard had forgotten it; neither columns nor attempts.
    """

    task_id: str
    columns: dict[str, Any]
    attempts: dict[int, dict[str, Any]]
    is_new: bool = False


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to list; None does not restrict. `created_from` ≤ created_at < `created_to`, in microseconds."""

    tenant_id: str | None = None
    status: Status | None = None
    queue: str | None = None
    task_type: str | None = None
    priority: Priority | None = None
    created_from: int | None = None
    created_to: int | None = None
    is_dead_letter: bool | None = None


class TaskPage(NamedTuple):
    """Part of a list, newest first (without attempts), and the cursor of the next part; None at the end."""

    rows: Sequence[TaskRow]
    cursor: str | None


class ScheduleChange(NamedTuple):
    """What a run of events made of a schedule: the row itself, without `due` and `running`; None: it was deleted."""

    schedule_id: str
    schedule: Schedule | None


class ScheduleFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which schedules to list; None does not restrict."""

    tenant_id: str | None = None
    is_paused: bool | None = None
    declared_by: str | None = None


class SchedulePage(NamedTuple):
    """Part of a list of schedules, and the cursor of the next part; None at the end.

    It may have fewer rows than were asked for, and yet a cursor: so much was looked at in vain.
    """

    rows: Sequence[Schedule]
    cursor: str | None


class Position(NamedTuple):
    """How far the view reaches in an events partition, and the highest epoch that was opened before that offset."""

    next_offset: int
    epoch: int


class Batch(NamedTuple):
    """What a run of events of one partition did to rows, and where it ends. A schedule is in it once at most."""

    partition: int
    changes: Sequence[TaskChange]
    position: Position
    schedules: Sequence[ScheduleChange] = ()


class View(Protocol):
    """Status as readers see it. Written by the projector alone; rebuilt from the events that are kept."""

    def positions(self) -> Mapping[int, Position]:
        """By events partition, where to go on; a partition of which nothing was applied is absent."""

    def apply(self, batches: Sequence[Batch]) -> None:
        """Upsert the rows and move the positions; each partition has one batch at most, and is moved whole or not.

        One whose `position.next_offset` is not beyond the present one was applied before: nothing happens to it.
        """

    def task(self, task_id: str) -> TaskRow | None:
        """The row with its newest attempts in order, or None if no event of it was applied yet."""

    def rows(self, task_ids: Iterable[str]) -> Mapping[str, TaskRow]:
        """The rows of several tasks by their ids, as `task` gives them; without those that it does not have."""

    def tasks(self, wanted: TaskFilter, limit: int, cursor: str | None = None) -> TaskPage:
        """A page of rows, by created_at descending then task_id. ValueError: the cursor is not one of ours."""

    def count(self, wanted: TaskFilter) -> int:
        """How many rows match."""

    def schedule(self, schedule_id: str) -> Schedule | None:
        """A schedule as its events left it, without `due` and `running`; None: there is none, or none yet."""

    def schedule_rows(self, schedule_ids: Iterable[str]) -> Mapping[str, Schedule]:
        """Several schedules by their ids, as `schedule` gives them; without those that it does not have."""

    def schedules(self, wanted: ScheduleFilter, limit: int, cursor: str | None = None) -> SchedulePage:
        """A page of schedules, by tenant_id, name, schedule_id ascending. ValueError: the cursor is not ours."""

    def close(self) -> None:
        """Release what is held; idempotent."""
