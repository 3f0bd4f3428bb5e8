"""SQLite files: how they are opened, and what the driver's errors mean to whoever must act."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, TypeAlias

from schemas.errors import Fatal, Retriable, TidewheelIOError

Connection: TypeAlias = sqlite3.Connection

MEMORY = ":memory:"
PARAMETERS_MAX = 32_000  # of one statement; SQLite's own limit is 32,766
_BUSY_WAIT_MS = 5_000  # for a lock that somebody outside of this process holds (a backup, the sqlite3 shell)
_STATEMENTS_MAX = 256  # kept prepared; multi-row statements exist in as many forms as they have rows
_CACHE_KIB = 8_192  # pages in memory of one connection


class Synchronous(StrEnum):
    """When a commit waits for the disk."""

    FULL = "FULL"  # always: what was committed survives a power failure
    NORMAL = "NORMAL"  # at checkpoints: a power failure may undo the last commits, never their order


class Unusable(Fatal):
    """The file itself is the trouble: damaged, of another format, or no database at all."""


def connect(path: str | Path, synchronous: Synchronous, *, is_checkpointing: bool = True) -> Connection:
    """A connection in autocommit mode, WAL on, usable from any one thread at a time.

    Without `is_checkpointing` its commits never stop to move the WAL into the database: somebody else must.
    """
    with translated(path):
        connection = sqlite3.connect(
            path,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=_STATEMENTS_MAX,
            timeout=_BUSY_WAIT_MS / 1000,
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            if not is_checkpointing:
                connection.execute("PRAGMA wal_autocheckpoint = 0").fetchone()
        except BaseException:
            connection.close()
            raise
    return connection


def install(connection: Connection, path: str | Path, schema: str, version: int) -> None:
    """Create the tables of a new file, or check that an old one has the `version` that this code knows."""
    with translated(path):
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE;\n{schema}\nPRAGMA user_version = {version};\nCOMMIT;")
        elif found != version:
            raise Unusable(
                f"{path} has format {found}, this release reads format {version}: use the release that made it"
            )


@contextlib.contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """All statements inside or none; takes the write lock at once."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def translated(path: str | Path) -> Iterator[None]:
    """Raise the driver's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error


def translate(error: sqlite3.Error, path: str | Path) -> TidewheelIOError:
    """What an error of the driver means, and what the operator can do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Retriable(f"{path} is locked by another program (a backup, a shell): let it finish ({error})")
    advice = _ADVICE.get(code, "start the process again; if it happens again, report it with this message")
    kind = Unusable if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) else Fatal
    return kind(f"{path}: {advice} ({error})")


_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full, or a limit on the size of the file is reached: free some space, then start",
    sqlite3.SQLITE_READONLY: "cannot be written: check owner and mode of the file and its folder",
    sqlite3.SQLITE_PERM: "cannot be written: check owner and mode of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check that its folder exists, its owner and its mode",
    sqlite3.SQLITE_IOERR: "the disk reported an error: check the disk and the system's log",
    sqlite3.SQLITE_CORRUPT: "is damaged: put it aside and restore a copy (a view is built again without one)",
    sqlite3.SQLITE_NOTADB: "is no SQLite file: name another one, or put this one aside",
    sqlite3.SQLITE_NOMEM: "there is no memory left: give the process more",
}


def put_aside(path: Path) -> Path:
    """Rename a database that nobody has open, in place of one that was put aside before; where it is now."""
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    return path.replace(path.with_name(path.name + ".damaged"))


def values(rows: int, columns: int) -> str:
    """The placeholders of an INSERT of many rows: one statement costs one exchange of the interpreter's lock."""
    row = f"({', '.join('?' * columns)})"
    return ", ".join([row] * rows)


def chunks(rows: Sequence[Any], columns: int) -> Iterator[Sequence[Any]]:
    """Parts of `rows` that fit the parameters of one statement, in few different sizes so that they stay prepared."""
    most = min(PARAMETERS_MAX // columns, 512)
    start = 0
    while start < len(rows):
        size = min(most, 1 << (len(rows) - start).bit_length() - 1)
        yield rows[start : start + size]
        start += size


class FileLock:
    """One process at a time: held until closed, or until the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Fatal: another process holds it, or the file cannot be made."""
        self._file: IO[str] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="ascii")  # noqa: SIM115 — held as long as the lock
        except OSError as error:
            raise Fatal(f"{path} cannot be made: check owner and mode of its folder ({error})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise Fatal(
                f"{path.parent} is in use by another process (process id {owner}): stop it, or name another folder"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def close(self) -> None:
        """Let others in; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
