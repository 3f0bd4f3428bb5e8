"""The durable partitions in one SQLite file, in few and large rows.

The driver gives up the interpreter's lock for every row, and among busy threads getting it back costs more than the
row. So a commit is one statement, with one row for each partition: a batch of records, packed. A row's id is the
partition's number and the offset of its last record, so that a partition is a range of ids, read and cut in order.

The committing connection never moves the WAL into the database; a thread does that, beside the commits, and once the
WAL is long, holds them for the short rest, so that it starts over. Trimmed batches go the same way, without fsync:
forgetting need not be durable.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from infra.local import RECORD_OVERHEAD, Batch, Extent, LogStart
from infra.sqlite.database import (
    MEMORY,
    Connection,
    FileLock,
    Synchronous,
    connect,
    install,
    transaction,
    translated,
    values,
)
from infra.topics import TopicSpec
from scheduler.ports import Record, TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError

BATCH_RECORDS_MAX = 1_024  # records in one row: what a reader must at least unpack
BATCH_BYTES_MAX = 1024 * 1024
READ_BYTES_MAX = 4 * 1024 * 1024  # of one read, beyond its first batch
ROWS_MAX = 64  # of one statement
CHECKPOINT_EVERY_S = 0.5  # measured at 500 commits a second: acknowledged p99 1 ms, max 3 ms
RESTART_FRAMES = 4_096  # pages of 4 KiB in the WAL from which on it is started over
TRIM_BATCHES_MAX = 128  # deleted in one go, while commits wait
RETENTION_EVERY_S = 60.0  # how often batches that had to grow old are looked at
_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_STOP_WAIT_S = 10.0

_FORMAT = 1
_SCHEMA = """
CREATE TABLE topics (topic TEXT PRIMARY KEY, partitions INTEGER NOT NULL);
CREATE TABLE partitions (id INTEGER PRIMARY KEY, topic TEXT NOT NULL, number INTEGER NOT NULL);
CREATE TABLE batches (id INTEGER PRIMARY KEY, count INTEGER, appended_at INTEGER, body BLOB);
CREATE TABLE positions (name TEXT, topic TEXT, number INTEGER, next_offset INTEGER NOT NULL,
    PRIMARY KEY (name, topic, number));
CREATE TABLE starts (count INTEGER NOT NULL);
INSERT INTO starts VALUES (0);
"""
_READ = "SELECT id, count, body FROM batches WHERE id >= ? AND id < ? ORDER BY id"
_POSITION = (
    "INSERT INTO positions VALUES (?, ?, ?, ?) "
    "ON CONFLICT (name, topic, number) DO UPDATE SET next_offset = max(next_offset, excluded.next_offset)"
)


def pack(records: Sequence[Record]) -> bytes:
    """Keys and values of records as one body: their lengths (-1: None), then their bytes."""
    parts = [part for record in records for part in (record.key, record.value)]
    lengths = [-1 if part is None else len(part) for part in parts]
    return b"".join((struct.pack(f"<{len(lengths)}i", *lengths), *filter(None, parts)))


def unpack(partition: TopicPartition, last_offset: int, count: int, body: bytes) -> list[Record]:
    """The records of a body, of which the last has `last_offset`."""
    lengths = iter(struct.unpack_from(f"<{2 * count}i", body))
    topic, number = partition
    records = []
    end = 8 * count
    for offset, key_length, value_length in zip(
        range(last_offset - count + 1, last_offset + 1), lengths, lengths, strict=True
    ):
        start, end = end, end + max(key_length, 0)
        key = body[start:end] if key_length >= 0 else None
        start, end = end, end + max(value_length, 0)
        value = body[start:end] if value_length >= 0 else None
        records.append(Record(topic, number, offset, key, value))
    return records


class SqliteLogStorage:
    """Implements `local.Storage` in a file, or in memory for tests. One process at a time uses a file."""

    def __init__(self, path: str | Path, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        """Fatal: another process has it, it cannot be written, or it is not ours."""
        self._path = path
        self._now_ms = now_ms
        self._is_memory = str(path) == MEMORY
        self._ids: dict[TopicPartition, int] = {}
        self._retention_ms: dict[TopicPartition, int] = {}
        self._floors: dict[TopicPartition, int] = {}  # below: not needed any more
        self._trimmed: dict[TopicPartition, None] = {}  # whose floor moved
        self._has_written = False
        self._failure: TidewheelIOError | None = None
        self._write_lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._file_lock = None if self._is_memory else FileLock(Path(f"{path}.lock"))
        self._connections: list[Connection] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def start(self, topics: Sequence[TopicSpec]) -> LogStart:
        """Begin. Fatal: it was made with other numbers of partitions."""
        with self._write_lock, translated(self._path), transaction(self._writer):
            self._register(topics)
            self._writer.execute("UPDATE starts SET count = count + 1")
            (start_count,) = self._writer.execute("SELECT count FROM starts").fetchone()
            rows = self._writer.execute("SELECT name, topic, number, next_offset FROM positions").fetchall()
            return LogStart(
                start_count,
                {key: self._extent(number) for key, number in self._ids.items()},
                {(name, TopicPartition(topic, number)): offset for name, topic, number, offset in rows},
            )

    def commit(self, batches: Sequence[Batch], positions: Mapping[tuple[str, TopicPartition], int]) -> None:
        """Write batches and positions, whole or not at all; returns when they are on disk."""
        now = self._now_ms()
        rows = [(*row[:2], now, row[2]) for batch in batches for row in self._rows(batch)]
        with self._write_lock, translated(self._path):
            if self._failure is not None:
                raise self._failure
            self._has_written = True
            if len(rows) <= ROWS_MAX and not positions:
                self._insert(rows)
                return
            with transaction(self._writer):
                for start in range(0, len(rows), ROWS_MAX):
                    self._insert(rows[start : start + ROWS_MAX])
                moved = [(name, *key, offset) for (name, key), offset in positions.items()]
                self._writer.executemany(_POSITION, moved)

    def read(self, partition: TopicPartition, offset: int, limit: int) -> Sequence[Record]:
        """Whole batches from the one that holds `offset`, without what is below it."""
        first = self._ids[partition] << _OFFSET_BITS
        records: list[Record] = []
        read_bytes = 0
        with self._read_lock, translated(self._path):
            cursor = self._reader.execute(_READ, (first | offset, first + _OFFSET_MASK))
            for row_id, count, body in cursor:
                records += unpack(partition, row_id & _OFFSET_MASK, count, body)
                read_bytes += len(body)
                if len(records) >= limit or read_bytes >= READ_BYTES_MAX:
                    break
            cursor.close()
        skipped = sum(1 for _ in itertools.takewhile(lambda record: record.offset < offset, records))
        return records[skipped:]

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Delete batches below `before_offset` that are older than the topic's retention, soon."""
        self._floors[partition] = max(before_offset, self._floors.get(partition, 0))
        self._trimmed[partition] = None
        if self._is_memory:
            self._trim_all(self._writer)

    def close(self) -> None:
        """Stop the thread, empty the WAL, close the file; idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_S)
            self._thread = None
        with self._write_lock, translated(self._path):
            for connection in reversed(self._connections):
                connection.close()  # the last one moves the WAL into the database
            self._connections.clear()
        if self._file_lock is not None:
            self._file_lock.close()

    def _open(self) -> None:
        self._writer = self._connect(Synchronous.FULL)
        install(self._writer, self._path, _SCHEMA, _FORMAT)
        if self._is_memory:  # a second connection would see another database
            self._reader, self._read_lock = self._writer, self._write_lock
            return
        self._reader, self._read_lock = self._connect(Synchronous.NORMAL), threading.Lock()
        self._upkeep = self._connect(Synchronous.NORMAL)
        self._thread = threading.Thread(target=self._run, name="log-upkeep", daemon=True)
        self._thread.start()

    def _connect(self, synchronous: Synchronous) -> Connection:
        connection = connect(self._path, synchronous, is_checkpointing=False)
        self._connections.append(connection)
        return connection

    def _register(self, topics: Sequence[TopicSpec]) -> None:
        known = dict(self._writer.execute("SELECT topic, partitions FROM topics").fetchall())
        for spec in topics:
            if known.get(spec.name, spec.partitions) != spec.partitions:
                raise Fatal(
                    f"{self._path} was made with {known[spec.name]} partitions of {spec.name}, not {spec.partitions}: "
                    f"the number of shards is fixed for the life of a log; start with shards={known[spec.name]}"
                )
            if spec.name not in known:
                self._writer.execute("INSERT INTO topics VALUES (?, ?)", (spec.name, spec.partitions))
                for number in range(spec.partitions):
                    self._writer.execute("INSERT INTO partitions (topic, number) VALUES (?, ?)", (spec.name, number))
        retention_ms = {spec.name: spec.retention_ms for spec in topics}
        for row_id, topic, number in self._writer.execute("SELECT id, topic, number FROM partitions").fetchall():
            if topic in retention_ms:
                self._ids[TopicPartition(topic, number)] = row_id
                self._retention_ms[TopicPartition(topic, number)] = retention_ms[topic]

    def _extent(self, number: int) -> Extent:
        bounds = number << _OFFSET_BITS, (number + 1) << _OFFSET_BITS
        select = "SELECT id, count FROM batches WHERE id >= ? AND id < ? ORDER BY id {} LIMIT 1"
        oldest = self._writer.execute(select.format("ASC"), bounds).fetchone()
        newest = self._writer.execute(select.format("DESC"), bounds).fetchone()
        if oldest is None or newest is None:
            return Extent(0, 0)
        return Extent((oldest[0] & _OFFSET_MASK) - oldest[1] + 1, (newest[0] & _OFFSET_MASK) + 1)

    def _rows(self, batch: Batch) -> Iterator[tuple[int, int, bytes]]:
        """A batch as rows that are bounded in records and, beyond one record, in bytes."""
        first = self._ids[batch.partition] << _OFFSET_BITS
        start, size = 0, 0
        records = batch.records
        for index, record in enumerate(records):
            size += RECORD_OVERHEAD + len(record.key or b"") + len(record.value or b"")
            if size > BATCH_BYTES_MAX or index - start + 1 >= BATCH_RECORDS_MAX or index == len(records) - 1:
                part = records[start : index + 1]
                yield first | record.offset, len(part), pack(part)
                start, size = index + 1, 0

    def _insert(self, rows: Sequence[tuple[int, int, int, bytes]]) -> None:
        if rows:
            sql = f"INSERT INTO batches (id, count, appended_at, body) VALUES {values(len(rows), 4)}"
            self._writer.execute(sql, [value for row in rows for value in row])

    # --- upkeep, in its own thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        look_at = time.monotonic() + RETENTION_EVERY_S
        while not self._stopping.wait(CHECKPOINT_EVERY_S):
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + RETENTION_EVERY_S
                self._trimmed |= dict.fromkeys(self._floors)
            try:
                self._trim_all(self._upkeep)
                self._checkpoint()
            except Retriable:
                continue
            except TidewheelIOError as error:
                self._failure = error  # raised by the next commit
                return
            except Exception as error:  # the edge of the thread
                self._failure = Fatal(f"upkeep of {self._path} failed: {error!r}; start the process again")
                raise

    def _checkpoint(self) -> None:
        if not self._has_written:
            return
        self._has_written = False
        with translated(self._path):
            if self._checkpoint_beside() < RESTART_FRAMES:
                return
            self._checkpoint_beside()
            with self._write_lock:  # nothing is added now: the whole WAL is copied, the next commit starts it over
                self._checkpoint_beside()

    def _checkpoint_beside(self) -> int:
        """Copy what the WAL holds without stopping anyone; the number of its pages."""
        _, frames, _ = self._upkeep.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return int(frames)

    def _trim_all(self, connection: Connection) -> None:
        while self._trimmed and not self._stopping.is_set():
            partition, _ = self._trimmed.popitem()
            has_more = True
            try:
                has_more = self._trim_some(connection, partition, self._floors[partition])
            finally:
                if has_more:
                    self._trimmed[partition] = None

    def _trim_some(self, connection: Connection, partition: TopicPartition, floor: int) -> bool:
        """Delete the oldest batches below `floor`, never the newest batch of all; whether there may be more."""
        first = self._ids[partition] << _OFFSET_BITS
        young = self._now_ms() - self._retention_ms[partition]
        select = "SELECT id, appended_at FROM batches WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
        with self._write_lock, translated(self._path):
            bounds = first, first + _OFFSET_MASK, TRIM_BATCHES_MAX + 1
            rows = connection.execute(select, bounds).fetchall()
            old = itertools.takewhile(lambda row: row[0] < first + floor and row[1] <= young, rows[:-1])
            doomed = [row_id for row_id, _ in old]
            if doomed:
                connection.execute("DELETE FROM batches WHERE id >= ? AND id <= ?", (doomed[0], doomed[-1]))
                self._has_written = True
        return len(doomed) == TRIM_BATCHES_MAX
