"""C36, C37, C38: a conditional write that times out; None written as null; a table used as a queue."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from infra.cassandra import CassandraSettings, CassandraView, lists
from scheduler.ports import Batch, Position, TaskFilter
from schemas.errors import Retriable
from schemas.messages import Status
from tests.cassandra_stage import TABLES, TIMEOUT_S, empty, keyspace, way
from tests.contract.view import begun, changed, pages
from tests.harness import eventually

pytestmark = pytest.mark.service("cassandra")
NOW = 1_700_000_000_000_000
_READ = re.compile(r"Read (\d+) live rows and (\d+) tombstone cells")


@pytest.fixture(scope="module")
def settings() -> Iterator[CassandraSettings]:
    with keyspace() as settings:
        yield settings


@pytest.fixture
def view(settings: CassandraSettings) -> Iterator[CassandraView]:
    view = CassandraView(settings, now_us=lambda: NOW)
    empty(view, settings)
    yield view
    view.close()


def read_of(view: CassandraView, cql: str, values: tuple[Any, ...] = ()) -> tuple[int, int]:
    """Rows and tombstones that the node met for a statement, by its trace."""
    driver = view._session._session
    result = driver.execute(driver.prepare(cql).bind(values), timeout=TIMEOUT_S, trace=True)
    rows = tombstones = 0
    while True:
        trace = result.get_query_trace(max_wait_sec=TIMEOUT_S)
        for event in trace.events:
            if found := _READ.search(event.description):
                rows, tombstones = rows + int(found[1]), tombstones + int(found[2])
        if not result.has_more_pages:
            return rows, tombstones
        result.fetch_next_page()


def dump(view: CassandraView, settings: CassandraSettings) -> list[set[Any]]:
    """All rows of all tables."""
    found = (view._session.run(f"SELECT * FROM {settings.keyspace}.{table}", TIMEOUT_S) for table in TABLES)
    return [set(rows) for rows in found]


def test_a_write_that_timed_out_is_repeated_and_nothing_is_doubled(
    settings: CassandraSettings, view: CassandraView
) -> None:
    """C36 as far as it applies. Nothing is claimed in Cassandra: who owns a shard is decided by the log, and the design
    has no conditional write (the second half of this test says so of every statement). What remains is a plain write
    whose answer is lost. It bears a timestamp of its own, so whether it was applied does not matter: it is repeated."""
    changes = [begun(f"t{number}", NOW) for number in range(50)]
    with way(settings) as (road, by_road):
        writer = CassandraView(by_road, now_us=lambda: NOW)
        writer.positions()
        road.is_deaf = True
        with pytest.raises(Retriable):
            writer.apply([Batch(0, changes, Position(50, 1))])
        eventually(lambda: view.count(TaskFilter()) in (0, 50), "no half of a batch that is still on its way")
        road.unblock()

        def is_applied() -> bool:
            try:
                writer.apply([Batch(0, changes, Position(50, 1))])
            except Retriable:
                return False
            return True

        eventually(is_applied, "the second try")
        writer.close()
    once = dump(view, settings)
    assert view.count(TaskFilter()) == 50
    CassandraView(settings, now_us=lambda: NOW).close()
    another = CassandraView(settings, now_us=lambda: NOW)
    another._applied[0] = 0  # it believes that nothing was applied
    another.apply([Batch(0, changes, Position(50, 1))])
    assert dump(view, settings) == once
    writing = another._writing
    statements = [writing.task, writing.attempt, writing.trim, writing.revive, writing.entry, writing.position]
    for statement in (*statements, *writing.listed.values()):
        assert re.search(r"\bUSING TIMESTAMP \?", statement.query_string)
        assert not re.search(r"\bIF\b", statement.query_string)
    another.close()


def test_absent_columns_leave_no_tombstones(settings: CassandraSettings, view: CassandraView) -> None:
    """C37, with 2,000 tasks in place of 10,000. A None in a new row, and one over nothing, are absence; None over a
    value is a deletion, and the only one."""
    ids = [f"t{number}" for number in range(2_000)]
    absent = dict.fromkeys(("deadline_at", "worker_id", "result", "last_error", "cancel_reason", "fingerprint"))
    view.apply([Batch(0, [begun(task_id, NOW, next_run_at=NOW, **absent) for task_id in ids], Position(1, 1))])
    for version in range(2, 7):
        status = Status.RUNNING if version % 2 else Status.RETRYING
        changes = [changed(task_id, status=status, version=version, cancel_reason=None) for task_id in ids]
        view.apply([Batch(0, changes, Position(version, 1))])
    keyspace = settings.keyspace
    for table in ("tasks", "tasks_by_tenant"):
        assert read_of(view, f"SELECT * FROM {keyspace}.{table}") == (len(ids), 0)
    view.apply([Batch(0, [changed(task_id, next_run_at=None, version=7) for task_id in ids], Position(7, 1))])
    assert read_of(view, f"SELECT * FROM {keyspace}.tasks") == (len(ids), len(ids))
    row = view.task("t3")
    assert row is not None
    assert (row.next_run_at, row.cancel_reason, row.version) == (None, None, 7)


def test_nothing_is_polled_and_lists_do_not_read_their_history(
    settings: CassandraSettings, view: CassandraView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C38. No table holds due work: what is due is in the memory of its shard. So what remains is the cost of the lists
    that people look at, and of the projector, which reads nothing at all of the tasks that it knows."""
    reads: list[object] = []
    read = view._session.read
    positions = view.positions()

    def noted(*given: Any) -> Any:
        reads.append(given)
        return read(*given)

    monkeypatch.setattr(view._session, "read", noted)
    newest = f"SELECT task_id FROM {settings.keyspace}.tasks_by_tenant WHERE tenant_id = ? AND slice = ? LIMIT 50"
    costs = []
    for round_ in range(20):
        at = NOW + round_ * lists.SLICE_US
        ids = [f"t{round_}-{number}" for number in range(100)]
        view._applied.setdefault(0, 0)
        dead: dict[str, Any] = {"status": Status.DEAD, "is_dead_letter": True, "completed_at": at}
        view.apply([Batch(0, [begun(task_id, at) for task_id in ids], Position(round_ * 3 + 1, 1))])
        view.apply([Batch(0, [changed(task_id, version=2, **dead) for task_id in ids], Position(round_ * 3 + 2, 1))])
        assert not reads
        discarded = [changed(task_id, is_dead_letter=False, version=3) for task_id in ids]
        view.apply([Batch(0, discarded, Position(round_ * 3 + 3, 1))])
        reads.clear()  # an ended task is read back for an operator's change
        costs.append(read_of(view, newest, ("default", lists.slice_of(at))))
    assert positions == {}
    assert set(costs) == {(50, 0)}
    view.apply(
        [
            Batch(
                0,
                [begun("late", NOW + 5), begun("dead", NOW, status=Status.DEAD, is_dead_letter=True)],
                Position(99, 1),
            )
        ]
    )
    assert "late" in pages(view, TaskFilter(), 500)
    reads.clear()
    assert [row.task_id for row in view.tasks(TaskFilter(is_dead_letter=True, queue="default"), 50).rows] == ["dead"]
    assert len(reads) < 60  # the calendar, a slice of twenty each, and the one task


def test_a_partition_of_a_list_has_a_bound() -> None:
    """C38: what docs/CASSANDRA.md says of the size of partitions."""
    rows_max = 12_000 * lists.SLICE_US // 1_000_000
    assert rows_max == 120_000
    assert rows_max * 120 < 16 * 1024 * 1024
