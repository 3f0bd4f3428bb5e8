"""The contract of `ports.View`, for any adapter."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import msgspec
import pytest

from scheduler.ports import (
    AttemptOutcome,
    AttemptRow,
    Batch,
    Position,
    ScheduleChange,
    ScheduleFilter,
    TaskChange,
    TaskFilter,
    TaskRow,
    View,
)
from schemas.errors import Fatal
from schemas.messages import ErrorKind, Priority, Schedule, ScheduleSpec, Status, TaskError, TaskSpec

ERROR = TaskError(kind=ErrorKind.RAISED, type="ValueError", message="no", bases=("Exception",), traceback="…\x00")


def begun(task_id: str, created_at: int = 1, *, spec: TaskSpec | None = None, **columns: Any) -> TaskChange:
    """The change of a task that was submitted."""
    first = {"status": Status.PENDING, "version": 1, "created_at": created_at, "updated_at": created_at}
    spec = spec or TaskSpec(task_type="send")
    return TaskChange(task_id=task_id, columns={"spec": spec} | first | columns, attempts={}, is_new=True)


def changed(task_id: str, attempts: dict[int, dict[str, Any]] | None = None, **columns: Any) -> TaskChange:
    """The change of a task that is there."""
    return TaskChange(task_id=task_id, columns=columns, attempts=attempts or {})


def scheduled(
    schedule_id: str, name: str = "nightly", tenant: str = "default", declared_by: str | None = None, **columns: Any
) -> ScheduleChange:
    """The change of a schedule that is there."""
    task = TaskSpec(task_type="send", payload=b"\x00\xff", tenant_id=tenant)
    spec = ScheduleSpec(name=name, task=task, cron_expression="0 3 * * *", declared_by=declared_by)
    first: dict[str, Any] = {"version": 1, "created_at": 1, "updated_at": 1, "next_fire_at": 7, "tzdata": "2025b"}
    return ScheduleChange(schedule_id, Schedule(schedule_id=schedule_id, spec=spec, **(first | columns)))


class ViewContract:
    """Every adapter of `View` passes these; a subclass gives the fixture `view`, empty."""

    def test_an_empty_view(self, view: View) -> None:
        assert dict(view.positions()) == {}
        assert view.task("nobody") is None
        assert view.rows(["nobody"]) == {}
        assert view.rows([]) == {}
        assert view.tasks(TaskFilter(), 10) == ([], None)
        assert view.count(TaskFilter()) == 0

    def test_several_rows_are_read_together(self, view: View) -> None:
        view.apply([Batch(0, [begun(f"t{number}", number) for number in range(50)], Position(1, 1))])
        wanted = ["t3", "t49", "nobody", "t0"]
        assert view.rows(wanted) == {task_id: view.task(task_id) for task_id in wanted if task_id != "nobody"}

    def test_a_row_is_what_its_changes_made_of_it(self, view: View) -> None:
        spec = TaskSpec(
            task_type="send", payload=b"\x00\xff", metadata={"k": "v ü"}, priority=Priority.HIGH, scheduled_at=7
        )
        view.apply([Batch(0, [begun("a", 5, spec=spec, next_run_at=7, traceparent="00-1")], Position(1, 1))])
        assert view.task("a") == TaskRow(
            task_id="a",
            spec=spec,
            status=Status.PENDING,
            version=1,
            created_at=5,
            updated_at=5,
            next_run_at=7,
            traceparent="00-1",
        )
        started = {"worker_id": "w1", "started_at": 8}
        view.apply(
            [Batch(0, [changed("a", {1: started}, status=Status.RUNNING, version=2, attempt=1)], Position(2, 1))]
        )
        failed = {"finished_at": 9, "outcome": AttemptOutcome.FAILED, "error": ERROR}
        view.apply(
            [
                Batch(
                    0,
                    [changed("a", {1: failed}, status=Status.DEAD, version=3, next_run_at=None, last_error=ERROR)],
                    Position(3, 1),
                )
            ]
        )
        attempt = AttemptRow(
            attempt=1, worker_id="w1", started_at=8, finished_at=9, outcome=AttemptOutcome.FAILED, error=ERROR
        )
        row = view.task("a")
        assert row is not None
        assert row.attempts == (attempt,)
        assert (row.status, row.version, row.next_run_at, row.attempt) == (Status.DEAD, 3, None, 1)
        assert row.last_error == ERROR
        assert row.spec == spec

    def test_attempts_come_in_order(self, view: View) -> None:
        view.apply([Batch(0, [begun("a")], Position(1, 1))])
        for number in (3, 1, 12, 2):
            view.apply([Batch(0, [changed("a", {number: {"worker_id": f"w{number}"}})], Position(1 + number * 10, 1))])
            view.apply([Batch(0, [changed("a", {number: {"finished_at": number}})], Position(2 + number * 10, 1))])
        row = view.task("a")
        assert row is not None
        assert [attempt.attempt for attempt in row.attempts] == [3, 12]

    def test_several_attempts_in_one_change(self, view: View) -> None:
        view.apply([Batch(0, [begun("a")], Position(1, 1))])
        view.apply([Batch(0, [changed("a", {2: {"worker_id": "w2"}, 1: {"worker_id": "w1"}})], Position(2, 1))])
        view.apply([Batch(0, [changed("a", {3: {"worker_id": "w3"}, 2: {"worker_id": None}})], Position(3, 1))])
        row = view.task("a")
        assert row is not None
        assert [(attempt.attempt, attempt.worker_id) for attempt in row.attempts] == [(1, "w1"), (2, None), (3, "w3")]

    def test_of_an_earlier_task_under_the_same_id_nothing_stays(self, view: View) -> None:
        view.apply([Batch(0, [begun("a", worker_id="w", is_dead_letter=True)], Position(1, 1))])
        view.apply([Batch(0, [changed("a", {1: {"worker_id": "w"}, 2: {"worker_id": "w"}})], Position(2, 1))])
        again = begun("a", 9)
        again.attempts = {1: {"worker_id": "x"}}
        view.apply([Batch(0, [again], Position(3, 1))])
        row = view.task("a")
        assert row is not None
        assert (row.created_at, row.worker_id, row.is_dead_letter) == (9, None, False)
        assert row.attempts == (AttemptRow(attempt=1, worker_id="x"),)
        assert view.count(TaskFilter()) == 1

    def test_what_was_applied_is_not_applied_again(self, view: View) -> None:
        view.apply([Batch(0, [begun("a")], Position(5, 2))])
        view.apply([Batch(0, [changed("a", version=7)], Position(5, 2))])
        view.apply([Batch(0, [changed("a", version=8), begun("b")], Position(4, 2))])
        row = view.task("a")
        assert row is not None
        assert row.version == 1
        assert view.task("b") is None
        assert dict(view.positions()) == {0: Position(5, 2)}

    def test_partitions_have_positions_of_their_own(self, view: View) -> None:
        view.apply([Batch(0, [begun("a")], Position(5, 2))])
        view.apply([Batch(3, [begun("b")], Position(1, 1))])
        view.apply([Batch(3, [], Position(2, 4))])
        assert dict(view.positions()) == {0: Position(5, 2), 3: Position(2, 4)}

    def test_rows_and_position_move_together_or_not_at_all(self, view: View) -> None:
        view.apply([Batch(0, [begun("a")], Position(1, 1))])
        with pytest.raises(TypeError):
            view.apply(
                [Batch(0, [changed("a", version=2), begun("b"), changed("a", no_such_column=1)], Position(2, 1))]
            )
        row = view.task("a")
        assert row is not None
        assert row.version == 1
        assert view.task("b") is None
        assert dict(view.positions()) == {0: Position(1, 1)}

    def test_a_change_of_a_task_that_never_began_shows_nothing(self, view: View) -> None:
        view.apply([Batch(0, [changed("a", {1: {"worker_id": "w"}}, status=Status.RUNNING)], Position(1, 1))])
        assert view.task("a") is None
        assert view.tasks(TaskFilter(), 10).rows == []

    def test_large_runs_of_changes(self, view: View) -> None:
        ids = [f"task-{number}" for number in range(3_000)]
        view.apply([Batch(0, [begun(task_id, number) for number, task_id in enumerate(ids)], Position(1, 1))])
        view.apply(
            [Batch(0, [changed(task_id, {1: {"worker_id": task_id}}, version=2) for task_id in ids], Position(2, 1))]
        )
        assert view.count(TaskFilter()) == 3_000
        for task_id in (ids[0], ids[1_234], ids[-1]):
            row = view.task(task_id)
            assert row is not None
            assert (row.version, row.attempts) == (2, (AttemptRow(attempt=1, worker_id=task_id),))

    # --- lists --------------------------------------------------------------------------------------------------------

    def test_pages_are_newest_first_then_by_id_and_meet_each_row_once(self, view: View) -> None:
        created = {f"t{number:02}": number // 4 for number in range(30)}
        view.apply([Batch(0, [begun(task_id, at) for task_id, at in created.items()], Position(1, 1))])
        expected = sorted(created, key=lambda task_id: (-created[task_id], task_id))
        for limit in (1, 4, 7, 30, 31):
            assert pages(view, TaskFilter(), limit) == expected

    def test_a_page_holds_rows_without_attempts(self, view: View) -> None:
        view.apply([Batch(0, [begun("a")], Position(1, 1))])
        view.apply([Batch(0, [changed("a", {1: {"worker_id": "w"}})], Position(2, 1))])
        (row,) = view.tasks(TaskFilter(), 10).rows
        assert row.attempts == ()
        assert msgspec.structs.replace(row, attempts=(AttemptRow(attempt=1, worker_id="w"),)) == view.task("a")

    def test_rows_that_come_between_two_pages_disturb_no_page(self, view: View) -> None:
        view.apply([Batch(0, [begun(f"t{number}", number) for number in range(10)], Position(1, 1))])
        page = view.tasks(TaskFilter(), 5)
        view.apply([Batch(0, [begun(f"u{number}", 100) for number in range(10)], Position(2, 1))])
        rest = view.tasks(TaskFilter(), 100, page.cursor).rows
        assert [row.task_id for row in rest] == ["t4", "t3", "t2", "t1", "t0"]

    def test_each_filter_and_all_of_them_together(self, view: View) -> None:
        changes = []
        rows: dict[str, TaskRow] = {}
        choices = itertools.product(("x", "y"), ("q1", "q2"), ("a", "b"), (Priority.HIGH, Priority.LOW), Status, (0, 1))
        for number, (tenant, queue, task_type, priority, status, dead) in enumerate(choices):
            spec = TaskSpec(task_type=task_type, queue=queue, tenant_id=tenant, priority=priority)
            columns = {"status": status, "is_dead_letter": bool(dead)}
            changes.append(begun(f"t{number:03}", number, spec=spec, **columns))
            rows[f"t{number:03}"] = TaskRow(task_id=f"t{number:03}", **changes[-1].columns)
        view.apply([Batch(0, changes, Position(1, 1))])
        for wanted in (
            TaskFilter(tenant_id="x"),
            TaskFilter(queue="q2"),
            TaskFilter(task_type="a"),
            TaskFilter(priority=Priority.LOW),
            TaskFilter(status=Status.RUNNING),
            TaskFilter(is_dead_letter=True),
            TaskFilter(is_dead_letter=False),
            TaskFilter(created_from=10, created_to=20),
            TaskFilter(created_from=20, created_to=10),
            TaskFilter(tenant_id="nobody"),
            TaskFilter(tenant_id="x", status=Status.DEAD, is_dead_letter=True),
            TaskFilter(
                tenant_id="y",
                queue="q1",
                task_type="b",
                priority=Priority.HIGH,
                status=Status.DEAD,
                created_from=5,
                created_to=1_000,
                is_dead_letter=True,
            ),
        ):
            expected = [task_id for task_id, row in reversed(rows.items()) if matches(row, wanted)]
            assert pages(view, wanted, 7) == expected, wanted
            assert view.count(wanted) == len(expected)

    def test_filters_follow_what_changed(self, view: View) -> None:
        view.apply([Batch(0, [begun("a", is_dead_letter=True, status=Status.DEAD)], Position(1, 1))])
        moved = TaskSpec(task_type="send", priority=Priority.LOW)
        view.apply([Batch(0, [changed("a", is_dead_letter=False, status=Status.PENDING, spec=moved)], Position(2, 1))])
        assert view.count(TaskFilter(is_dead_letter=True)) == view.count(TaskFilter(status=Status.DEAD)) == 0
        assert view.count(TaskFilter(status=Status.PENDING, priority=Priority.LOW)) == 1

    @pytest.mark.parametrize(
        "cursor", ["", "x", "🙂", "MTpub3RhbnVtYmVyOmE", "===", "AAAA", "MTo5OTk5OTk5OTk5OTk5OTk5OTk5OTk6YQ"]
    )
    def test_a_cursor_that_is_not_ours_is_refused(self, view: View, cursor: str) -> None:
        with pytest.raises(ValueError, match="cursor"):
            view.tasks(TaskFilter(), 10, cursor)

    # --- schedules ----------------------------------------------------------------------------------------------------

    def test_a_view_without_schedules(self, view: View) -> None:
        assert view.schedule("nobody") is None
        assert view.schedule_rows([]) == view.schedule_rows(["nobody"]) == {}
        assert view.schedules(ScheduleFilter(), 10) == ([], None)

    def test_a_schedule_is_what_it_was_changed_to_last(self, view: View) -> None:
        first, other, fired = scheduled("a", "täglich"), scheduled("b"), scheduled("a", "täglich", version=2, fired=1)
        view.apply([Batch(0, [begun("t")], Position(1, 1), [first, other])])
        assert view.schedule("a") == first.schedule
        view.apply([Batch(0, [], Position(2, 1), [fired])])
        assert view.schedule("a") == fired.schedule
        assert view.schedule_rows(["b", "nobody", "a"]) == {"a": fired.schedule, "b": other.schedule}
        assert schedule_pages(view, ScheduleFilter(), 10) == ["b", "a"]
        assert view.schedules(ScheduleFilter(), 10).rows[1] == fired.schedule
        assert view.task("t") is not None

    def test_a_schedule_that_was_deleted_is_gone_until_it_is_created_again(self, view: View) -> None:
        gone = ScheduleChange("a", None)
        view.apply([Batch(0, [], Position(1, 1), [scheduled("a"), scheduled("b"), ScheduleChange("never", None)])])
        view.apply([Batch(0, [], Position(2, 1), [gone])])
        assert view.schedule("a") is None
        assert schedule_pages(view, ScheduleFilter(), 10) == ["b"]
        view.apply([Batch(0, [], Position(3, 1), [gone])])
        again = scheduled("a", "later", created_at=9)
        view.apply([Batch(0, [], Position(4, 1), [again])])
        assert view.schedule("a") == again.schedule
        assert schedule_pages(view, ScheduleFilter(), 10) == ["a", "b"]

    def test_schedules_of_a_batch_that_was_applied_are_not_applied_again(self, view: View) -> None:
        view.apply([Batch(0, [], Position(5, 1), [scheduled("a")])])
        view.apply([Batch(0, [], Position(5, 1), [scheduled("a", version=2), scheduled("b")])])
        view.apply([Batch(1, [], Position(1, 1), [scheduled("c")])])
        assert view.schedule("a") == scheduled("a").schedule
        assert schedule_pages(view, ScheduleFilter(), 10) == ["a", "c"]

    def test_schedules_are_in_the_order_of_tenants_names_and_ids(self, view: View) -> None:
        names = itertools.product(("x", "y", "ÿ"), ("B", "a", "a b", "a:b", "ä", "🙂"), range(3))
        keys = [(tenant, name, f"s{hash_of(tenant, name, number)}") for tenant, name, number in names]
        changes = [scheduled(schedule_id, name, tenant) for tenant, name, schedule_id in keys]
        view.apply([Batch(0, [], Position(1, 1), changes[::-1])])
        for limit in (1, 4, 7, len(keys), len(keys) + 1):
            assert schedule_pages(view, ScheduleFilter(), limit) == [key[2] for key in sorted(keys)], limit
            wanted = ScheduleFilter(tenant_id="y")
            assert schedule_pages(view, wanted, limit) == [key[2] for key in sorted(keys) if key[0] == "y"], limit

    def test_each_filter_of_schedules_and_all_of_them_together(self, view: View) -> None:
        changes = [
            scheduled(f"s{number:03}", f"n{number:03}", tenant, declared_by, is_paused=bool(paused))
            for number, (tenant, declared_by, paused, _) in enumerate(
                itertools.product(("x", "y"), (None, "app", "other"), (0, 1), range(5))
            )
        ]
        view.apply([Batch(0, [], Position(1, 1), changes)])
        for tenant, declared_by, paused in itertools.product(
            (None, "x", "nobody"), (None, "app", "none"), (None, True, False)
        ):
            wanted = ScheduleFilter(tenant_id=tenant, declared_by=declared_by, is_paused=paused)
            expected = sorted(
                (row.spec.task.tenant_id, schedule_id)
                for schedule_id, row in changes
                if row is not None
                and tenant in (None, row.spec.task.tenant_id)
                and declared_by in (None, row.spec.declared_by)
                and paused in (None, row.is_paused)
            )
            assert schedule_pages(view, wanted, 4) == [schedule_id for _, schedule_id in expected], wanted

    def test_lists_of_schedules_follow_what_changed(self, view: View) -> None:
        view.apply([Batch(0, [], Position(1, 1), [scheduled("a", "m"), scheduled("b", "n", declared_by="app")])])
        moved = [scheduled("a", "z", version=2, is_paused=True), scheduled("b", "n", "y", version=2)]
        view.apply([Batch(0, [], Position(2, 1), moved)])
        assert schedule_pages(view, ScheduleFilter(), 1) == ["a", "b"]
        assert schedule_pages(view, ScheduleFilter(tenant_id="default"), 10) == ["a"]
        assert schedule_pages(view, ScheduleFilter(is_paused=True), 10) == ["a"]
        assert schedule_pages(view, ScheduleFilter(declared_by="app"), 10) == []
        view.apply([Batch(0, [], Position(3, 1), [scheduled("a", "z", version=3)])])
        assert schedule_pages(view, ScheduleFilter(is_paused=False), 10) == ["a", "b"]

    def test_schedules_that_come_between_two_pages_disturb_no_page(self, view: View) -> None:
        view.apply([Batch(0, [], Position(1, 1), [scheduled(f"s{number}", f"n{number}") for number in range(10)])])
        page = view.schedules(ScheduleFilter(), 5)
        news = [ScheduleChange("s4", None), ScheduleChange("s7", None), scheduled("new", "a")]
        view.apply([Batch(0, [], Position(2, 1), news)])
        rest = view.schedules(ScheduleFilter(), 100, page.cursor).rows
        assert [row.schedule_id for row in rest] == ["s5", "s6", "s8", "s9"]

    def test_many_schedules_in_one_batch(self, view: View) -> None:
        changes = [scheduled(f"s{number:04}", f"n{number:04}") for number in range(3_000)]
        view.apply([Batch(0, [], Position(1, 1), changes)])
        view.apply([Batch(0, [], Position(2, 1), [ScheduleChange(f"s{number:04}", None) for number in range(2_000)])])
        assert schedule_pages(view, ScheduleFilter(), 700) == [f"s{number}" for number in range(2_000, 3_000)]
        assert view.schedule_rows(f"s{number:04}" for number in range(1_990, 2_010)).keys() == {
            f"s{number}" for number in range(2_000, 2_010)
        }

    @pytest.mark.parametrize("cursor", ["", "x", "🙂", "===", "W10", "WyJhIl0", "bnVsbA", "WyJhIiwiYiIsMV0"])
    def test_a_cursor_of_schedules_that_is_not_ours_is_refused(self, view: View, cursor: str) -> None:
        with pytest.raises(ValueError, match="cursor"):
            view.schedules(ScheduleFilter(), 10, cursor)

    def test_close_may_be_repeated(self, view: View) -> None:
        view.close()
        view.close()
        with pytest.raises(Fatal, match="closed"):
            view.task("a")


def pages(view: View, wanted: TaskFilter, limit: int) -> list[str]:
    """The ids of all pages of a list."""
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page = view.tasks(wanted, limit, cursor)
        assert len(page.rows) <= limit
        ids += [row.task_id for row in page.rows]
        if page.cursor is None:
            return ids
        assert len(page.rows) == limit
        cursor = page.cursor


def hash_of(*parts: object) -> int:
    """A number that is not in the order of the parts."""
    return zlib.crc32(repr(parts).encode())


def schedule_pages(view: View, wanted: ScheduleFilter, limit: int) -> list[str]:
    """The ids of all pages of a list of schedules."""
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page = view.schedules(wanted, limit, cursor)
        assert len(page.rows) <= limit
        ids += [row.schedule_id for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            return ids


def matches(row: TaskRow, wanted: TaskFilter) -> bool:
    """The filter, said once more."""
    return all(
        asked is None or asked == there
        for asked, there in (
            (wanted.tenant_id, row.spec.tenant_id),
            (wanted.status, row.status),
            (wanted.queue, row.spec.queue),
            (wanted.task_type, row.spec.task_type),
            (wanted.priority, row.spec.priority),
            (wanted.is_dead_letter, row.is_dead_letter),
        )
    ) and (wanted.created_from or 0) <= row.created_at < (wanted.created_to or 1 << 62)
