"""What an `apply` writes. All of it is known before the first statement is sent.

**Timestamps.** A batch says what its tasks are at `next_offset` of their partition, which is the timestamp of all its
cells. Whoever writes the same tasks from other batches (a second projector, a replay) writes the same values at the
same offsets; so the cell of the highest offset is the right one, in whatever order the writes arrive.

**Expiry.** While a task lives its cells have no TTL. When it ends, and at each change after that, all its cells are
written with what is left of the TTL since the end; a redrive writes all of them without. The calendar is shared by many
tasks, so the timestamp of an entry is the instant at which it expires: of two, the one that lasts longer wins.

**Nulls.** A cell becomes null (a tombstone) only if it was not: defaults of a new row, and None over nothing, are left
unset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cassandra.query import UNSET_VALUE

from infra.cassandra.lists import BY_TENANT, DAY_US, DEAD_BY_QUEUE, Entry, Family, Slice, entries_of, slice_of
from infra.cassandra.rows import (
    ATTEMPT_COLUMNS,
    ATTEMPT_DEFAULTS,
    TASK_COLUMNS,
    TASK_DEFAULTS,
    Columns,
    Life,
    begun,
    cell,
    merged,
)
from infra.cassandra.session import Request, Session, Statement, request_of, size_of
from infra.cassandra.settings import TTL_S_MAX
from scheduler.ports import Position, TaskChange

ATTEMPTS_SHOWN_MAX = 100  # newest attempts that a row shows; of a live task up to twice as many are kept
# How long the calendar leads to a task that lives, without a word of it since it was due or changed; after that it is
# found by its id, and in lists again from its next event on. Without a bound lists would walk through ages of nothing.
LISTED_US = 366 * DAY_US
_RENEWED_EVERY_US = 32 * DAY_US  # so that an entry is written once, and not for every task
# Of several partitions. A request costs far more than a row: with batches below the 5 KiB and 10 partitions at which
# Cassandra warns, half as many tasks a second were written. It refuses 50 KiB (batch_size_fail_threshold).
BATCH_KEYS_MAX = 25
BATCH_BYTES_MAX = 24_000
SLICE_ROWS_MAX = 100  # of one partition, which is one mutation however many there are
_UNSET: Any = UNSET_VALUE

_TASK_AT = {name: at for at, name in enumerate(TASK_COLUMNS)}
_ATTEMPT_AT = {name: at for at, name in enumerate(ATTEMPT_COLUMNS)}
_LISTED = ("status", "queue", "task_type", "priority")


class Writing:
    """The prepared statements that write."""

    def __init__(self, session: Session, keyspace: str) -> None:
        def insert(table: str, columns: Sequence[str]) -> Statement:
            marks = ", ".join("?" * len(columns))
            names = ", ".join(columns)
            statement = session.prepare(
                f"INSERT INTO {keyspace}.{table} ({names}) VALUES ({marks}) USING TIMESTAMP ? AND TTL ?"
            )
            statement.is_idempotent = True
            return statement

        def delete(table: str, where: str) -> Statement:
            statement = session.prepare(f"DELETE FROM {keyspace}.{table} USING TIMESTAMP ? WHERE {where}")
            statement.is_idempotent = True
            return statement

        key = ("slice", "created_at", "task_id")
        self.task = insert("tasks", TASK_COLUMNS)
        self.attempt = insert("attempts", ATTEMPT_COLUMNS)
        self.trim = delete("attempts", "task_id = ? AND created_at = ? AND attempt <= ?")
        self.listed = {
            family: insert(family.table, (family.member, *key, *_LISTED)) for family in (BY_TENANT, DEAD_BY_QUEUE)
        }
        self.revive = delete(
            DEAD_BY_QUEUE.table, f"{DEAD_BY_QUEUE.member} = ? AND slice = ? AND created_at = ? AND task_id = ?"
        )
        self.entry = insert("calendar", Entry._fields)
        self.position = insert("positions", ("topic", "partition", *Position._fields))


class _Write(NamedTuple):
    """A statement with its values. It is bound when it is sent: the node has work in the meantime."""

    statement: Statement
    values: tuple[Any, ...]

    def bound(self) -> Statement:
        """What can be sent."""
        return self.statement.bind(self.values)


class _Batch:
    """Rows of several partitions that go out together."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.keys = self.size = 0

    def add(self, statements: Sequence[Statement], size: int) -> None:
        """All of one partition."""
        self.statements += statements
        self.keys += 1
        self.size += size


class Writes:
    """The writes of one batch. Nothing is sent by this class."""

    def __init__(self, to: Writing, timestamp: int, now_us: int, ttl_s: int, lives: Mapping[str, Life]) -> None:
        """`lives` has the tasks of all changes but the new ones, as the rows are before."""
        self.lives: dict[str, Life] = dict(lives)  # as they are afterwards
        self._to, self._timestamp, self._now_us, self._ttl_s = to, timestamp, now_us, ttl_s
        self._rows: list[list[_Write]] = []  # by task: all of one partition key
        self._lists: dict[Slice, list[_Write]] = {}
        self._until: dict[Slice, int] = {}

    def add(self, change: TaskChange) -> None:
        """A change, after those added before. One of a task that never began is left out. TypeError: no such column."""
        task_id = change.task_id
        old = None if change.is_new else self.lives.get(task_id)
        if old is None and not change.is_new:
            return
        life = _after(old, change)
        # At the end all cells get a TTL, at a redrive all lose it; in between only what changed is written.
        is_whole = old is None or life.is_ended or old.is_ended
        ttl_s = self._left_s(life) if life.is_ended else 0
        before = old or Life(life.created_at, {}, {})
        self._rows.append(
            [
                self._task(task_id, before, life, life.columns if is_whole else change.columns, ttl_s),
                *self._attempts(task_id, before, life, change, is_whole, ttl_s),
            ]
        )
        if is_whole or life.spec is not before.spec:
            self._enlist(BY_TENANT, life.spec.tenant_id, task_id, life, _LISTED, ttl_s)
        elif life.columns["status"] != before.columns["status"]:
            self._enlist(BY_TENANT, life.spec.tenant_id, task_id, life, ("status",), ttl_s)
        self._bury(task_id, None if old is None else old.dead_in, life, ttl_s)
        self.lives[task_id] = life

    def lists(self, known: Mapping[Slice, int]) -> Iterator[Request]:
        """Batches of list rows, and of the calendar's entries but for those `known` to be there for as long."""
        for writes in self._lists.values():
            for begin in range(0, len(writes), SLICE_ROWS_MAX):
                yield request_of([write.bound() for write in writes[begin : begin + SLICE_ROWS_MAX]])
        entries: dict[Entry, int] = {}
        for of, until in self._until.items():
            if until > known.get(of, 0):
                for entry in entries_of(of):
                    entries[entry] = max(until, entries.get(entry, 0))
        for entry, until in entries.items():
            left_s = (until - self._now_us) // 1_000_000
            if left_s > 0:
                yield request_of([self._to.entry.bind((*entry, until, left_s if left_s <= TTL_S_MAX else 0))])

    def listed(self) -> Mapping[Slice, int]:
        """Until when the calendar leads to what was written, by list and slice."""
        return self._until

    def rows(self, session: Session) -> Iterator[Request]:
        """Batches of tasks and attempts that the same node keeps; a large task alone."""
        return batches_of(([write.bound() for write in writes] for writes in self._rows), session)

    def _task(self, task_id: str, before: Life, life: Life, named: Mapping[str, Any], ttl_s: int) -> _Write:
        values = [task_id, life.created_at, *[_UNSET] * len(TASK_DEFAULTS)]
        _set(values, _TASK_AT, before.columns, life.columns, named, TASK_DEFAULTS)
        return _Write(self._to.task, (*values, self._timestamp, ttl_s))

    def _attempts(
        self, task_id: str, before: Life, life: Life, change: TaskChange, is_whole: bool, ttl_s: int
    ) -> Iterator[_Write]:
        for number in life.attempts if is_whole else change.attempts:
            columns = life.attempts.get(number)
            if columns is None:  # it is too old to be kept
                continue
            values = [task_id, life.created_at, number, *[_UNSET] * len(ATTEMPT_DEFAULTS)]
            named = columns if is_whole else change.attempts[number]
            _set(values, _ATTEMPT_AT, before.attempts.get(number, {}), columns, named, ATTEMPT_DEFAULTS)
            yield _Write(self._to.attempt, (*values, self._timestamp, ttl_s))
        kept_from = _kept_from(change.attempts)
        if kept_from > 1:
            yield _Write(self._to.trim, (self._timestamp, task_id, life.created_at, kept_from - 1))

    def _bury(self, task_id: str, before: str | None, life: Life, ttl_s: int) -> None:
        """Keep the dead letters in step."""
        after = life.dead_in
        if after is not None:
            self._enlist(DEAD_BY_QUEUE, after, task_id, life, _LISTED, ttl_s)
        if before is not None and before != after:
            of = Slice(DEAD_BY_QUEUE, before, slice_of(life.created_at))
            revive = _Write(self._to.revive, (self._timestamp, before, of.at, life.created_at, task_id))
            self._lists.setdefault(of, []).append(revive)

    def _enlist(self, family: Family, member: str, task_id: str, life: Life, named: Sequence[str], ttl_s: int) -> None:
        of = Slice(family, member, slice_of(life.created_at))
        spec, status = life.spec, life.columns["status"]
        shown = (status, spec.queue, spec.task_type, spec.priority) if named is _LISTED else (status, *[_UNSET] * 3)
        values = (member, of.at, life.created_at, task_id, *shown, self._timestamp, ttl_s)
        row = _Write(self._to.listed[family], values)
        self._lists.setdefault(of, []).append(row)
        newest = max(life.columns["updated_at"], life.columns.get("next_run_at", 0))
        until = newest + self._ttl_s * 1_000_000 + LISTED_US
        self._until[of] = max(self._until.get(of, 0), until - until % -_RENEWED_EVERY_US)

    def _left_s(self, life: Life) -> int:
        ended_at: int = life.columns.get("completed_at") or life.columns["updated_at"]
        return max(1, self._ttl_s - max(0, self._now_us - ended_at) // 1_000_000)


def _after(old: Life | None, change: TaskChange) -> Life:
    """The life with a change. Raises TypeError."""
    if old is None:
        life = begun(change.columns)
    else:
        named = {name: value for name, value in change.columns.items() if name != "created_at"}  # its key for life
        life = old._replace(columns=merged(old.columns, named, TASK_DEFAULTS))
    if not change.attempts:
        return life
    attempts = dict(life.attempts)
    for number, columns in change.attempts.items():
        attempts[number] = merged(attempts.get(number, {}), columns, ATTEMPT_DEFAULTS)
    kept_from = _kept_from(change.attempts)
    return life._replace(attempts={number: columns for number, columns in attempts.items() if number >= kept_from})


def _kept_from(changed: Mapping[int, object]) -> int:
    """The first attempt that is kept: one deletion for a hundred attempts."""
    return max((n - ATTEMPTS_SHOWN_MAX + 1 for n in changed if n % ATTEMPTS_SHOWN_MAX == 0), default=1)


def _set(
    values: list[Any],
    places: Mapping[str, int],
    before: Columns,
    after: Columns,
    named: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Fill in the named columns that are not the default, and the default of those that were not before."""
    for name in named:
        if name in after:
            values[places[name]] = cell(name, after[name])
    for name in before.keys() - after.keys():
        values[places[name]] = cell(name, defaults[name])


def batches_of(rows: Iterable[Sequence[Statement]], session: Session) -> Iterator[Request]:
    """Batches of rows that the same node keeps, each row being the bound statements of one partition key."""
    open_batches: dict[object, _Batch] = {}
    is_one_node = session.is_one_node()
    for statements in rows:
        replica = None if is_one_node else session.replica(statements[0].routing_key)
        batch = open_batches.setdefault(replica, _Batch())
        size = sum(map(size_of, statements))
        if batch.keys == BATCH_KEYS_MAX or (batch.keys and batch.size + size > BATCH_BYTES_MAX):
            yield request_of(batch.statements, batch.size)
            batch = open_batches[replica] = _Batch()
        batch.add(statements, size)
    yield from (request_of(batch.statements, batch.size) for batch in open_batches.values())
