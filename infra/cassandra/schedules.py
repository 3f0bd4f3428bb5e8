"""Schedules: a row by id, and lists by tenant in the order of names.

A tenant may have a million schedules, too many for one partition. So a list is cut into BUCKETS partitions by a hash of
the id, which are read at the same time and merged. A schedule changes with every fire, its place in the list hardly
ever: the writer remembers places, and writes a list only where one changed. Which tenants have lists says the calendar.
"""

from __future__ import annotations

import heapq
import zlib
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from infra.cassandra.session import Answer, Request, Session, Statement, request_of
from infra.cassandra.writes import SLICE_ROWS_MAX
from infra.cursors import ScheduleKey, cursor_of, key_of, parse_cursor
from scheduler.ports import Batch, ScheduleFilter, SchedulePage
from schemas.messages import Schedule

BUCKETS = 16  # never to be changed without a new table; of 1,000,000 schedules each has some 62,500 rows of 100 bytes
PLACES_MAX = 50_000  # schedules whose place is remembered; of others the row is read before it is written
TENANTS_MAX = 100  # looked at for one page; what is not found in so many is asked for with the page's cursor
LOOKED_UP_AT_ONCE = 20  # rows in one request
REQUESTS_MAX = 32  # for rows, under way at the same time
_SCOPE = "schedules/tenants"  # of the calendar

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Schedule).decode


class Place(NamedTuple):
    """What a list knows of a schedule."""

    key: ScheduleKey
    is_paused: bool
    declared_by: str  # empty: nobody, since a null would be a tombstone


def place_of(schedule: Schedule) -> Place:
    """Where a schedule stands, and what lists filter by."""
    return Place(key_of(schedule), schedule.is_paused, schedule.spec.declared_by or "")


def bucket_of(schedule_id: str) -> int:
    """Which part of its tenant's list a schedule is in: the same in every process and release."""
    return zlib.crc32(schedule_id.encode()) % BUCKETS


class _Writing:
    """The prepared statements that write."""

    def __init__(self, session: Session, keyspace: str) -> None:
        def prepare(cql: str) -> Statement:
            statement = session.prepare(cql)
            statement.is_idempotent = True
            return statement

        rows, lists = f"{keyspace}.schedules", f"{keyspace}.schedules_by_tenant"
        columns = "tenant_id, bucket, name, schedule_id, is_paused, declared_by"
        key = "tenant_id = ? AND bucket = ? AND name = ? AND schedule_id = ?"
        self.row = prepare(f"INSERT INTO {rows} (schedule_id, body) VALUES (?, ?) USING TIMESTAMP ?")
        self.delete = prepare(f"DELETE FROM {rows} USING TIMESTAMP ? WHERE schedule_id = ?")
        self.listed = prepare(f"INSERT INTO {lists} ({columns}) VALUES (?, ?, ?, ?, ?, ?) USING TIMESTAMP ?")
        self.strike = prepare(f"DELETE FROM {lists} USING TIMESTAMP ? WHERE {key}")
        self.entry = prepare(
            f"INSERT INTO {keyspace}.calendar (scope, at, member) VALUES ('{_SCOPE}', 0, ?) USING TIMESTAMP 1"
        )


class ScheduleTables:
    """What is read of schedules, and what is remembered between writes. Written by one thread at a time."""

    def __init__(self, session: Session, keyspace: str) -> None:
        self._session, self._keyspace = session, keyspace
        self._places: OrderedDict[tuple[int, str], Place] = OrderedDict()
        self._tenants: OrderedDict[str, None] = OrderedDict()  # of which it is remembered that the calendar has them
        self._prepared: dict[str, Statement] = {}
        self._writing = _Writing(session, keyspace)
        self._rows = session.prepare(f"SELECT body FROM {keyspace}.schedules WHERE schedule_id IN ?")
        self._tenants_from = session.prepare(
            f"SELECT member FROM {keyspace}.calendar WHERE scope = '{_SCOPE}' AND at = 0 AND member >= ?"
        )

    # --- writing ------------------------------------------------------------------------------------------------------

    def writes(self, batch: Batch) -> ScheduleWrites:
        """What is to be written of a batch's schedules."""
        return ScheduleWrites(self._writing, batch, self._before(batch), self._tenants)

    def _before(self, batch: Batch) -> dict[str, Place]:
        ids = [change.schedule_id for change in batch.schedules]
        found = ((one, self._places.get((batch.partition, one))) for one in ids)
        places = {one: place for one, place in found if place is not None}
        return places | {one: place_of(row) for one, row in self.rows(one for one in ids if one not in places).items()}

    def remember(self, partition: int, written: ScheduleWrites) -> None:
        """The places that schedules have now."""
        for schedule_id, place in written.after.items():
            self._places.pop((partition, schedule_id), None)
            if place is not None:
                self._places[partition, schedule_id] = place
                self._tenants[place.key.tenant_id] = None
        for remembered in (self._places, self._tenants):
            while len(remembered) > PLACES_MAX:
                remembered.popitem(last=False)

    def forget(self, partition: int) -> None:
        """All of a partition: somebody else has written it."""
        for key in [key for key in self._places if key[0] == partition]:
            del self._places[key]

    # --- reading ------------------------------------------------------------------------------------------------------

    def rows(self, schedule_ids: Iterable[str]) -> dict[str, Schedule]:
        """Several schedules by their ids, without those that it does not have."""
        ids = list(dict.fromkeys(schedule_ids))
        rows = {}
        for begin in range(0, len(ids), REQUESTS_MAX * LOOKED_UP_AT_ONCE):
            parts = (ids[at : at + LOOKED_UP_AT_ONCE] for at in range(begin, len(ids), LOOKED_UP_AT_ONCE))
            for answer in [self._session.read(self._rows, (part,)) for part in islice(parts, REQUESTS_MAX)]:
                for (body,) in answer:
                    schedule = _unpack(body)
                    rows[schedule.schedule_id] = schedule
        return rows

    def page(self, wanted: ScheduleFilter, limit: int, cursor: str | None) -> SchedulePage:
        """A page of schedules. ValueError: the cursor is not one of ours."""
        after = ScheduleKey("", "", "") if cursor is None else parse_cursor(cursor)
        found: list[Schedule] = []
        for number, tenant_id in enumerate(self._tenants_of(wanted, after)):
            if number >= TENANTS_MAX:
                return SchedulePage(found, cursor_of(ScheduleKey(tenant_id, "", "")))
            since = after if tenant_id == after.tenant_id else ScheduleKey(tenant_id, "", "")
            found += islice(self._matching(wanted, since, limit + 1), limit + 1 - len(found))
            if len(found) > limit:
                return SchedulePage(found[:limit], cursor_of(key_of(found[limit - 1])))
        return SchedulePage(found, None)

    def _tenants_of(self, wanted: ScheduleFilter, after: ScheduleKey) -> Iterator[str]:
        if wanted.tenant_id is None:
            return (member for (member,) in self._session.read(self._tenants_from, (after.tenant_id,)))
        return iter([wanted.tenant_id] if wanted.tenant_id >= after.tenant_id else [])

    def _matching(self, wanted: ScheduleFilter, since: ScheduleKey, at_once: int) -> Iterator[Schedule]:
        """The schedules of a tenant behind a place. The row has the last word on whether it is on the list."""
        keys = heapq.merge(*[self._keys(wanted, since, bucket, at_once) for bucket in range(BUCKETS)])
        while part := list(islice(keys, at_once)):
            rows = self.rows(key.schedule_id for key in part)
            for key in part:
                row = rows.get(key.schedule_id)
                if row is not None and key_of(row) == key and _matches(place_of(row), wanted):
                    yield row

    def _keys(self, wanted: ScheduleFilter, since: ScheduleKey, bucket: int, rows_max: int) -> Iterator[ScheduleKey]:
        """The keys of one bucket; the request is sent at once, its answer awaited by whoever iterates."""
        filters = {"is_paused": wanted.is_paused, "declared_by": wanted.declared_by}
        asked = {name: value for name, value in filters.items() if value is not None}
        where = "".join(f" AND {name} = ?" for name in asked) + (" ALLOW FILTERING" if asked else "")
        cql = (
            f"SELECT name, schedule_id FROM {self._keyspace}.schedules_by_tenant "
            f"WHERE tenant_id = ? AND bucket = ? AND (name, schedule_id) > (?, ?){where}"
        )
        statement = self._prepared.get(cql)
        if statement is None:
            statement = self._prepared[cql] = self._session.prepare(cql)
        values = (since.tenant_id, bucket, since.name, since.schedule_id, *asked.values())
        return _keys_of(since.tenant_id, self._session.read(statement, values, rows_max))


class ScheduleWrites:
    """The writes of the schedules of one batch. Nothing is sent by this class.

    The timestamp of all cells is the offset behind the batch, as of tasks; so is that of a deletion. What an older
    write leaves in a list beside that is harmless: the row has the last word.
    """

    def __init__(self, to: _Writing, batch: Batch, before: Mapping[str, Place], tenants: Container[str]) -> None:
        """`before` has the places as the rows have them, `tenants` those that the calendar is known to have."""
        self._to, self._timestamp = to, batch.position.next_offset
        self._changes, self._before, self._tenants = batch.schedules, before, tenants
        self.after: dict[str, Place | None] = {
            schedule_id: None if schedule is None else place_of(schedule) for schedule_id, schedule in batch.schedules
        }

    def lists(self) -> Iterator[Request]:
        """Batches of list rows, and entries of the calendar."""
        parts: dict[tuple[str, int], list[Statement]] = {}
        tenants: dict[str, None] = {}
        for schedule_id, after in self.after.items():
            before, bucket = self._before.get(schedule_id), bucket_of(schedule_id)
            if before is not None and (after is None or after.key != before.key):
                tenant_id, name, _ = before.key
                strike = self._to.strike.bind((self._timestamp, tenant_id, bucket, name, schedule_id))
                parts.setdefault((tenant_id, bucket), []).append(strike)
            if after is not None and after != before:
                tenant_id, name, _ = after.key
                listed = (tenant_id, bucket, name, schedule_id, after.is_paused, after.declared_by, self._timestamp)
                parts.setdefault((tenant_id, bucket), []).append(self._to.listed.bind(listed))
                tenants[tenant_id] = None
        for statements in parts.values():
            for begin in range(0, len(statements), SLICE_ROWS_MAX):
                yield request_of(statements[begin : begin + SLICE_ROWS_MAX])
        news = (tenant_id for tenant_id in tenants if tenant_id not in self._tenants)
        yield from (request_of([self._to.entry.bind((tenant_id,))]) for tenant_id in news)

    def rows(self) -> Iterator[list[Statement]]:
        """The write of each row."""
        for schedule_id, schedule in self._changes:
            if schedule is None:
                yield [self._to.delete.bind((self._timestamp, schedule_id))]
            else:
                yield [self._to.row.bind((schedule_id, _pack(schedule), self._timestamp))]


def _keys_of(tenant_id: str, rows: Answer) -> Iterator[ScheduleKey]:
    return (ScheduleKey(tenant_id, name, schedule_id) for name, schedule_id in rows)


def _matches(place: Place, wanted: ScheduleFilter) -> bool:
    return wanted.is_paused in (None, place.is_paused) and wanted.declared_by in (None, place.declared_by or None)
