"""The slots of one shard's delay wheel, as partitions of a log: records are written to them, and read when opened.

Belongs to one load of a shard: after a reload nothing is heard of what an earlier one had begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import structlog

from scheduler.core.desk import Effects, Source
from scheduler.core.parking import ToPark
from scheduler.core.shard import Shard
from scheduler.core.wheel import Place
from scheduler.ports import Entry, Log, Reader, Record, TopicPartition
from schemas.codec import Codec
from schemas.errors import Retriable, TidewheelIOError, Undecodable
from schemas.messages import ParkedTask
from schemas.topics import delay_topic

PARK_CHUNK = 500  # records written in one iteration of the loop
PARKING_MAX = 10_000  # records written and not acknowledged: their tasks are in memory meanwhile
READ_CHUNK = 500  # records read in one iteration: about 10 ms of work
OPEN_CHUNK = 16  # windows that are found empty in one iteration
WAIT_US = 1_000  # between looks for records that were asked for
CROWDED_US = 50_000  # until it is seen whether there is room for more of a slot

_log = structlog.get_logger(__name__)


class _Opening:
    """A slot that is being read: `end_offset` is known once the mark at its end is acknowledged."""

    def __init__(self, place: Place, partition: TopicPartition) -> None:
        self.place, self.partition = place, partition
        self.end_offset: int | None = None
        self.is_marked = False
        self.reader: Reader | None = None

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


class Slots:
    """Parks tasks and takes them back; how many are on their way is bounded."""

    def __init__(self, log: Log, codec: Codec, shard: Shard) -> None:
        self.failure: TidewheelIOError | None = None  # an append that failed: what follows from it is not known
        self._log, self._codec, self._shard = log, codec, shard
        self._parking = 0
        self._acknowledged: list[Sequence[ToPark]] = []
        self._opening: _Opening | None = None
        self._is_closed = False

    def close(self) -> None:
        """Stop reading; what is heard of appends is ignored from now on."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.close()

    def next_at(self, now: int) -> int | None:
        """When `park` or `read` has something to do even if nothing is acknowledged."""
        is_waiting_for_mark = self._opening is not None and self._opening.is_marked and self._opening.end_offset is None
        if self._opening is not None and not is_waiting_for_mark:
            return now + (CROWDED_US if self._shard.is_crowded() else WAIT_US)
        return now + WAIT_US if self._parking < PARKING_MAX and self._shard.parking.has_more() else None

    def has_news(self) -> bool:
        """Whether something was acknowledged."""
        is_to_be_read = self._opening is not None and self._opening.end_offset is not None
        return bool(self._acknowledged or self.failure or (is_to_be_read and not self._shard.is_crowded()))

    # --- writing -------------------------------------------------------------------------------------------------

    def park(self, now: int) -> None:
        """Let the tasks go whose records are there, and write more."""
        self._let_go(now)
        records = self._shard.to_park(min(PARK_CHUNK, PARKING_MAX - self._parking))
        if not records:
            return
        try:
            self._log.append([self._entry(record) for record in records], partial(self._on_parked, records))
            self._parking += len(records)
        except Retriable:  # the log's buffer is full. Their windows may be closed when there is room
            self._shard.parking.put_back(records)

    def _let_go(self, now: int) -> None:
        for records in self._acknowledged:
            self._parking -= len(records)
            for record in records:
                self._shard.parked(record, now)
        self._acknowledged.clear()

    def _entry(self, record: ToPark) -> Entry:
        topic, number = self._partition(record.place)
        value = self._codec.encode(ParkedTask(task=record.task, due_at=record.due_at))
        return Entry(topic, number, record.task.task_id.encode(), value)

    def _partition(self, place: Place) -> TopicPartition:
        wheel = self._shard.parking.wheel
        return TopicPartition(delay_topic(place.level), self._shard.shard * wheel.shape.slots + wheel.slot_of(place))

    def _on_parked(self, records: Sequence[ToPark], result: Sequence[int] | TidewheelIOError) -> None:
        if self._is_closed:
            return
        if isinstance(result, TidewheelIOError):
            self.failure = result
        else:
            self._acknowledged.append(records)

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, now: int) -> Effects:
        """Read on in the slot that is to be opened: what follows is nearly always nothing but tasks in memory."""
        effects = Effects.none()
        self._let_go(now)  # first: what stands before the mark was acknowledged before it, and is met here again
        for _ in range(OPEN_CHUNK):
            if self._opening is None:
                place = self._shard.next_to_open(now)
                if place is None:
                    break
                self._opening = _Opening(place, self._partition(place))
            if not self._read_some(self._opening, effects, now):
                break
            self._opening.close()
            self._opening = None
        return effects

    def _read_some(self, opening: _Opening, effects: Effects, now: int) -> bool:
        """Whether the slot is read to its end, which is where it ended when it was begun."""
        if not opening.is_marked:
            self._mark(opening)
        if opening.end_offset is None:
            return False
        wheel = self._shard.parking.wheel
        next_offset = wheel.next_offset(opening.place)
        if next_offset < opening.end_offset:
            if self._shard.is_crowded():
                return False
            next_offset = self._take(opening, next_offset, opening.end_offset, effects, now)
        if next_offset < opening.end_offset:
            return False
        wheel.has_read(opening.place, opening.end_offset + 1)
        wheel.has_opened(opening.place)
        return True

    def _mark(self, opening: _Opening) -> None:
        """Write an empty record, whose offset tells where the slot ends: to ask the log would make others wait."""
        try:
            self._log.append([Entry(*opening.partition, None, None)], partial(self._on_marked, opening))
            opening.is_marked = True
        except Retriable:
            pass  # the log's buffer is full: in the next iteration

    def _on_marked(self, opening: _Opening, result: Sequence[int] | TidewheelIOError) -> None:
        if self._is_closed:
            return
        if isinstance(result, TidewheelIOError):
            self.failure = result
        elif result[0] < 0:
            opening.is_marked = False  # nobody knows where it is: another mark
        else:
            opening.end_offset = result[0]

    def _take(self, opening: _Opening, next_offset: int, end_offset: int, effects: Effects, now: int) -> int:
        """Read on, not beyond the mark: there may be records of tasks that have yet to leave memory for them."""
        if opening.reader is None:
            opening.reader = self._log.reader()
            opening.reader.seek(opening.partition, next_offset)
        for record in opening.reader.take(READ_CHUNK):
            if record.offset >= end_offset:
                return end_offset
            if record.value is not None:
                effects.extend(self._unpark(record, opening.place, now))
            next_offset = record.offset + 1
            self._shard.parking.wheel.has_read(opening.place, next_offset)
        return next_offset

    def _unpark(self, record: Record, place: Place, now: int) -> Effects:
        try:
            message = self._codec.decode(record.value)
        except Undecodable as error:  # foreign bytes: an owner never writes what it cannot read
            _log.error("undecodable record in the delay wheel", **_where(record), reason=str(error))
            return Effects.none()
        if not isinstance(message, ParkedTask):
            _log.error("foreign record in the delay wheel", **_where(record), kind=type(message).__name__)
            return Effects.none()
        return self._shard.unpark(message, place, Source(record.topic, record.offset, record.key, record.value), now)


def _where(record: Record) -> dict[str, str | int]:
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}
