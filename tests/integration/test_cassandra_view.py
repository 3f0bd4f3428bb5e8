"""The view in a real Cassandra: order of writes, expiry, lists over long times, outages, the schema."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from random import Random
from typing import Any

import msgspec
import pytest
import structlog

from infra.cassandra import CassandraSettings, CassandraView, apply_schema, lists, schema
from infra.cassandra.rows import ATTEMPT_DEFAULTS, TASK_DEFAULTS
from infra.local import LocalBroker
from infra.sqlite import SqliteLogStorage, SqliteView
from infra.topics import embedded_catalog
from scheduler.ports import Batch, Entry, Position, ScheduleChange, ScheduleFilter, TaskFilter, View
from scheduler.projector import Projector
from schemas.codec import Codec
from schemas.errors import Fatal, Retriable
from schemas.messages import Priority, Status, TaskSpec
from schemas.topics import TASK_EVENTS
from tests.cassandra_stage import TIMEOUT_S, empty, keyspace, reachable, session, way
from tests.contract.view import begun, changed, pages, schedule_pages, scheduled
from tests.harness import eventually
from tests.histories import START, history
from tests.schedule_histories import schedule_history

pytestmark = pytest.mark.service("cassandra")
CODEC = Codec.builtin()
NOW = 1_700_000_000_000_000
DAY = lists.DAY_US
TTL_S = 1_000


@pytest.fixture(scope="module")
def settings() -> Iterator[CassandraSettings]:
    with keyspace(ttl_s=TTL_S) as settings:
        yield settings


def at_now(settings: CassandraSettings) -> CassandraView:
    return CassandraView(settings, now_us=lambda: NOW)


@pytest.fixture
def view(settings: CassandraSettings) -> Iterator[CassandraView]:
    view = at_now(settings)
    empty(view, settings)
    yield view
    view.close()


@pytest.fixture
def other(settings: CassandraSettings) -> Iterator[CassandraView]:
    """A view of another process."""
    other = at_now(settings)
    yield other
    other.close()


def ttls(view: CassandraView, settings: CassandraSettings) -> dict[str, set[bool]]:
    """By table, whether its cells expire."""
    found: dict[str, set[bool]] = {}
    listed = ("status", "queue", "task_type", "priority")
    for table, columns in (
        ("tasks", TASK_DEFAULTS),
        ("attempts", ATTEMPT_DEFAULTS),
        ("tasks_by_tenant", listed),
        ("dead_letters_by_queue", listed),
    ):
        for column in columns:
            rows = view._session.run(f"SELECT {column}, TTL({column}) FROM {settings.keyspace}.{table}", TIMEOUT_S)
            found.setdefault(table, set()).update(ttl is not None for value, ttl in rows if value is not None)
    return found


# --- the order of writes ----------------------------------------------------------------------------------------------


def test_an_old_write_never_wins(view: CassandraView, other: CassandraView) -> None:
    first = begun("a", NOW, next_run_at=NOW)
    running = changed("a", {1: {"worker_id": "w"}}, status=Status.RUNNING, version=2, next_run_at=None, attempt=1)
    view.apply([Batch(0, [first], Position(1, 1))])
    assert other.positions() == {0: Position(1, 1)}
    other.apply([Batch(0, [], Position(2, 1))])  # from now on it believes that it is alone
    view.apply([Batch(0, [running], Position(3, 1))])
    ended = changed("a", {1: {"finished_at": NOW}}, status=Status.DEAD, version=3, is_dead_letter=True)
    view.apply([Batch(0, [ended], Position(4, 1))])
    before = view.task("a")
    other.apply([Batch(0, [running], Position(3, 1))])
    assert view.task("a") == before
    assert view.positions() == {0: Position(4, 1)}
    assert [view.count(TaskFilter(status=status)) for status in (Status.RUNNING, Status.DEAD)] == [0, 1]
    assert view.count(TaskFilter(is_dead_letter=True)) == 1
    redriven = changed("a", status=Status.PENDING, version=4, is_dead_letter=False)
    view.apply([Batch(0, [redriven], Position(5, 1))])
    other.apply([Batch(0, [ended], Position(4, 1))])
    assert view.count(TaskFilter(is_dead_letter=True)) == 0
    assert view.count(TaskFilter(status=Status.PENDING)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_projectors_that_overlap_leave_what_one_alone_would_leave(
    seed: int, view: CassandraView, settings: CassandraSettings
) -> None:
    """Both read everything, in other batches; now and then one of them starts anew. SQLite says what is right."""
    rng = Random(seed)
    events, tasks = history(rng, 250)
    broker = LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(1))
    writer, reader = broker.connect(commits=True), broker.connect()
    right = SqliteView(":memory:")
    lasting = msgspec.structs.replace(settings, ttl_s=10**8)
    views = [CassandraView(lasting, now_us=lambda: START) for _ in range(2)]
    with structlog.testing.capture_logs():
        all_views: list[View] = [*views, right]
        projectors = [Projector(reader, one, CODEC, 1) for one in all_views]
        at = 0
        while at < len(events):
            size = rng.choice([1, 3, 20])
            writer.append([Entry(TASK_EVENTS, 0, None, CODEC.encode(event)) for event in events[at : at + size]])
            writer.poll(0)
            at += size
            for number in range(3):
                if rng.random() < 0.4:
                    projectors[number].step(0)
            if rng.random() < 0.1:
                number = rng.randrange(2)
                projectors[number].close()
                projectors[number] = Projector(reader, views[number], CODEC, 1)
        for projector in projectors:
            while projector.lag():
                projector.step(0)
    for task_id in tasks:
        assert view.task(task_id) == right.task(task_id), f"seed {seed}"
    for wanted in (*(TaskFilter(status=status) for status in Status), TaskFilter(is_dead_letter=True)):
        assert pages(view, wanted, 7) == pages(right, wanted, 7), f"seed {seed}: {wanted}"
    for one in all_views:
        one.close()


def test_what_was_written_before_an_error_is_written_again(settings: CassandraSettings, view: CassandraView) -> None:
    """The way ends in the middle of a large batch; the same changes again complete it."""
    ids = [f"t{number}" for number in range(3_000)]
    view.apply([Batch(0, [begun(task_id, NOW) for task_id in ids], Position(1, 1))])
    ended = [changed(task_id, status=Status.SUCCEEDED, version=2, completed_at=NOW) for task_id in ids]
    with way(settings) as (road, by_road):
        writer = at_now(by_road)
        threading.Timer(0.15, road.block).start()
        with pytest.raises(Retriable):
            while True:  # until the timer fires; each round is another batch
                writer.apply([Batch(0, ended, Position(2, 1))])
                writer.apply([Batch(0, [changed("t0", version=3)], Position(view.positions()[0].next_offset + 1, 1))])
        road.unblock()
        eventually(lambda: _applied(writer, ended, Position(10_000, 1)), "the batch after the outage")
        writer.close()
    assert view.positions()[0] == Position(10_000, 1)
    assert view.count(TaskFilter(status=Status.SUCCEEDED)) == len(ids)
    assert ttls(view, settings)["tasks"] == {True}


def _applied(view: View, changes: list[Any], position: Position) -> bool:
    try:
        view.apply([Batch(0, changes, position)])
    except Retriable:
        return False
    return True


def test_a_redrive_whose_write_failed_is_whole_the_second_time(
    settings: CassandraSettings, view: CassandraView
) -> None:
    dead: dict[str, Any] = {"status": Status.DEAD, "is_dead_letter": True, "completed_at": NOW, "last_error": None}
    view.apply([Batch(0, [begun("a", NOW, traceparent="00", **dead)], Position(1, 1))])
    redriven = [changed("a", status=Status.PENDING, version=2, completed_at=None, is_dead_letter=False)]
    with way(settings) as (road, by_road):
        writer = at_now(by_road)
        assert writer.task("a") is not None
        road.block()
        with pytest.raises(Retriable):
            writer.apply([Batch(0, redriven, Position(2, 1))])
        road.unblock()
        eventually(lambda: _applied(writer, redriven, Position(2, 1)), "the redrive")
        writer.close()
    row = view.task("a")
    assert row is not None
    assert (row.status, row.completed_at, row.traceparent) == (Status.PENDING, None, "00")
    assert ttls(view, settings)["tasks"] == {False}


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_only_what_has_ended_expires_and_then_all_of_it(view: CassandraView, settings: CassandraSettings) -> None:
    first = begun("a", NOW, traceparent="00-1", next_run_at=NOW)
    view.apply([Batch(0, [first], Position(1, 1))])
    view.apply(
        [Batch(0, [changed("a", {1: {"worker_id": "w", "started_at": NOW}}, status=Status.RUNNING)], Position(2, 1))]
    )
    assert ttls(view, settings) == {
        "tasks": {False},
        "attempts": {False},
        "tasks_by_tenant": {False},
        "dead_letters_by_queue": set(),
    }
    dead = changed("a", {1: {"finished_at": NOW}}, status=Status.DEAD, is_dead_letter=True, completed_at=NOW)
    view.apply([Batch(0, [dead], Position(3, 1))])
    expiring = {"tasks": {True}, "attempts": {True}, "tasks_by_tenant": {True}, "dead_letters_by_queue": {True}}
    assert ttls(view, settings) == expiring
    view.apply([Batch(0, [changed("a", is_dead_letter=False, version=4)], Position(4, 1))])
    assert ttls(view, settings) == expiring | {"dead_letters_by_queue": set()}
    live = changed("a", status=Status.PENDING, is_dead_letter=False, completed_at=None, version=5)
    view.apply([Batch(0, [live], Position(5, 1))])
    assert ttls(view, settings) == {
        "tasks": {False},
        "attempts": {False},
        "tasks_by_tenant": {False},
        "dead_letters_by_queue": set(),
    }


def test_the_time_until_it_expires_begins_at_the_end(view: CassandraView, settings: CassandraSettings) -> None:
    """Not at the write, which may be that of a view that is made again days later."""
    ended_at = NOW - 400 * 1_000_000
    view.apply([Batch(0, [begun("a", NOW - DAY, status=Status.SUCCEEDED, completed_at=ended_at)], Position(1, 1))])
    ((left_s,),) = view._session.run(f"SELECT TTL(status) FROM {settings.keyspace}.tasks", TIMEOUT_S)
    assert TTL_S - 400 - 60 < left_s <= TTL_S - 400


def test_an_ended_task_is_gone_when_its_time_is_over(settings: CassandraSettings, view: CassandraView) -> None:
    brief = CassandraView(msgspec.structs.replace(settings, ttl_s=1), now_us=lambda: NOW)
    brief.apply([Batch(0, [begun("a", NOW, status=Status.SUCCEEDED), begun("b", NOW)], Position(1, 1))])
    brief.close()
    eventually(lambda: view.task("a") is None, "the end of a's time")
    assert pages(view, TaskFilter(), 10) == ["b"]
    view.apply([Batch(0, [changed("a", version=2)], Position(2, 1))])
    assert view.task("a") is None


def test_old_attempts_are_let_go_of(view: CassandraView, settings: CassandraSettings) -> None:
    view.apply([Batch(0, [begun("a", NOW)], Position(1, 1))])
    for begin in range(1, 451, 30):
        attempts = {number: {"worker_id": f"w{number}"} for number in range(begin, begin + 30)}
        view.apply([Batch(0, [changed("a", attempts, attempt=begin + 29)], Position(begin + 30, 1))])
    row = view.task("a")
    assert row is not None
    assert [attempt.attempt for attempt in row.attempts] == list(range(351, 451))
    ((kept,),) = view._session.run(f"SELECT count(*) FROM {settings.keyspace}.attempts", TIMEOUT_S)
    assert kept == 150  # the last cut was at 400


# --- memory of the writer ---------------------------------------------------------------------------------------------


def test_tasks_that_are_not_remembered_are_read_back(
    view: CassandraView, settings: CassandraSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.cassandra.view.LIVES_MAX", 3)
    ids = [f"t{number}" for number in range(200)]
    view.apply([Batch(0, [begun(task_id, NOW, traceparent=task_id) for task_id in ids], Position(1, 1))])
    assert len(view._lives._lives) == 3
    started = [changed(task_id, {1: {"worker_id": "w"}}, version=2) for task_id in ids]
    view.apply([Batch(0, started, Position(2, 1))])
    view.apply([Batch(0, [changed(task_id, status=Status.SUCCEEDED, version=3) for task_id in ids], Position(3, 1))])
    assert view._lives._lives == {}
    assert view._lives._bytes == 0
    row = view.task("t7")
    assert row is not None
    assert (row.version, row.traceparent, len(row.attempts)) == (3, "t7", 1)
    assert ttls(view, settings)["tasks"] == ttls(view, settings)["attempts"] == {True}


# --- lists ------------------------------------------------------------------------------------------------------------


def test_lists_lead_through_months_hours_and_tenants(view: CassandraView, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(7)
    created: dict[str, tuple[int, str]] = {}
    for number in range(150):
        span = rng.choice([lists.SLICE_US, lists.HOUR_US, DAY, 300 * DAY])
        created[f"t{number:03}"] = NOW - rng.randrange(span), rng.choice(["x", "x", "y", f"rare-{number % 12}"])
    changes = [
        begun(task_id, at, spec=TaskSpec(task_type="a", tenant_id=tenant), status=Status.RUNNING)
        for task_id, (at, tenant) in created.items()
    ]
    view.apply([Batch(0, changes, Position(1, 1))])

    def expected(tenant: str | None, low: int = 0, high: int = 1 << 62) -> list[str]:
        found = [(-at, task_id) for task_id, (at, of) in created.items() if tenant in (None, of) and low <= at < high]
        return [task_id for _, task_id in sorted(found)]

    for tenant in (None, "x", "y", "nobody"):
        assert pages(view, TaskFilter(tenant_id=tenant), 17) == expected(tenant)
        assert pages(view, TaskFilter(tenant_id=tenant, status=Status.RUNNING), 100) == expected(tenant)
        low, high = NOW - 30 * DAY, NOW - lists.HOUR_US
        assert pages(view, TaskFilter(tenant_id=tenant, created_from=low, created_to=high), 9) == expected(
            tenant, low, high
        )
    monkeypatch.setattr(lists, "SLICES_MAX", 20)
    for wanted, right in ((TaskFilter(tenant_id="x"), expected("x")), (TaskFilter(), expected(None))):
        found, cursor, short = [], None, 0
        while True:
            page = view.tasks(wanted, 50, cursor)
            found += [row.task_id for row in page.rows]
            short += len(page.rows) < 50
            cursor = page.cursor
            if cursor is None:
                break
        assert found == right
        assert short > 1
        assert view.count(wanted) == len(right)


def test_dead_letters_of_all_queues_and_of_one(view: CassandraView) -> None:
    dead: dict[str, Any] = {"status": Status.DEAD, "is_dead_letter": True, "completed_at": NOW}
    changes = [
        begun(f"{queue}{number}", NOW - number * DAY, spec=TaskSpec(task_type="a", queue=queue), **dead)
        for queue in ("p", "q")
        for number in range(5)
    ]
    view.apply([Batch(0, changes, Position(1, 1))])
    assert pages(view, TaskFilter(is_dead_letter=True, queue="q"), 2) == [f"q{number}" for number in range(5)]
    everyone = [f"{queue}{number}" for number in range(5) for queue in ("p", "q")]
    assert pages(view, TaskFilter(is_dead_letter=True), 3) == everyone
    moved = TaskSpec(task_type="a", queue="p")
    view.apply([Batch(0, [changed("q2", spec=moved), changed("q3", is_dead_letter=False)], Position(2, 1))])
    assert pages(view, TaskFilter(is_dead_letter=True, queue="q"), 9) == ["q0", "q1", "q4"]
    assert "q2" in pages(view, TaskFilter(is_dead_letter=True, queue="p"), 9)
    assert view.count(TaskFilter(is_dead_letter=True, priority=Priority.LOW)) == 0


def test_large_payloads_are_written_and_listed(settings: CassandraSettings, view: CassandraView) -> None:
    """By a way that stands still for a moment: the driver refuses what does not fit the socket's buffer."""
    spec = TaskSpec(task_type="a", payload=b"x" * 256 * 1024)
    with way(settings) as (road, by_road):
        writer = at_now(by_road)
        writer.apply([Batch(0, [], Position(1, 1))])
        road.hold()
        threading.Timer(0.5, road.move).start()
        writer.apply([Batch(0, [begun(f"t{number}", NOW, spec=spec) for number in range(30)], Position(2, 1))])
        writer.close()
    page = view.tasks(TaskFilter(), 30)
    assert [row.spec for row in page.rows] == [spec] * 30


# --- the session ------------------------------------------------------------------------------------------------------


def test_an_outage_is_over_without_a_restart(settings: CassandraSettings, view: CassandraView) -> None:
    with way(settings) as (road, by_road):
        reader = at_now(by_road)
        assert reader.task("a") is None
        road.block()
        with pytest.raises(Retriable, match=r"check that it runs|within the time"):
            reader.task("a")
        with pytest.raises(Retriable):
            reader.apply([Batch(0, [begun("a", NOW)], Position(1, 1))])
        road.unblock()
        eventually(lambda: _applied(reader, [begun("a", NOW)], Position(1, 1)), "the write after the outage", 15.0)
        assert reader.task("a") == view.task("a") is not None
        reader.close()


def test_nobody_at_the_address(settings: CassandraSettings) -> None:
    with way(settings) as (road, by_road):
        road.block()
        with pytest.raises(Retriable, match=rf"port {road.port}.*check that it runs"):
            CassandraView(by_road)


def test_threads_end_with_the_view(settings: CassandraSettings) -> None:
    before = set(threading.enumerate())
    view = CassandraView(settings)
    assert view.task("nobody") is None
    assert set(threading.enumerate()) - before
    view.close()
    # The driver's loop is one for all sessions of a process.
    own = {thread for thread in threading.enumerate() if thread.name != "event_loop"}
    eventually(lambda: not [one for one in own - before if one.is_alive() and not one.daemon], "the end of threads")
    with pytest.raises(Fatal, match="closed"):
        view.task("a")


def test_after_a_fork_the_connection_is_refused(view: CassandraView) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            view.task("a")
            os.write(writing, b"it was used")
        except Fatal as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert b"fork" in os.read(reading, 1_000)
    os.close(reading)
    assert view.task("a") is None


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_projectors_that_overlap_leave_the_schedules_that_one_alone_would_leave(
    seed: int, view: CassandraView, settings: CassandraSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read everything, in other batches; now and then one of them starts anew. SQLite says what is right."""
    monkeypatch.setattr("infra.cassandra.schedules.PLACES_MAX", 2)
    rng = Random(seed)
    events, _ = schedule_history(rng, 150)
    broker = LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(1))
    writer, reader = broker.connect(commits=True), broker.connect()
    right = SqliteView(":memory:")
    views = [at_now(settings) for _ in range(2)]
    with structlog.testing.capture_logs():
        all_views: list[View] = [*views, right]
        projectors = [Projector(reader, one, CODEC, 1) for one in all_views]
        at = 0
        while at < len(events):
            size = rng.choice([1, 3, 20])
            writer.append([Entry(TASK_EVENTS, 0, None, CODEC.encode(event)) for event in events[at : at + size]])
            writer.poll(0)
            at += size
            for number in range(3):
                if rng.random() < 0.4:
                    projectors[number].step(0)
            if rng.random() < 0.1:
                number = rng.randrange(2)
                projectors[number].close()
                projectors[number] = Projector(reader, views[number], CODEC, 1)
        for projector in projectors:
            while projector.lag():
                projector.step(0)
    ids = {event.entity_id for event in events}
    assert view.schedule_rows(ids) == right.schedule_rows(ids), f"seed {seed}"
    for tenant, paused, declared_by in product((None, "x"), (None, True, False), (None, "app")):
        wanted = ScheduleFilter(tenant_id=tenant, is_paused=paused, declared_by=declared_by)
        assert schedule_pages(view, wanted, 2) == schedule_pages(right, wanted, 2), f"seed {seed}: {wanted}"
    for one in all_views:
        one.close()


def test_an_old_write_of_a_schedule_never_wins(view: CassandraView, other: CassandraView) -> None:
    view.apply([Batch(0, [], Position(1, 1), [scheduled("a"), scheduled("b")])])
    assert other.positions() == {0: Position(1, 1)}
    other.apply([Batch(0, [], Position(2, 1))])  # from now on it believes that it is alone
    moved = scheduled("b", "moved", version=3)
    view.apply([Batch(0, [], Position(4, 1), [ScheduleChange("a", None), moved])])
    other.apply([Batch(0, [], Position(3, 1), [scheduled("a", "x", version=2), scheduled("b", "x", version=2)])])
    assert view.schedule_rows(["a", "b"]) == {"b": moved.schedule}
    assert schedule_pages(view, ScheduleFilter(), 10) == ["b"]


def test_a_list_of_schedules_is_right_after_a_write_that_failed_half_way(
    settings: CassandraSettings, view: CassandraView
) -> None:
    """Rows are ahead of what the writer remembers of them: it must not go by that any more."""
    changes = [scheduled(f"s{number:03}", version=1) for number in range(500)]
    with way(settings) as (road, by_road):
        writer = at_now(by_road)
        writer.apply([Batch(0, [], Position(1, 1), changes)])
        paused = [scheduled(f"s{number:03}", version=2, is_paused=True) for number in range(500)]
        road.is_deaf = True  # what is written arrives, and nobody learns of it
        with pytest.raises(Retriable):
            writer.apply([Batch(0, [], Position(2, 1), paused)])
        road.unblock()
        view.apply([Batch(0, [], Position(2, 1), paused)])
        resumed = [scheduled(f"s{number:03}", version=3) for number in range(500)]
        eventually(lambda: _applies(writer, Batch(0, [], Position(3, 1), resumed)), "the write after the outage", 30.0)
        writer.close()
    assert len(schedule_pages(view, ScheduleFilter(is_paused=False), 100)) == 500
    assert schedule_pages(view, ScheduleFilter(is_paused=True), 100) == []


def _applies(view: View, batch: Batch) -> bool:
    try:
        view.apply([batch])
    except Retriable:
        return False
    return True


def test_a_list_is_written_only_where_a_place_changed(view: CassandraView, settings: CassandraSettings) -> None:
    view.apply([Batch(0, [], Position(1, 1), [scheduled("a"), scheduled("b")])])
    view.apply([Batch(0, [], Position(2, 1), [scheduled("a", version=2, fired=1), scheduled("b", is_paused=True)])])
    rows = view._session.run(
        f"SELECT schedule_id, WRITETIME(is_paused) FROM {settings.keyspace}.schedules_by_tenant", TIMEOUT_S
    )
    assert sorted(rows) == [("a", 1), ("b", 2)]


def test_a_list_of_schedules_that_looked_at_many_tenants_in_vain_goes_on(
    view: CassandraView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.cassandra.schedules.TENANTS_MAX", 3)
    changes = [scheduled(f"s{number:02}", tenant=f"t{number:02}", is_paused=number > 7) for number in range(10)]
    view.apply([Batch(0, [], Position(1, 1), changes)])
    first = view.schedules(ScheduleFilter(is_paused=True), 10)
    assert first.rows == [] and first.cursor is not None
    assert schedule_pages(view, ScheduleFilter(is_paused=True), 10) == ["s08", "s09"]
    assert schedule_pages(view, ScheduleFilter(), 2) == [f"s{number:02}" for number in range(10)]


# --- the schema -------------------------------------------------------------------------------------------------------


def test_a_view_without_its_schema_says_what_to_run() -> None:
    with pytest.raises(Fatal, match="tidewheel schema apply"):
        CassandraView(reachable(keyspace="nobody_made_this"))
    with keyspace() as settings:
        with session(settings) as opened:
            opened.run(f"DROP TABLE {settings.keyspace}.schema_version", TIMEOUT_S)
        with pytest.raises(Fatal, match="tidewheel schema apply"):
            CassandraView(settings)


def test_applying_the_schema_again_changes_nothing_and_rows_stay() -> None:
    with keyspace() as settings:
        view = CassandraView(settings)
        view.apply([Batch(0, [begun("a")], Position(1, 1))])
        report = apply_schema(settings)
        assert (report.before, report.after) == (schema.VERSION, schema.VERSION)
        assert "datacenter1 1" in report.replication
        assert view.task("a") is not None
        with session(settings) as opened:
            opened.run(f"UPDATE {settings.keyspace}.schema_version SET version = 0 WHERE id = 1", TIMEOUT_S)
        with pytest.raises(Fatal, match="tidewheel schema apply"):
            CassandraView(settings)
        assert apply_schema(settings).before == 0
        assert view.task("a") is not None
        view.close()


def test_a_schema_without_schedules_is_brought_up_to_date() -> None:
    with keyspace() as settings:
        view = CassandraView(settings)
        view.apply([Batch(0, [begun("a")], Position(1, 1))])
        view.close()
        with session(settings) as opened:
            for table in ("schedules", "schedules_by_tenant"):
                opened.run(f"DROP TABLE {settings.keyspace}.{table}", TIMEOUT_S)
            opened.run(f"UPDATE {settings.keyspace}.schema_version SET version = 1 WHERE id = 1", TIMEOUT_S)
        with pytest.raises(Fatal, match=r"schema 1, this release needs 2: .*tidewheel schema apply"):
            CassandraView(settings)
        report = apply_schema(settings)
        assert (report.before, report.after) == (1, 2)
        view = CassandraView(settings)
        assert view.task("a") is not None
        view.apply([Batch(0, [], Position(2, 1), [scheduled("s")])])
        assert schedule_pages(view, ScheduleFilter(), 10) == ["s"]
        view.close()


def test_the_schema_of_a_newer_release_is_left_alone() -> None:
    with keyspace() as settings:
        with session(settings) as opened:
            opened.run(f"UPDATE {settings.keyspace}.schema_version SET version = 99 WHERE id = 1", TIMEOUT_S)
        for attempt in (apply_schema, CassandraView):
            with pytest.raises(Fatal, match="schema 99"):
                attempt(settings)


def test_two_that_apply_the_schema_at_the_same_time() -> None:
    with keyspace() as settings:
        with session(settings) as opened:
            opened.run(f"DROP KEYSPACE {settings.keyspace}", TIMEOUT_S)
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(apply_schema, settings) for _ in range(2)]:
                assert done.result(TIMEOUT_S).after == schema.VERSION
        CassandraView(settings).close()
