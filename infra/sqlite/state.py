"""Checkpoints of shards in a file of their own: a large one must not hold the write lock of the log."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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
from schemas.errors import Fatal, Fenced, Retriable, TidewheelIOError

COMMITS_MAX = 64  # begun and not done; each shard has one or two
READ_ROWS = 512
WRITE_ROWS = 512  # of one statement, and of lazily encoded changes in memory at once
_STOP_WAIT_S = 60.0  # the largest checkpoint of a full shard on a slow disk

_FORMAT = 1
_SCHEMA = """
CREATE TABLE fences (shard INTEGER PRIMARY KEY, token INTEGER NOT NULL);
CREATE TABLE entries (shard INTEGER, key BLOB, value BLOB NOT NULL, PRIMARY KEY (shard, key)) WITHOUT ROWID;
"""


class _Commit(NamedTuple):
    shard: int
    token: int
    changes: Iterable[tuple[bytes, bytes | None]]
    on_done: Callable[[TidewheelIOError | None], None]


class SqliteStateStore:
    """Implements `ports.StateStore`; commits in a thread, in the order of their calls."""

    def __init__(self, path: str | Path) -> None:
        """Fatal: the file cannot be written, or it is not ours."""
        self._path = path
        self._is_memory = str(path) == MEMORY
        self._lock = threading.Lock()
        # A power failure may undo the last commits: then an older checkpoint and more events give the same. To wait for
        # the disk here would only hold up the log, whose commits wait for the same disk.
        self._writer = connect(path, Synchronous.NORMAL)
        try:
            install(self._writer, path, _SCHEMA, _FORMAT)
        except BaseException:
            self._writer.close()
            raise
        self._begun: queue.Queue[_Commit | None] = queue.Queue(COMMITS_MAX)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="state-commits", daemon=True)
        self._thread.start()

    def fence(self, shard: int) -> int:
        """Become the writer of the shard's state; the token before is void."""
        with self._lock, translated(self._path), transaction(self._writer):
            token = self._token(shard) + 1
            self._writer.execute("INSERT OR REPLACE INTO fences VALUES (?, ?)", (shard, token))
            return token

    def load(self, shard: int) -> Iterable[tuple[bytes, bytes]]:
        """What is committed now, as one picture, read bit by bit."""
        select = "SELECT key, value FROM entries WHERE shard = ? ORDER BY key"
        if self._is_memory:
            with self._lock, translated(self._path):
                return self._writer.execute(select, (shard,)).fetchall()
        return self._read(select, shard)

    def commit(
        self,
        shard: int,
        token: int,
        changes: Iterable[tuple[bytes, bytes | None]],
        on_done: Callable[[TidewheelIOError | None], None],
    ) -> None:
        """Apply all changes or none, in the background, where `changes` is iterated. Retriable: too many are begun."""
        if self._is_closed:
            raise Fatal("the state store is closed")
        try:
            self._begun.put_nowait(_Commit(shard, token, changes, on_done))
        except queue.Full:
            raise Retriable(f"{COMMITS_MAX} checkpoints wait to be written: try later") from None

    def close(self) -> None:
        """Finish what was begun; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._begun.put(None, timeout=_STOP_WAIT_S)
        self._thread.join(_STOP_WAIT_S)
        with self._lock:
            self._writer.close()

    def _run(self) -> None:
        while (commit := self._begun.get()) is not None:
            failure: TidewheelIOError | None = None
            try:
                self._apply(commit)
            except TidewheelIOError as error:
                failure = error
            except Exception as error:  # the edge of the thread: whatever the caller's iterable raised
                failure = Fatal(f"the checkpoint of shard {commit.shard} could not be made: {error!r}")
                failure.__cause__ = error
            commit.on_done(failure)

    def _apply(self, commit: _Commit) -> None:
        changes = iter(commit.changes)
        with self._lock, translated(self._path), transaction(self._writer):
            token = self._token(commit.shard)
            if token != commit.token:
                raise Fenced(f"shard {commit.shard} was taken over: token {commit.token} is void, {token} holds")
            while part := dict(itertools.islice(changes, WRITE_ROWS)):
                _write(self._writer, commit.shard, part)

    def _token(self, shard: int) -> int:
        row = self._writer.execute("SELECT token FROM fences WHERE shard = ?", (shard,)).fetchone()
        return 0 if row is None else int(row[0])

    def _read(self, select: str, shard: int) -> Iterator[tuple[bytes, bytes]]:
        reader = connect(self._path, Synchronous.NORMAL)
        try:
            with translated(self._path):
                cursor = reader.execute(select, (shard,))
                while rows := cursor.fetchmany(READ_ROWS):
                    yield from rows
        finally:
            reader.close()


def _write(connection: Connection, shard: int, changes: dict[bytes, bytes | None]) -> None:
    """Few statements of many rows: each statement and row costs an exchange of the interpreter's lock."""
    for part in chunks([(shard, key, value) for key, value in changes.items() if value is not None], 3):
        sql = f"INSERT OR REPLACE INTO entries VALUES {values(len(part), 3)}"
        connection.execute(sql, [value for row in part for value in row])
    for keys in chunks([key for key, value in changes.items() if value is None], 1):
        marks = ", ".join("?" * len(keys))
        connection.execute(f"DELETE FROM entries WHERE shard = {shard:d} AND key IN ({marks})", keys)
