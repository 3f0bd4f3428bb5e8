"""Appends to the log in a folder from several threads and prints what is acknowledged, until it is killed."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.ports import Entry
from schemas.errors import TidewheelIOError
from schemas.topics import TASK_EVENTS, TASK_REQUESTS

THREADS = 3
SHARDS = 2


def write(log: LocalLog, thread: int, run: str) -> None:
    """Append an input and an event again and again; print where and what was acknowledged."""
    number = 0
    while True:
        value = f"{run}-{thread}-{number}"
        entries = [Entry(topic, thread % SHARDS, None, value.encode()) for topic in (TASK_REQUESTS, TASK_EVENTS)]
        log.append(entries, functools.partial(announce, entries))
        log.poll(1.0)
        number += 1


def announce(entries: Sequence[Entry], offsets: Sequence[int] | TidewheelIOError) -> None:
    """One write a line, so that a kill leaves whole lines."""
    if isinstance(offsets, TidewheelIOError):
        raise offsets
    for entry, offset in zip(entries, offsets, strict=True):
        sys.stdout.write(f"{entry.topic} {entry.partition} {offset} {(entry.value or b'').decode()}\n")
        sys.stdout.flush()


def main(folder: str, run: str) -> None:
    """Write for ever."""
    broker = LocalBroker(SqliteLogStorage(Path(folder) / "log.db"), embedded_catalog(SHARDS))
    broker.start_committer()
    for thread in range(THREADS):
        threading.Thread(target=write, args=(broker.connect(), thread, run)).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
