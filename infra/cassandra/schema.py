"""The tables, and how they come about: by a command, never by the start of a process. docs/CASSANDRA.md explains them.

Write timestamps are offsets of the log, not times. Hence no table may use a compaction that goes by write time
(TimeWindowCompactionStrategy); and whoever writes by hand needs `USING TIMESTAMP`, or the hand's word lasts for ever.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from infra.cassandra.session import APPLY, Session
from infra.cassandra.settings import CassandraSettings
from schemas.errors import Fatal, Retriable

VERSION = 2
DDL_TIMEOUT_S = 30.0  # of one statement
_AGREEMENT_S = 10.0
_ONE_HOUR_S, _HALF_A_DAY_S = 3_600, 43_200

# Of expired rows nobody needs to hear: they expire on every replica alike. So what expires may go soon; only where
# rows or cells are deleted (dead letters, cleared columns, old attempts) a repair must come first: ten days, the usual.
_LIST_COLUMNS = "task_id text, status text, queue text, task_type text, priority text"
_MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        """CREATE TABLE IF NOT EXISTS {keyspace}.tasks (
            task_id text, created_at bigint, spec blob, status text, version int, updated_at bigint,
            next_run_at bigint, deadline_at bigint, started_at bigint, completed_at bigint, attempt int,
            failure_count int, crash_count int, snooze_count int, worker_id text, result blob,
            result_content_type text, last_error blob, cancel_requested_at bigint, cancel_reason text,
            is_dead_letter boolean, fingerprint text, traceparent text,
            PRIMARY KEY (task_id, created_at)
        ) WITH CLUSTERING ORDER BY (created_at DESC)""",
        """CREATE TABLE IF NOT EXISTS {keyspace}.attempts (
            task_id text, created_at bigint, attempt int, worker_id text, started_at bigint, finished_at bigint,
            outcome text, error blob,
            PRIMARY KEY (task_id, created_at, attempt)
        ) WITH CLUSTERING ORDER BY (created_at DESC, attempt DESC)""",
        f"""CREATE TABLE IF NOT EXISTS {{keyspace}}.tasks_by_tenant (
            tenant_id text, slice bigint, created_at bigint, {_LIST_COLUMNS},
            PRIMARY KEY ((tenant_id, slice), created_at, task_id)
        ) WITH CLUSTERING ORDER BY (created_at DESC, task_id ASC) AND gc_grace_seconds = {_HALF_A_DAY_S}""",
        f"""CREATE TABLE IF NOT EXISTS {{keyspace}}.dead_letters_by_queue (
            dead_in text, slice bigint, created_at bigint, {_LIST_COLUMNS},
            PRIMARY KEY ((dead_in, slice), created_at, task_id)
        ) WITH CLUSTERING ORDER BY (created_at DESC, task_id ASC)""",
        """CREATE TABLE IF NOT EXISTS {keyspace}.calendar (
            scope text, at bigint, member text,
            PRIMARY KEY (scope, at, member)
        ) WITH CLUSTERING ORDER BY (at DESC, member ASC)""",
        """CREATE TABLE IF NOT EXISTS {keyspace}.positions (
            topic text, partition int, next_offset bigint, epoch bigint,
            PRIMARY KEY (topic, partition)
        )""",
        "CREATE INDEX IF NOT EXISTS tasks_by_status ON {keyspace}.tasks_by_tenant (status) USING 'sai'",
    ),
    2: (
        "CREATE TABLE IF NOT EXISTS {keyspace}.schedules (schedule_id text PRIMARY KEY, body blob)",
        """CREATE TABLE IF NOT EXISTS {keyspace}.schedules_by_tenant (
            tenant_id text, bucket int, name text, schedule_id text, is_paused boolean, declared_by text,
            PRIMARY KEY ((tenant_id, bucket), name, schedule_id)
        )""",
    ),
}
_VERSIONS = """CREATE TABLE IF NOT EXISTS {keyspace}.schema_version (
    id int PRIMARY KEY, version int, applied_at timestamp
)"""


class SchemaReport(NamedTuple):
    """What `apply_schema` found and left: versions of the schema; 0 means that there was none."""

    keyspace: str
    before: int
    after: int
    replication: str


def apply_schema(settings: CassandraSettings) -> SchemaReport:
    """Create the keyspace and its tables, or bring them to this release's version. May be repeated.

    Two at the same time do no harm, but the later one may be told to try again. The replication of a keyspace that is
    there is left alone: changing it needs a repair. Raises Retriable and Fatal (a newer release was here, no rights).
    """
    session = Session(settings)
    try:
        keyspace = settings.keyspace
        session.run(f"CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = {_wanted(settings)}", DDL_TIMEOUT_S)
        session.run(_VERSIONS.format(keyspace=keyspace), DDL_TIMEOUT_S)
        before = _version(session, keyspace)
        _check_not_newer(before, keyspace)
        for version in range(before + 1, VERSION + 1):
            for statement in _MIGRATIONS[version]:
                session.run(statement.format(keyspace=keyspace), DDL_TIMEOUT_S)
            if not session.settle(_AGREEMENT_S):
                raise Retriable("Cassandra's nodes do not agree on the schema yet: apply it again")
            now_ms = time.time_ns() // 1_000_000
            session.run(
                f"INSERT INTO {keyspace}.schema_version (id, version, applied_at) VALUES (1, {version}, {now_ms})",
                DDL_TIMEOUT_S,
            )
        return SchemaReport(keyspace, before, VERSION, _present(session, keyspace))
    finally:
        session.close()


def check_schema(session: Session, keyspace: str) -> None:
    """Fatal: the tables are missing, older or newer than this release needs."""
    tables = session.run(
        f"SELECT table_name FROM system_schema.tables WHERE keyspace_name = '{keyspace}'", DDL_TIMEOUT_S
    )
    found = _version(session, keyspace) if ("schema_version",) in tables else 0
    _check_not_newer(found, keyspace)
    if found < VERSION:
        raise Fatal(f"Cassandra's keyspace {keyspace} has schema {found}, this release needs {VERSION}: {APPLY}")


def _check_not_newer(found: int, keyspace: str) -> None:
    if found > VERSION:
        raise Fatal(
            f"Cassandra's keyspace {keyspace} has schema {found}, this release knows {VERSION}: "
            "use the release that made it, or a newer one"
        )


def _version(session: Session, keyspace: str) -> int:
    rows = session.run(f"SELECT version FROM {keyspace}.schema_version WHERE id = 1", DDL_TIMEOUT_S)
    return int(rows[0][0]) if rows else 0


def _wanted(settings: CassandraSettings) -> str:
    if settings.is_simple_strategy:
        return f"{{'class': 'SimpleStrategy', 'replication_factor': {settings.replication_factor}}}"
    for name in settings.copies():
        if "'" in name:
            raise Fatal(f"replication: a datacenter cannot be named {name!r}")
    copies = ", ".join(f"'{name}': {number}" for name, number in settings.copies().items())
    return f"{{'class': 'NetworkTopologyStrategy', {copies}}}"


def _present(session: Session, keyspace: str) -> str:
    rows = session.run(
        f"SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '{keyspace}'", DDL_TIMEOUT_S
    )
    return ", ".join(f"{name} {value}" for name, value in sorted(dict(rows[0][0]).items()))
