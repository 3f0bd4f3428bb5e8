"""What the scheduler and the workers need of the world, shaped by them and not by any driver.

A **Log** is one client's connection to the partitions. `append` and `wake` may be called from any thread; everything
else belongs to the one thread that calls `poll`. Every adapter passes the contract tests in tests/contract.
All calls raise only the classes of `schemas.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from schemas.errors import TidewheelIOError
from schemas.messages import Priority, Status, TaskError


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


# Called once per append, from `poll` of the same connection: the offsets of the entries in their order, or what went
# wrong (then any of the entries may or may not be in the log). An adapter that was not told an offset gives -1.
OnAck = Callable[[Sequence[int] | TidewheelIOError], None]


class Reader(Protocol):
    """Reads given partitions from given offsets, in order, without a group."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read `partition` from `offset` on; an offset that retention already removed means the oldest one kept."""

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` records that are there now; an empty answer is no proof that there is nothing."""

    def close(self) -> None:
        """Stop reading; idempotent."""


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

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Send entries, in order in each partition, after all that this connection appended before. Does not wait.

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

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Records below `before_offset` are not needed any more; a hint, the log may keep them."""

    def close(self) -> None:
        """Leave the groups and release what is held. What was not acknowledged may be lost. Idempotent."""


class StateStore(Protocol):
    """Shard checkpoints: a map of keys to bytes per shard, changed atomically by the one who fenced it last."""

    def fence(self, shard: int) -> int:
        """Become the writer of the shard's state; the token of whoever was it before is void from now on."""

    def load(self, shard: int) -> Iterable[tuple[bytes, bytes]]:
        """All that the last committed change left."""

    def commit(
        self, shard: int, token: int, changes: Mapping[bytes, bytes | None], on_done: Callable[[TidewheelIOError | None], None]
    ) -> None:
        """Apply all changes (None removes) or none, in the background; `on_done` is called once, from any thread.

        Fenced: another one took over, nothing was written.
        """

    def close(self) -> None:
        """Finish what was begun; idempotent."""


class Clock(Protocol):
    """The wall clock."""

    def now_us(self) -> int:
        """Microseconds of Unix time."""


# --- the view ---------------------------------------------------------------------------------------------------------


class AttemptRow(NamedTuple):
    """One attempt of a task, as the view shows it. `outcome`: succeeded, failed, lost, snoozed, cancelled, returned."""

    attempt: int
    worker_id: str | None
    started_at: int | None
    finished_at: int | None
    outcome: str | None
    error: TaskError | None


class TaskFilter(NamedTuple):
    """Which tasks to list; None does not restrict. `created_from` ≤ created_at < `created_to`, in microseconds."""

    tenant_id: str | None = None
    status: Status | None = None
    queue: str | None = None
    task_type: str | None = None
    priority: Priority | None = None
    created_from: int | None = None
    created_to: int | None = None
    is_dead_letter: bool | None = None
