"""Lists: tasks by tenant, dead letters by queue, both cut into slices of time, and the calendar that knows the slices.

A list of millions cannot be one partition, and reading all slices there ever might be would be polling an empty table.
So a partition is (member, slice): a tenant, or a queue, and ten seconds of creation times. The calendar says on which
days a member has slices, and which; of all members together it says who has slices in an hour. Reading a list is a walk
over the calendar, newest first, that reads the slices named there and no others.
"""

from __future__ import annotations

import base64
import binascii
import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from infra.cassandra.session import Answer, Session, Statement
from scheduler.ports import TaskFilter

SLICE_US = 10_000_000  # 12,000 tasks a second of one tenant are 120,000 rows of 120 bytes in a partition: 15 MB
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
SLICES_MAX = 2_000  # looked at for one page; what is not found in so many is asked for with the page's cursor
AHEAD_MAX = 32  # slices read at the same time when one after the other had too little
_INTEGER_MAX = (1 << 63) - 1
_AFTER_ALL_IDS = "~"  # ids are of A-Z a-z 0-9 _ . : -


class Family(NamedTuple):
    """One kind of list: its table, the column that says whose it is, and its name in the calendar."""

    table: str
    member: str
    name: str


BY_TENANT = Family("tasks_by_tenant", "tenant_id", "tenant")
DEAD_BY_QUEUE = Family("dead_letters_by_queue", "dead_in", "dead")


class Entry(NamedTuple):
    """A row of the calendar: within `scope` there is something at `at`, of `member` if the scope is of several."""

    scope: str
    at: int
    member: str


class Key(NamedTuple):
    """A row of a list. The order of lists: the newest first, then by id."""

    newness: int
    task_id: str

    @property
    def created_at(self) -> int:
        """When the task was created."""
        return -self.newness


class Slice(NamedTuple):
    """A partition of a list: what of a member was created in the ten seconds from `at` on."""

    family: Family
    member: str
    at: int


def slice_of(created_at: int) -> int:
    """The beginning of the slice that an instant lies in."""
    return created_at - created_at % SLICE_US


def entries_of(of: Slice) -> tuple[Entry, ...]:
    """What the calendar must have for the slice to be found."""
    family, member, at = of
    hour, day = at - at % HOUR_US, at - at % DAY_US
    return (
        Entry(f"{family.name}/slices/{day}/{member}", at, ""),
        Entry(f"{family.name}/days/{member}", day, ""),
        Entry(f"{family.name}/hours/{day}", hour, member),
        Entry(f"{family.name}/days", day, ""),
    )


class Reading:
    """The prepared statements of lists. They are few: a filter is there or not."""

    def __init__(self, session: Session, keyspace: str) -> None:
        self.session = session
        self._keyspace = keyspace
        self._prepared: dict[str, Statement] = {}
        self._calendar = session.prepare(
            f"SELECT at, member FROM {keyspace}.calendar WHERE scope = ? AND at >= ? AND at <= ?"
        )

    def calendar(self, scope: str, low: int, high: int) -> Answer:
        """Entries of a scope, the latest first."""
        return self.session.read(self._calendar, (scope, low, high))

    def rows(self, family: Family, where: str, values: Sequence[object], rows_max: int) -> Answer:
        """Keys of one slice."""
        cql = f"SELECT created_at, task_id FROM {self._keyspace}.{family.table} WHERE {where}"
        statement = self._prepared.get(cql)
        if statement is None:
            statement = self._prepared[cql] = self.session.prepare(cql)
        return self.session.read(statement, values, rows_max)


class Walk:
    """The keys of a list, newest first, behind a cursor. It ends after SLICES_MAX slices: then `edge` is set."""

    def __init__(self, reading: Reading, wanted: TaskFilter, limit: int, after: Key | None) -> None:
        self.edge: Key | None = None  # all before it was given
        self._reading, self._limit, self._after = reading, limit, after
        self._is_dead = wanted.is_dead_letter is True
        self._family = DEAD_BY_QUEUE if self._is_dead else BY_TENANT
        self._member = wanted.queue if self._is_dead else wanted.tenant_id
        self._low = -_INTEGER_MAX if wanted.created_from is None else max(-_INTEGER_MAX, wanted.created_from)
        high = _INTEGER_MAX if wanted.created_to is None else min(wanted.created_to - 1, _INTEGER_MAX)
        self._high = high if after is None else min(high, after.created_at)
        self._conditions, self._values = self._filters(wanted)

    def __iter__(self) -> Iterator[Key]:
        if self._low > self._high:
            return
        ahead, looked_at = 1, 0
        slices = self._slices()
        while group := list(islice(slices, ahead)):
            asked = [(at, [self._ask(member, at) for member in members]) for at, members in group]
            for at, answers in asked:
                yield from heapq.merge(*answers)
                looked_at += len(answers)
                if looked_at >= SLICES_MAX:
                    self.edge = Key(-at, _AFTER_ALL_IDS)
                    return
            ahead = min(ahead * 2, AHEAD_MAX)

    def _filters(self, wanted: TaskFilter) -> tuple[str, list[object]]:
        conditions = ""
        values: list[object] = []
        for name, value in (
            ("status", wanted.status),
            ("queue", None if self._is_dead else wanted.queue),
            ("task_type", wanted.task_type),
            ("priority", wanted.priority),
        ):
            if value is not None:
                conditions += f" AND {name} = ?"
                values.append(str(value))
        return (conditions + " ALLOW FILTERING" if conditions else ""), values  # within one partition, never beyond

    def _ask(self, member: str, at: int) -> Iterator[Key]:
        """The keys of one slice; the requests are sent at once, their answers awaited by whoever iterates."""
        low, high = max(self._low, at), min(self._high, at + SLICE_US - 1)
        after = self._after
        if after is None or after.created_at != high:
            return _keys(self._rows(member, at, "created_at >= ? AND created_at <= ?", low, high))
        rest = self._rows(member, at, "created_at = ? AND task_id > ?", high, after.task_id)
        return _keys(chain(rest, self._rows(member, at, "created_at >= ? AND created_at < ?", low, high)))

    def _rows(self, member: str, at: int, where: str, *bounds: object) -> Answer:
        where = f"{self._family.member} = ? AND slice = ? AND {where}{self._conditions}"
        return self._reading.rows(self._family, where, (member, at, *bounds, *self._values), self._limit + 1)

    def _slices(self) -> Iterator[tuple[int, Sequence[str]]]:
        """The slices that the calendar has, newest first, each with the members that have it."""
        name, member = self._family.name, self._member
        days = f"{name}/days" if member is None else f"{name}/days/{member}"
        for day, _ in self._calendar(days, DAY_US):
            if member is None:
                for hour, members in _by_instant(self._calendar(f"{name}/hours/{day}", HOUR_US)):
                    yield from self._slices_of(day, hour, members)
            else:
                for at, _ in self._calendar(f"{name}/slices/{day}/{member}", SLICE_US):
                    yield at, (member,)

    def _slices_of(self, day: int, hour: int, members: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
        having: dict[int, list[str]] = {}
        for part in (members[begin : begin + AHEAD_MAX] for begin in range(0, len(members), AHEAD_MAX)):
            asked = [
                (one, self._calendar(f"{self._family.name}/slices/{day}/{one}", SLICE_US, hour, hour + HOUR_US - 1))
                for one in part
            ]
            for one, answer in asked:
                for at, _ in answer:
                    having.setdefault(at, []).append(one)
        for at in sorted(having, reverse=True):
            yield at, having[at]

    def _calendar(self, scope: str, step: int, low: int = -_INTEGER_MAX, high: int = _INTEGER_MAX) -> Answer:
        """Entries that may hold what is wanted: each stands for `step` microseconds from its instant on."""
        return self._reading.calendar(scope, max(self._low - step + 1, low, -_INTEGER_MAX), min(self._high, high))


def _keys(rows: Iterable[Sequence[object]]) -> Iterator[Key]:
    return (Key(-created_at, task_id) for created_at, task_id in rows)  # type: ignore[operator, arg-type]


def _by_instant(entries: Answer) -> Iterator[tuple[int, list[str]]]:
    at: int | None = None
    members: list[str] = []
    for instant, member in entries:
        if at is not None and instant != at:
            yield at, members
            members = []
        at = instant
        members.append(member)
    if at is not None:
        yield at, members


# --- cursors ----------------------------------------------------------------------------------------------------------


def cursor_of(key: Key) -> str:
    """The text that stands for a place in a list."""
    return base64.urlsafe_b64encode(f"1:{key.created_at}:{key.task_id}".encode()).decode().rstrip("=")


def parse_cursor(cursor: str) -> Key:
    """The place that `cursor_of` gave. ValueError: it never gave that."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        version, created_at, task_id = text.split(":", 2)
        if version != "1" or abs(int(created_at)) > _INTEGER_MAX:
            raise ValueError(text)
        return Key(-int(created_at), task_id)
    except (ValueError, binascii.Error) as error:
        raise ValueError("cursor: not one that a list of this server gave") from error
