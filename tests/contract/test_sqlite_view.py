"""The view in SQLite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.sqlite import SqliteView
from scheduler.ports import Batch, Position, TaskFilter
from schemas.errors import Fatal
from tests.contract.view import ViewContract, begun, changed, scheduled


class TestSqliteView(ViewContract):
    """Over a file and over memory."""

    @pytest.fixture(params=["file", "memory"])
    def view(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteView]:
        view = SqliteView(":memory:" if request.param == "memory" else tmp_path / "view.db")
        yield view
        view.close()


@pytest.fixture(params=["file", "memory"])
def view(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteView]:
    view = SqliteView(":memory:" if request.param == "memory" else tmp_path / "view.db")
    yield view
    view.close()


def test_rows_and_positions_survive_a_restart(tmp_path: Path) -> None:
    first = SqliteView(tmp_path / "view.db")
    first.apply([Batch(0, [begun("a")], Position(5, 2))])
    row = first.task("a")
    first.close()
    second = SqliteView(tmp_path / "view.db")
    assert second.task("a") == row
    assert dict(second.positions()) == {0: Position(5, 2)}
    second.close()


def test_a_rebuilt_view_takes_the_place_of_the_old_one_at_once(view: SqliteView) -> None:
    view.apply([Batch(0, [begun("old")], Position(9, 2))])
    fresh = view.fresh()
    assert dict(fresh.positions()) == {}
    fresh.apply([Batch(0, [begun("new")], Position(1, 1))])
    assert view.task("old") is not None
    assert view.task("new") is None
    view.replace_with(fresh)
    assert view.task("old") is None
    assert view.task("new") is not None
    assert dict(view.positions()) == {0: Position(1, 1)}
    view.apply([Batch(0, [begun("newer")], Position(2, 1))])
    assert view.count(TaskFilter()) == 2


def test_a_rebuild_that_was_given_up_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    view = SqliteView(tmp_path / "view.db")
    given_up = view.fresh()
    given_up.apply([Batch(0, [begun("half")], Position(1, 1))])
    given_up.close()
    fresh = view.fresh()
    assert fresh.task("half") is None
    view.replace_with(fresh)
    view.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["view.db"]


def test_readers_see_whole_batches_while_the_writer_writes_and_the_file_is_replaced(view: SqliteView) -> None:
    ids = [f"t{number}" for number in range(20)]
    view.apply([Batch(0, [begun(task_id) for task_id in ids], Position(1, 1))])
    is_over = threading.Event()
    faults: list[object] = []

    def read() -> None:
        while not is_over.is_set():
            try:
                versions = {row.version for row in view.tasks(TaskFilter(), 100).rows}
                if len(versions) != 1:
                    faults.append(versions)
            except Exception as error:
                faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(2, 60):
        view.apply([Batch(0, [changed(task_id, version=version) for task_id in ids], Position(version, 1))])
        if version % 20 == 0:
            fresh = view.fresh()
            fresh.apply([Batch(0, [begun(task_id, version=version) for task_id in ids], Position(version, 1))])
            view.replace_with(fresh)
    is_over.set()
    for reader in readers:
        reader.join()
    assert faults == []


def test_a_reader_that_is_second_to_an_idle_connection_opens_one(tmp_path: Path) -> None:
    class Raced(list[Any]):
        def __len__(self) -> int:
            return 1  # as it was when this reader looked; the other one has taken it since

    view = SqliteView(tmp_path / "view.db")
    view.apply([Batch(0, [begun("a")], Position(1, 1))])
    view._idle = Raced()
    assert view.task("a") is not None
    view.close()


def test_a_full_disk_is_reported_with_what_to_do_and_changes_nothing(tmp_path: Path) -> None:
    view = SqliteView(tmp_path / "view.db")
    view.apply([Batch(0, [begun("a")], Position(1, 1))])
    (pages,) = view._writer.execute("PRAGMA page_count").fetchone()
    view._writer.execute(f"PRAGMA max_page_count = {pages}").fetchone()
    with pytest.raises(Fatal, match="free some space"):
        view.apply([Batch(0, [begun(f"t{number}") for number in range(1_000)], Position(2, 1))])
    assert view.count(TaskFilter()) == 1
    assert dict(view.positions()) == {0: Position(1, 1)}
    view.close()


def test_a_view_of_another_release_is_refused(tmp_path: Path) -> None:
    view = SqliteView(tmp_path / "view.db")
    view._writer.execute("PRAGMA user_version = 99")
    view.close()
    with pytest.raises(Fatal, match="format 99"):
        SqliteView(tmp_path / "view.db")


def test_a_view_of_a_release_without_schedules_is_brought_up_to_date(tmp_path: Path) -> None:
    view = SqliteView(tmp_path / "view.db")
    view.apply([Batch(0, [begun("a")], Position(5, 2))])
    view._writer.executescript("DROP TABLE schedules; PRAGMA user_version = 1;")
    view.close()
    for _ in range(2):
        view = SqliteView(tmp_path / "view.db")
        assert view.task("a") is not None
        assert dict(view.positions())[0].epoch == 2
        view.apply([Batch(0, [], Position(6, 2), [scheduled("s")])])
        assert view.schedule("s") is not None
        view.close()


def test_lists_of_schedules_use_an_index_for_their_order(view: SqliteView) -> None:
    for condition in ("", "WHERE tenant_id = ''", "WHERE is_paused = 1", "WHERE tenant_id = '' AND declared_by = ''"):
        order = "ORDER BY tenant_id, name, schedule_id LIMIT 5"
        sql = f"EXPLAIN QUERY PLAN SELECT body FROM schedules {condition} {order}"
        plan = " ".join(row[3] for row in view._writer.execute(sql))
        assert "USING INDEX schedules_by_name" in plan
        assert "TEMP B-TREE" not in plan


def test_lists_use_an_index_for_their_order(view: SqliteView) -> None:
    for condition in ("", "WHERE status = ''", "WHERE queue = ''", "WHERE tenant_id = ''", "WHERE is_dead_letter = 1"):
        sql = f"EXPLAIN QUERY PLAN SELECT body FROM tasks {condition} ORDER BY created_at DESC, task_id LIMIT 5"
        plan = " ".join(row[3] for row in view._writer.execute(sql))
        assert "USING INDEX" in plan
        assert "TEMP B-TREE" not in plan
