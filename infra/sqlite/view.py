"""Status in a SQLite file that follows from the events. Thrown away, it is made again from those that are kept.

A row is the message-packed `TaskRow` with its attempts, beside the columns that lists filter by; of a schedule, the
`Schedule`. `apply` reads the
rows that its changes touch with one statement, merges, and writes them with a few of many rows each: among busy threads
the number of statements and rows counts, not their size. Readers have connections of their own and are not stopped by
the writer.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from infra.cursors import cursor_of, key_of, parse_cursor
from infra.sqlite.database import (
    MEMORY,
    Connection,
    Synchronous,
    chunks,
    connect,
    install,
    transaction,
    translated,
    values,
)
from scheduler.ports import (
    AttemptRow,
    Batch,
    Position,
    ScheduleChange,
    ScheduleFilter,
    SchedulePage,
    TaskChange,
    TaskFilter,
    TaskPage,
    TaskRow,
)
from schemas.errors import Fatal, Retriable
from schemas.messages import Schedule, Status

READERS_MAX = 8  # connections for reading at the same time; more threads than that wait for one
WAIT_MAX_S = 10.0  # for a connection, or for the moment in which a rebuilt view takes its place
ATTEMPTS_SHOWN_MAX = 100  # newest attempts that a row keeps; the events have them all

_FORMAT = 2  # 1 had no schedules
# The index has all that lists of schedules filter by: of a million, those that do not match are passed over in it.
_SCHEDULES = """
CREATE TABLE IF NOT EXISTS schedules (
    schedule_id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL, name TEXT NOT NULL, is_paused INTEGER NOT NULL,
    declared_by TEXT, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS schedules_by_name ON schedules (tenant_id, name, schedule_id, is_paused, declared_by);
"""
# Every index is paid for by every task, so there are few. They leave out what most of a table has: tasks that
# succeeded, the default queue and tenant. Of those, as of a task type, the newest are found by time.
_SCHEMA = f"""
{_SCHEDULES}
CREATE TABLE tasks (
    task_id TEXT PRIMARY KEY, created_at INTEGER NOT NULL, tenant_id TEXT NOT NULL, queue TEXT NOT NULL,
    task_type TEXT NOT NULL, priority TEXT NOT NULL, status TEXT NOT NULL, is_dead_letter INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX by_created ON tasks (created_at DESC, task_id);
CREATE INDEX by_status ON tasks (status, created_at DESC, task_id) WHERE status <> 'SUCCEEDED';
CREATE INDEX by_queue ON tasks (queue, created_at DESC, task_id) WHERE queue <> 'default';
CREATE INDEX by_tenant ON tasks (tenant_id, created_at DESC, task_id) WHERE tenant_id <> 'default';
CREATE INDEX by_death ON tasks (created_at DESC, task_id) WHERE is_dead_letter = 1;
CREATE TABLE positions (partition INTEGER PRIMARY KEY, next_offset INTEGER NOT NULL, epoch INTEGER NOT NULL);
"""
_COLUMNS = 9
_INTEGER_MAX = (1 << 63) - 1
_OLD_TASKS = "SELECT task_id, body FROM tasks WHERE task_id IN (SELECT value FROM json_each(?))"
_WRITE_TASKS = """
INSERT INTO tasks VALUES {} ON CONFLICT (task_id) DO UPDATE SET
created_at = excluded.created_at, tenant_id = excluded.tenant_id, queue = excluded.queue,
task_type = excluded.task_type, priority = excluded.priority, status = excluded.status,
is_dead_letter = excluded.is_dead_letter, body = excluded.body
"""
_SCHEDULE_COLUMNS = 6
_WRITE_SCHEDULES = "INSERT OR REPLACE INTO schedules VALUES {}"
_DELETE_SCHEDULES = "DELETE FROM schedules WHERE schedule_id IN (SELECT value FROM json_each(?))"
_READ_SCHEDULES = "SELECT schedule_id, body FROM schedules WHERE schedule_id IN (SELECT value FROM json_each(?))"
_encode = msgspec.msgpack.Encoder().encode
_decode_schedule = msgspec.msgpack.Decoder(Schedule).decode
_decode_task = msgspec.msgpack.Decoder(TaskRow).decode
_json = msgspec.json.Encoder().encode


class SqliteView:
    """Implements `ports.View`. Written by one thread at a time, read by many.

    A change of a task whose beginning was never applied (the log does not hold it any more) is left out.
    """

    def __init__(self, path: str | Path) -> None:
        """Fatal: the file cannot be written, or it is not ours."""
        self._path = path
        self._is_memory = str(path) == MEMORY
        self._write_lock = threading.Lock()
        self._idle: list[Connection] = []
        self._gate = _Gate(1 if self._is_memory else READERS_MAX)  # of memory there is one connection for all
        self._is_closed = False
        self._writer = self._open()

    def positions(self) -> Mapping[int, Position]:
        """By events partition, what is to be applied next; the file's word, which another process may write."""
        with self._reading() as connection:
            rows = connection.execute("SELECT partition, next_offset, epoch FROM positions").fetchall()
        return {partition: Position(next_offset, epoch) for partition, next_offset, epoch in rows}

    def apply(self, batches: Sequence[Batch]) -> None:
        """Upsert the rows and move the positions, all or none; of a position that is not ahead nothing is applied."""
        with self._writing() as connection, transaction(connection):
            applied = dict(connection.execute("SELECT partition, next_offset FROM positions").fetchall())
            news = [batch for batch in batches if batch.position.next_offset > applied.get(batch.partition, 0)]
            rows = _Merge(connection, [change for batch in news for change in batch.changes]).rows
            for part in chunks(rows, _COLUMNS):
                sql = _WRITE_TASKS.format(values(len(part), _COLUMNS))
                connection.execute(sql, [value for row in part for value in row])
            _write_schedules(connection, [change for batch in news for change in batch.schedules])
            for batch in news:
                connection.execute(
                    "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)", (batch.partition, *batch.position)
                )

    def task(self, task_id: str) -> TaskRow | None:
        """The row with its newest attempts in order, or None if its beginning was not applied yet."""
        return self.rows((task_id,)).get(task_id)

    def rows(self, task_ids: Iterable[str]) -> dict[str, TaskRow]:
        """The rows of several tasks by their ids, without those that it does not have."""
        with self._reading() as connection:
            found = connection.execute(_OLD_TASKS, (_text(list(task_ids)),)).fetchall()
        return {task_id: _decode_task(body) for task_id, body in found}

    def tasks(self, wanted: TaskFilter, limit: int, cursor: str | None = None) -> TaskPage:
        """A page of rows, by created_at descending then task_id. ValueError: the cursor is not one of ours."""
        conditions, parameters = _where(wanted)
        if cursor is not None:
            created_at, task_id = _parse_task_cursor(cursor)
            conditions += ["created_at <= ?", "(created_at < ? OR task_id > ?)"]
            parameters += [created_at, created_at, task_id]
        sql = f"SELECT body FROM tasks {_clause(conditions)} ORDER BY created_at DESC, task_id LIMIT ?"
        with self._reading() as connection:
            found = connection.execute(sql, (*parameters, limit + 1)).fetchall()
        rows = [replace(_decode_task(body), attempts=()) for (body,) in found[:limit]]
        return TaskPage(rows, _task_cursor(rows[-1]) if len(found) > limit else None)

    def count(self, wanted: TaskFilter) -> int:
        """How many rows match."""
        conditions, parameters = _where(wanted)
        with self._reading() as connection:
            (found,) = connection.execute(f"SELECT count(*) FROM tasks {_clause(conditions)}", parameters).fetchone()
        return int(found)

    def schedule(self, schedule_id: str) -> Schedule | None:
        """A schedule as its events left it, without `due` and `running`; None: there is none, or none yet."""
        return self.schedule_rows((schedule_id,)).get(schedule_id)

    def schedule_rows(self, schedule_ids: Iterable[str]) -> dict[str, Schedule]:
        """Several schedules by their ids, without those that it does not have."""
        with self._reading() as connection:
            found = connection.execute(_READ_SCHEDULES, (_text(list(schedule_ids)),)).fetchall()
        return {schedule_id: _decode_schedule(body) for schedule_id, body in found}

    def schedules(self, wanted: ScheduleFilter, limit: int, cursor: str | None = None) -> SchedulePage:
        """A page of schedules, by tenant_id, name, schedule_id ascending. ValueError: the cursor is not ours."""
        conditions, parameters = _where_schedules(wanted)
        if cursor is not None:
            conditions.append("(tenant_id, name, schedule_id) > (?, ?, ?)")
            parameters += parse_cursor(cursor)
        order = "ORDER BY tenant_id, name, schedule_id LIMIT ?"
        sql = f"SELECT body FROM schedules {_clause(conditions)} {order}"
        with self._reading() as connection:
            found = connection.execute(sql, (*parameters, limit + 1)).fetchall()
        rows = [_decode_schedule(body) for (body,) in found[:limit]]
        return SchedulePage(rows, cursor_of(key_of(rows[-1])) if len(found) > limit else None)

    def fresh(self) -> SqliteView:
        """An empty view beside this one, to be filled and then put in its place with `replace_with`."""
        if self._is_memory:
            return SqliteView(MEMORY)
        path = Path(f"{self._path}.fresh")
        _remove(path)
        return SqliteView(path)

    def replace_with(self, fresh: SqliteView) -> None:
        """Become what `fresh` is, which is closed: at once for all readers, which see the old rows until then."""
        with self._write_lock, self._gate.alone():
            self._writer, fresh._writer = fresh._writer, self._writer
            if not self._is_memory:
                self._close_files()
                fresh._close_files()
                _remove(Path(self._path), but_itself=True)
                os.replace(fresh._path, self._path)
                self._writer = self._open()
        fresh.close()

    def close(self) -> None:
        """Release the file; idempotent."""
        if not self._is_closed:
            with self._write_lock, self._gate.alone():
                self._is_closed = True
                self._close_files()

    def _open(self) -> Connection:
        writer = connect(self._path, Synchronous.NORMAL)
        try:
            _migrate(writer, self._path)
            install(writer, self._path, _SCHEMA, _FORMAT)
        except BaseException:
            writer.close()
            raise
        return writer

    def _close_files(self) -> None:
        for connection in (*self._idle, self._writer):
            connection.close()
        self._idle.clear()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._write_lock, self._gate.alone() if self._is_memory else contextlib.nullcontext():
            self._check_open()
            with translated(self._path):
                yield self._writer

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._gate.shared():
            self._check_open()
            if self._is_memory:
                with translated(self._path):
                    yield self._writer
                return
            connection = self._idle_or_new()
            try:
                with translated(self._path):
                    yield connection
            finally:
                self._idle.append(connection)

    def _idle_or_new(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:  # asking first whether there is one would race with the other readers
            return connect(self._path, Synchronous.NORMAL)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Fatal("the view is closed")


class _Gate:
    """Lets so many readers in at a time, or one alone, who does not wait behind readers that come later."""

    def __init__(self, readers_max: int) -> None:
        self._readers_max = readers_max
        self._changed = threading.Condition()
        self._readers = 0
        self._is_alone = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._is_alone and self._readers < self._readers_max)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._is_alone)
            self._is_alone = True
        try:
            with self._changed:
                self._wait(lambda: self._readers == 0)
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, WAIT_MAX_S):
            raise Retriable(f"the view was busy for {WAIT_MAX_S} s: try later")


def _migrate(connection: Connection, path: str | Path) -> None:
    """Bring a file of an older release up to this one's format; rows stay."""
    with translated(path):
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found == 1:
            connection.executescript(f"BEGIN IMMEDIATE;\n{_SCHEDULES}\nPRAGMA user_version = {_FORMAT};\nCOMMIT;")


def _write_schedules(connection: Connection, changes: Sequence[ScheduleChange]) -> None:
    if not changes:
        return
    rows = [_schedule_columns(change.schedule) for change in changes if change.schedule is not None]
    for part in chunks(rows, _SCHEDULE_COLUMNS):
        sql = _WRITE_SCHEDULES.format(values(len(part), _SCHEDULE_COLUMNS))
        connection.execute(sql, [value for row in part for value in row])
    gone = [change.schedule_id for change in changes if change.schedule is None]
    if gone:
        connection.execute(_DELETE_SCHEDULES, (_text(gone),))


class _Merge:
    """Changes merged with the rows that they touch."""

    def __init__(self, connection: Connection, changes: Sequence[TaskChange]) -> None:
        self._tasks: dict[str, TaskRow] = {}
        self._read(connection, [change for change in changes if not change.is_new])
        touched = dict.fromkeys(change.task_id for change in changes)
        for change in changes:
            self._merge(change)
        self.rows = [_task_columns(self._tasks[task_id]) for task_id in touched if task_id in self._tasks]

    def _read(self, connection: Connection, changes: Sequence[TaskChange]) -> None:
        ids = list({change.task_id for change in changes})
        for task_id, body in connection.execute(_OLD_TASKS, (_text(ids),)) if ids else ():
            self._tasks[task_id] = _decode_task(body)

    def _merge(self, change: TaskChange) -> None:
        old = None if change.is_new else self._tasks.get(change.task_id)
        if old is None and not change.is_new:
            return
        attempts = _attempts(old.attempts if old else (), change.attempts)
        if old is None:
            row = TaskRow(task_id=change.task_id, **change.columns, attempts=attempts)
        else:
            row = replace(old, **change.columns, attempts=attempts)
        self._tasks[change.task_id] = row


def _attempts(old: tuple[AttemptRow, ...], changes: Mapping[int, Mapping[str, Any]]) -> tuple[AttemptRow, ...]:
    if not changes:
        return old
    attempts = {attempt.attempt: attempt for attempt in old}
    for number, columns in changes.items():
        known = attempts.get(number)
        attempts[number] = replace(known, **columns) if known else AttemptRow(attempt=number, **columns)
    return tuple(attempts[number] for number in sorted(attempts)[-ATTEMPTS_SHOWN_MAX:])


def _text(value: Any) -> str:
    return _json(value).decode()


def _task_columns(row: TaskRow) -> tuple[Any, ...]:
    spec = row.spec
    return (
        row.task_id,
        row.created_at,
        spec.tenant_id,
        spec.queue,
        spec.task_type,
        spec.priority.value,
        row.status.value,
        row.is_dead_letter,
        _encode(row),
    )


def _schedule_columns(row: Schedule) -> tuple[Any, ...]:
    spec = row.spec
    return (row.schedule_id, spec.task.tenant_id, spec.name, row.is_paused, spec.declared_by, _encode(row))


_LEFT_OUT = {"status = ?": Status.SUCCEEDED.value, "queue = ?": "default", "tenant_id = ?": "default"}


def _where(wanted: TaskFilter) -> tuple[list[str], list[Any]]:
    conditions: list[str] = []
    parameters: list[Any] = []
    for condition, value in (
        ("tenant_id = ?", wanted.tenant_id),
        ("status = ?", wanted.status),
        ("queue = ?", wanted.queue),
        ("task_type = ?", wanted.task_type),
        ("priority = ?", wanted.priority),
        ("created_at >= ?", wanted.created_from),
        ("created_at < ?", wanted.created_to),
    ):
        if value is not None:
            conditions.append(condition)
            usual = _LEFT_OUT.get(condition)
            if usual is not None and value != usual:
                conditions.append(condition.replace("= ?", f"<> '{usual}'"))  # what a partial index needs to see
            parameters.append(str(value) if isinstance(value, str) else max(-_INTEGER_MAX, min(value, _INTEGER_MAX)))
    if wanted.is_dead_letter is not None:
        conditions.append(f"is_dead_letter = {wanted.is_dead_letter:d}")  # spelt out: a partial index needs to see it
    return conditions, parameters


def _where_schedules(wanted: ScheduleFilter) -> tuple[list[str], list[Any]]:
    given = {"tenant_id": wanted.tenant_id, "is_paused": wanted.is_paused, "declared_by": wanted.declared_by}
    asked = {name: value for name, value in given.items() if value is not None}
    return [f"{name} = ?" for name in asked], list(asked.values())


def _clause(conditions: Sequence[str]) -> str:
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def _task_cursor(last: TaskRow) -> str:
    return base64.urlsafe_b64encode(f"1:{last.created_at}:{last.task_id}".encode()).decode().rstrip("=")


def _parse_task_cursor(cursor: str) -> tuple[int, str]:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        version, created_at, task_id = text.split(":", 2)
        if version != "1" or abs(int(created_at)) > _INTEGER_MAX:
            raise ValueError(text)
        return int(created_at), task_id
    except (ValueError, binascii.Error) as error:
        raise ValueError("cursor: not one that a list of this server gave") from error


def _remove(path: Path, *, but_itself: bool = False) -> None:
    for suffix in ("-wal", "-shm") if but_itself else ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
