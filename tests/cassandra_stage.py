"""What tests of the view in Cassandra stand on: a keyspace of their own in the cluster that the run shares."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from infra.cassandra import CassandraSettings, CassandraView, apply_schema
from infra.cassandra.session import Session
from tests.services import cassandra_address

TABLES = ("tasks", "attempts", "tasks_by_tenant", "dead_letters_by_queue", "calendar", "positions")
TIMEOUT_S = 60.0


def reachable(**more: Any) -> CassandraSettings:
    """Settings of the cluster of this run."""
    host, port = cassandra_address()
    return msgspec.structs.replace(CassandraSettings(hosts=(host,), port=port, request_timeout_s=20.0), **more)


@contextlib.contextmanager
def keyspace(**more: Any) -> Iterator[CassandraSettings]:
    """A new keyspace with its tables; removed at the end."""
    settings = reachable(keyspace=f"test_{uuid.uuid4().hex[:16]}", **more)
    apply_schema(settings)
    try:
        yield settings
    finally:
        with session(settings) as opened:
            opened.run(f"DROP KEYSPACE {settings.keyspace}", TIMEOUT_S)


@contextlib.contextmanager
def session(settings: CassandraSettings) -> Iterator[Session]:
    """A bare session."""
    opened = Session(settings)
    try:
        yield opened
    finally:
        opened.close()


def empty(view: CassandraView, settings: CassandraSettings) -> None:
    """Remove all rows."""
    for table in TABLES:
        view._session.run(f"TRUNCATE {settings.keyspace}.{table}", TIMEOUT_S)
