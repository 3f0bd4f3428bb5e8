"""What the view shows of schedules is the fold of their events: whatever is lost, doubled, or applied again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random

import pytest

from scheduler.ports import Batch, ScheduleChange, ScheduleFilter
from scheduler.projector import SCHEDULES_KNOWN_MAX
from scheduler.schedule_fold import Gone, schedule_changes_of
from schemas.errors import Retriable
from schemas.messages import (
    Event,
    EventBody,
    FireCause,
    Schedule,
    ScheduleCreated,
    ScheduleDeleted,
    ScheduleFired,
    SchedulePaused,
    ScheduleUpdated,
    ShardOpened,
)
from tests.contract.view import schedule_pages
from tests.histories import START, history
from tests.schedule_histories import schedule_history, spec
from tests.unit.test_projector import PARTITIONS, SUBMITTED, Bench, Shaky, bench

__all__ = ["bench"]

SPEC = spec(Random(1))
CREATED = ScheduleCreated(spec=SPEC, next_fire_at=START + 60, tzdata="1")
FIRED = ScheduleFired(nominal_at=START + 60, task_id="s.1", cause=FireCause.TIME, next_fire_at=START + 120)
DELETED = ScheduleDeleted()


def event(body: EventBody, version: int, *, at: int = 0, epoch: int = 1, schedule_id: str = "s") -> Event:
    return Event(entity_id=schedule_id, tenant_id="x", version=version, epoch=epoch, at=START + at, body=body)


def assert_shows(bench: Bench, schedules: dict[str, Schedule]) -> None:
    shown = {schedule_id: bench.view.schedule(schedule_id) for schedule_id in schedules}
    assert shown == schedules
    assert sorted(schedule_pages(bench.view, ScheduleFilter(), 2)) == sorted(schedules)


# --- the fold ---------------------------------------------------------------------------------------------------------


def test_a_schedule_is_shown_without_its_runs(bench: Bench) -> None:
    bench.append(event(CREATED, 1), event(FIRED, 2, at=61), event(FIRED, 3, at=62))
    bench.catch_up()
    shown = bench.view.schedule("s")
    assert (shown.version, shown.fired, shown.last_fired_at, shown.next_fire_at) == (3, 2, START + 60, START + 120)
    assert (shown.due, shown.running) == ((), ())


@pytest.mark.parametrize("seed", range(20))
def test_schedules_are_what_evolve_says_however_the_events_are_cut(seed: int, bench: Bench) -> None:
    rng = Random(seed)
    events, schedules = schedule_history(rng, 300)
    tasks, _ = history(rng, 300)
    at = 0
    while at < len(events):
        size = rng.choice([1, 2, 7, 50])
        mixed = [one for pair in zip(events[at : at + size], tasks[at : at + size], strict=True) for one in pair]
        bench.append(*mixed)
        at += size
        bench.catch_up()
        if rng.random() < 0.2:
            bench.projector.close()
            bench.begin()
    assert_shows(bench, schedules)
    assert bench.projector.skipped == {}


@pytest.mark.parametrize("seed", range(20))
def test_doubled_events_of_schedules_change_nothing(seed: int, bench: Bench) -> None:
    """A producer that lost its id sends what was in flight again, from some event on and in order."""
    rng = Random(seed)
    events, schedules = schedule_history(rng, 200)
    at = 0
    while at < len(events):
        size = rng.choice([1, 5, 30])
        bench.append(*events[at : at + size])
        bench.catch_up()
        if rng.random() < 0.5:
            bench.projector.close()
            bench.begin()
        if rng.random() < 0.5:
            bench.append(*events[max(0, at - rng.randrange(20)) : at + size])
        at += size
        bench.catch_up()
    assert_shows(bench, schedules)


def test_what_came_before_a_deletion_and_comes_again_brings_nothing_back(bench: Bench) -> None:
    bench.append(event(CREATED, 1), event(FIRED, 2, at=5), event(DELETED, 3, at=9))
    bench.catch_up()
    bench.append(event(CREATED, 1), event(FIRED, 2, at=5))
    bench.catch_up()
    assert_shows(bench, {})
    assert bench.projector.skipped == {}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("at", [9, 20, 4])
def test_a_schedule_that_is_created_again_begins_anew(bench: Bench, restarts: bool, at: int) -> None:
    """At the moment of the deletion, later, or by an owner whose clock is behind."""
    bench.append(event(CREATED, 1), event(FIRED, 2, at=5), event(DELETED, 3, at=9))
    bench.catch_up()
    if restarts:
        bench.begin()
    bench.append(event(CREATED, 1, at=at), event(SchedulePaused(), 2, at=at + 1))
    bench.catch_up()
    shown = bench.view.schedule("s")
    assert (shown.version, shown.fired, shown.created_at, shown.is_paused) == (2, 0, START + at, True)


def test_a_new_creation_is_news_though_its_deletion_was_not_seen() -> None:
    known: dict[str, Schedule | Gone] = {}
    schedule_changes_of([event(CREATED, 1), event(FIRED, 2)], known)
    assert schedule_changes_of([event(CREATED, 1)], known).changes == []
    (change,) = schedule_changes_of([event(CREATED, 1, at=1)], known).changes
    assert change.schedule is not None
    assert (change.schedule.version, change.schedule.fired) == (1, 0)


def test_events_of_one_batch_are_one_change_a_schedule() -> None:
    known: dict[str, Schedule | Gone] = {}
    events = [event(CREATED, 1), event(CREATED, 1, schedule_id="u"), event(DELETED, 2, at=1), event(CREATED, 1, at=2)]
    fold = schedule_changes_of([*events, event(DELETED, 2, at=3, schedule_id="u")], known)
    assert [(one.schedule_id, one.schedule and one.schedule.created_at) for one in fold.changes] == [
        ("s", START + 2),
        ("u", None),
    ]
    assert fold.changes[1] == ScheduleChange("u", None)


# --- what cannot follow, and bounds -----------------------------------------------------------------------------------


def test_events_of_a_schedule_whose_beginning_is_not_known_are_counted(bench: Bench) -> None:
    updated = ScheduleUpdated(spec=SPEC, considered_at=START)
    bench.append(event(updated, 7), event(DELETED, 8), event(CREATED, 0, schedule_id="n"), event(SUBMITTED, 1))
    bench.catch_up()
    assert_shows(bench, {})
    assert bench.projector.skipped == {"illegal": 2}
    assert bench.view.task("s") is not None  # a task of the same id is another thing


def test_what_a_stale_owner_writes_of_schedules_is_void(bench: Bench) -> None:
    bench.append(event(CREATED, 1), event(ShardOpened(owner="p"), 0, epoch=2, schedule_id="shard-0"))
    bench.append(event(DELETED, 2), event(CREATED, 1, schedule_id="u"))
    bench.catch_up()
    assert schedule_pages(bench.view, ScheduleFilter(), 10) == ["s"]
    assert bench.projector.skipped == {"void": 2}


def test_only_so_many_schedules_are_remembered(bench: Bench) -> None:
    bench.append(event(CREATED, 1, schedule_id="first"))
    bench.append(*[event(CREATED, 1, schedule_id=f"s{number}") for number in range(SCHEDULES_KNOWN_MAX + 5)])
    bench.catch_up()
    assert len(bench.projector._schedules) == SCHEDULES_KNOWN_MAX
    assert "first" not in bench.projector._schedules
    bench.append(event(FIRED, 2, schedule_id="first"))
    bench.catch_up()
    assert bench.view.schedule("first").fired == 1


# --- a view that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_view_that_fails_in_between_comes_out_the_same(seed: int, bench: Bench) -> None:
    rng = Random(seed)
    bench.view = Shaky(bench.view, rng)
    bench.begin()
    histories = [schedule_history(rng, 300, prefix=f"p{partition}-") for partition in range(PARTITIONS)]
    for at in range(0, 300, 10):
        for partition, (events, _) in enumerate(histories):
            bench.append(*events[at : at + 10], partition=partition)
        while bench.projector.lag():  # without waiting for the write, as a projector that is behind does
            with suppress(Retriable):
                bench.projector._advance(0)
    assert_shows(bench, {schedule_id: row for _, rows in histories for schedule_id, row in rows.items()})


def test_while_a_view_cannot_be_read_nothing_is_passed_over(bench: Bench) -> None:
    class Unread:
        """A view that is written, and not read."""

        def __init__(self, view: object) -> None:
            self._view = view
            self.applied: list[Sequence[Batch]] = []

        def __getattr__(self, name: str) -> object:
            return getattr(self._view, name)

        def schedule_rows(self, *_: object) -> object:
            raise Retriable("no answer")

    bench.append(event(CREATED, 1))
    bench.catch_up()
    bench.begin()
    whole = bench.view
    bench.projector._view = Unread(whole)  # type: ignore[assignment]
    bench.append(event(FIRED, 2))
    for _ in range(3):
        with pytest.raises(Retriable):
            bench.projector.step(0)
    bench.projector._view = whole
    bench.catch_up()
    assert bench.view.schedule("s").fired == 1
