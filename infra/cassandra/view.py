"""Implements `ports.View` on Cassandra.

The projector's writes are blind: what a change needs of a task's earlier rows (its place in the lists, the cells that
get a TTL at its end) is remembered of the tasks that live, up to a bound, and read back for others. Lists give keys,
each of which is looked up among the tasks: the row there has the last word on whether it is on the list.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice

from infra.cassandra.lists import Key, Reading, Slice, Walk, cursor_of, parse_cursor
from infra.cassandra.rows import ATTEMPT_COLUMNS, TASK_COLUMNS, Life, life_of, row_of
from infra.cassandra.schedules import ScheduleTables, ScheduleWrites
from infra.cassandra.schema import check_schema
from infra.cassandra.session import Answer, Request, Session, request_of
from infra.cassandra.settings import CassandraSettings
from infra.cassandra.writes import ATTEMPTS_SHOWN_MAX, SLICE_ROWS_MAX, Writes, Writing, batches_of
from scheduler.ports import Batch, Position, ScheduleFilter, SchedulePage, TaskChange, TaskFilter, TaskPage, TaskRow
from schemas.messages import Schedule
from schemas.topics import TASK_EVENTS

LIVES_MAX = 100_000  # tasks remembered between their events; others are read back, which takes some 0.3 ms each
LIVES_BYTES_MAX = 256 * 1024 * 1024
LISTS_MAX = 100_000  # slices of lists of which it is remembered that the calendar has them
_LOOKED_UP_AT_ONCE = 20  # tasks in one request
_READ_BACK_AT_ONCE = 64  # tasks whose rows are awaited at the same time


def _now_us() -> int:
    return time.time_ns() // 1_000


class CassandraView:
    """Status in Cassandra. Written by one thread of a projector's process at a time, read by many.

    `apply` writes the rows of all tables, and when they are acknowledged the positions: after a crash in between, or
    an error, the same changes are applied again, which changes nothing of what was written. So a reader may see rows
    that are ahead of the position, and never a position that is ahead of the rows. A change of a task whose beginning
    was never applied (the log does not hold it any more) is left out.
    """

    def __init__(self, settings: CassandraSettings, now_us: Callable[[], int] = _now_us) -> None:
        """Connect. Raises Retriable (nobody answers) and Fatal (the schema is missing or of another version)."""
        self._now_us, self._ttl_s = now_us, settings.ttl_s
        self._write_lock = threading.Lock()
        self._applied: dict[int, int] = {}  # next offsets, as this process wrote or found them
        self._lives = _Lives()
        self._listed: OrderedDict[Slice, int] = OrderedDict()
        self._session = Session(settings)
        with ExitStack() as undo:
            undo.callback(self._session.close)
            check_schema(self._session, settings.keyspace)
            self._prepare(settings.keyspace)
            undo.pop_all()

    def _prepare(self, keyspace: str) -> None:
        prepare = self._session.prepare
        tasks, attempts = ", ".join(TASK_COLUMNS), ", ".join(ATTEMPT_COLUMNS)
        self._writing = Writing(self._session, keyspace)
        self._reading = Reading(self._session, keyspace)
        self._schedules = ScheduleTables(self._session, keyspace)
        self._task = prepare(f"SELECT {tasks} FROM {keyspace}.tasks WHERE task_id = ? LIMIT 1")
        self._tasks = prepare(f"SELECT {tasks} FROM {keyspace}.tasks WHERE task_id IN ? PER PARTITION LIMIT 1")
        self._attempts = prepare(
            f"SELECT {attempts} FROM {keyspace}.attempts WHERE task_id = ? LIMIT {2 * ATTEMPTS_SHOWN_MAX}"
        )
        self._positions = prepare(
            f"SELECT partition, next_offset, epoch FROM {keyspace}.positions WHERE topic = '{TASK_EVENTS}'"
        )

    def positions(self) -> Mapping[int, Position]:
        """By events partition, what is to be applied next; the cluster's word, which any projector may write."""
        found = {partition: Position(*rest) for partition, *rest in self._session.read(self._positions, ())}
        for partition, applied in list(self._applied.items()):
            if partition not in found or found[partition].next_offset != applied:  # somebody else went on with it
                self._applied.pop(partition, None)
                self._forget(partition)
        return found

    def apply(self, batches: Sequence[Batch]) -> None:
        """Upsert the rows and move the positions; one that is not ahead is ignored. See the class for failures."""
        with self._write_lock:
            news = [batch for batch in batches if batch.position.next_offset > self._next_offset(batch.partition)]
            with ExitStack() as undo:  # rows may be ahead of what is remembered of them
                for batch in news:
                    undo.callback(self._forget, batch.partition)
                self._apply(news)
                undo.pop_all()

    def _apply(self, news: Sequence[Batch]) -> None:
        written = [(batch, self._writes(batch), self._schedules.writes(batch)) for batch in news]
        # One after the other: who has a row passes over the events before it, so its place in the lists must be there.
        for part in (self._lists, self._rows):
            self._session.write_all(chain.from_iterable(part(writes, schedules) for _, writes, schedules in written))
        self._session.write_all(self._moves(news))
        for batch, writes, schedules in written:
            self._applied[batch.partition] = batch.position.next_offset
            self._lives.remember(batch.partition, writes.lives)
            _remember(self._listed, writes.listed(), LISTS_MAX)
            self._schedules.remember(batch.partition, schedules)

    def _forget(self, partition: int) -> None:
        self._lives.forget(partition)
        self._schedules.forget(partition)

    def _writes(self, batch: Batch) -> Writes:
        lives = self._before(batch.partition, batch.changes)
        writes = Writes(self._writing, batch.position.next_offset, self._now_us(), self._ttl_s, lives)
        for change in batch.changes:
            writes.add(change)
        return writes

    def _lists(self, writes: Writes, schedules: ScheduleWrites) -> Iterator[Request]:
        return chain(writes.lists(self._listed), schedules.lists())

    def _rows(self, writes: Writes, schedules: ScheduleWrites) -> Iterator[Request]:
        return chain(writes.rows(self._session), batches_of(schedules.rows(), self._session))

    def _moves(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """All positions are rows of one partition."""
        moves = [
            self._writing.position.bind((TASK_EVENTS, batch.partition, *batch.position, batch.position.next_offset, 0))
            for batch in batches
        ]
        for part in range(0, len(moves), SLICE_ROWS_MAX):
            yield request_of(moves[part : part + SLICE_ROWS_MAX])

    def task(self, task_id: str) -> TaskRow | None:
        """The row with its newest attempts in order, or None if its beginning was not applied yet, or it expired."""
        return self.rows((task_id,)).get(task_id)

    def rows(self, task_ids: Iterable[str]) -> dict[str, TaskRow]:
        """The rows of several tasks by their ids, as `task` gives them; read at the same time."""
        return {task_id: row_of(task_id, _newest(life)) for task_id, life in self._read(task_ids).items()}

    def tasks(self, wanted: TaskFilter, limit: int, cursor: str | None = None) -> TaskPage:
        """A page of rows, by created_at descending then task_id. ValueError: the cursor is not one of ours.

        A page with fewer rows than `limit`, even with none, may have a cursor: so much was looked at in vain.
        """
        walk = Walk(self._reading, wanted, limit, None if cursor is None else parse_cursor(cursor))
        found = list(islice(self._matching(walk, wanted, limit + 1), limit + 1))
        rows = found[:limit]
        if len(found) > limit:
            return TaskPage(rows, cursor_of(Key(-rows[-1].created_at, rows[-1].task_id)))
        return TaskPage(rows, None if walk.edge is None else cursor_of(walk.edge))

    def count(self, wanted: TaskFilter) -> int:
        """How many rows match. Reads all of them, some 5,000 a second: for tests and operators, not for a page."""
        number, after, is_over = 0, None, False
        while not is_over:
            walk = Walk(self._reading, wanted, _COUNTED_AT_ONCE, after)
            number += sum(1 for _ in self._matching(walk, wanted, _COUNTED_AT_ONCE))
            after, is_over = walk.edge, walk.edge is None
        return number

    def schedule(self, schedule_id: str) -> Schedule | None:
        """A schedule as its events left it, without `due` and `running`; None: there is none, or none yet."""
        return self.schedule_rows((schedule_id,)).get(schedule_id)

    def schedule_rows(self, schedule_ids: Iterable[str]) -> dict[str, Schedule]:
        """Several schedules by their ids, without those that it does not have."""
        return self._schedules.rows(schedule_ids)

    def schedules(self, wanted: ScheduleFilter, limit: int, cursor: str | None = None) -> SchedulePage:
        """A page of schedules, by tenant_id, name, schedule_id ascending. ValueError: the cursor is not ours.

        A page with fewer rows than `limit`, even with none, may have a cursor: so much was looked at in vain.
        """
        return self._schedules.page(wanted, limit, cursor)

    def close(self) -> None:
        """Give back connections and threads; idempotent."""
        self._session.close()

    def _next_offset(self, partition: int) -> int:
        if partition not in self._applied:
            found = self.positions().get(partition)
            self._applied[partition] = found.next_offset if found else 0
        return self._applied[partition]

    def _before(self, partition: int, changes: Sequence[TaskChange]) -> Mapping[str, Life]:
        """The lives of the tasks that change, as the rows have them; of those that begin, none."""
        going_on = {change.task_id for change in changes if not change.is_new}
        known = self._lives.of(partition, going_on)
        return known | self._read(going_on - known.keys())

    def _read(self, task_ids: Iterable[str]) -> dict[str, Life]:
        """What the rows of tasks hold now."""
        lives: dict[str, Life] = {}
        rest = iter(task_ids)
        while part := list(islice(rest, _READ_BACK_AT_ONCE)):
            asked = [(one, self._ask(self._task, one), self._ask(self._attempts, one)) for one in part]
            for task_id, tasks, attempts in asked:
                for task in tasks:
                    life = life_of(task, list(attempts))
                    if life is not None:
                        lives[task_id] = life
        return lives

    def _ask(self, statement: object, task_id: str) -> Answer:
        return self._session.read(statement, (task_id,))

    def _matching(self, keys: Iterable[Key], wanted: TaskFilter, at_once: int) -> Iterator[TaskRow]:
        """The rows of those keys whose task still is what the list says, and what is wanted."""
        rest = iter(keys)
        while part := list(islice(rest, at_once)):
            rows = self._look_up([key.task_id for key in part])
            for key in part:
                row = rows.get(key.task_id)
                if row is not None and row.created_at == key.created_at and _matches(row, wanted):
                    yield row

    def _look_up(self, task_ids: Sequence[str]) -> dict[str, TaskRow]:
        parts = (task_ids[at : at + _LOOKED_UP_AT_ONCE] for at in range(0, len(task_ids), _LOOKED_UP_AT_ONCE))
        rows = {}
        for answer in [self._session.read(self._tasks, (part,)) for part in parts]:
            for task in answer:
                life = life_of(task, ())
                if life is not None:
                    rows[task[0]] = row_of(task[0], life)
        return rows


_COUNTED_AT_ONCE = 500


class _Lives:
    """What is remembered of the tasks of each partition that live; those not heard of for longest go first."""

    def __init__(self) -> None:
        self._lives: OrderedDict[tuple[int, str], Life] = OrderedDict()
        self._bytes = 0

    def of(self, partition: int, task_ids: Iterable[str]) -> dict[str, Life]:
        """Those that are remembered."""
        found = ((task_id, self._lives.get((partition, task_id))) for task_id in task_ids)
        return {task_id: life for task_id, life in found if life is not None}

    def remember(self, partition: int, lives: Mapping[str, Life]) -> None:
        """How tasks are now; the ended are forgotten, their next event is rare."""
        for task_id, life in lives.items():
            self._drop((partition, task_id))
            if not life.is_ended:
                self._lives[partition, task_id] = life
                self._bytes += life.size()
        while len(self._lives) > LIVES_MAX or self._bytes > LIVES_BYTES_MAX:
            self._drop(next(iter(self._lives)))

    def forget(self, partition: int) -> None:
        """All of a partition: somebody else has written it."""
        for key in [key for key in self._lives if key[0] == partition]:
            self._drop(key)

    def _drop(self, key: tuple[int, str]) -> None:
        life = self._lives.pop(key, None)
        if life is not None:
            self._bytes -= life.size()


def _remember(what: OrderedDict[Slice, int], news: Mapping[Slice, int], size_max: int) -> None:
    for key, value in news.items():
        what[key] = max(value, what.pop(key, 0))
    while len(what) > size_max:
        what.popitem(last=False)


def _matches(row: TaskRow, wanted: TaskFilter) -> bool:
    """Whether a row is on a list. Its times need no check: they are in its key."""
    spec = row.spec
    return (
        wanted.status in (None, row.status)
        and wanted.is_dead_letter in (None, row.is_dead_letter)
        and wanted.tenant_id in (None, spec.tenant_id)
        and wanted.queue in (None, spec.queue)
        and wanted.task_type in (None, spec.task_type)
        and wanted.priority in (None, spec.priority)
    )


def _newest(life: Life) -> Life:
    """With the attempts that are shown alone."""
    newest = sorted(life.attempts)[-ATTEMPTS_SHOWN_MAX:]
    return life._replace(attempts={number: life.attempts[number] for number in newest})
