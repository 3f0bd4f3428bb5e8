"""One task for several submissions: while it waits or lives, for a time, or the last one after a rest."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from scheduler.core.shard import Shard, ShardSettings
from schemas.ids import shard_of, unique_root, unique_root_of
from schemas.messages import (
    Outcome,
    RedriveTask,
    RetryPolicy,
    Status,
    Task,
    TaskSpec,
    TaskUpdated,
    Uniqueness,
    UniqueScope,
)
from tests.cases.shard_stage import START, ShardStage

SECOND = 1_000_000
ROOT = unique_root_of("default", "report")


def rule(scope: UniqueScope, seconds: float = 0, max_seconds: float | None = None) -> Uniqueness:
    max_ms = None if max_seconds is None else round(max_seconds * 1_000)
    return Uniqueness(key="report", scope=scope, window_ms=round(seconds * 1_000), max_ms=max_ms)


def a_shard() -> Shard:
    return Shard(0, ShardSettings(), Random(1), START)


class Desk:
    """Submissions under one key to one shard."""

    def __init__(self, unique: Uniqueness) -> None:
        self.stage = ShardStage(a_shard())
        self.unique = unique
        self._number = 0

    def submit(self, payload: bytes = b"1", **spec: Any) -> tuple[Outcome, str]:
        """How it is answered, with the task that stands for it."""
        self._number += 1
        effects = self.stage.submit(f"{ROOT}.{self._number}", payload=payload, unique=self.unique, **spec)
        ((_, reply),) = effects.replies
        return reply.outcome, reply.task_id

    def passes(self, seconds: float) -> None:
        self.stage.now += round(seconds * SECOND)
        self.stage.let_time_work()

    def task(self, number: int) -> Task | None:
        return self.stage.shard.state.tasks.get(f"{ROOT}.{number}")


def test_all_ids_of_a_key_are_in_one_shard_and_tell_their_root() -> None:
    assert unique_root(f"{ROOT}.7") == ROOT
    assert unique_root(ROOT) is None
    assert unique_root("key-1.2") is None
    assert len({shard_of(f"{ROOT}.{number}", 64) for number in range(100)}) == 1
    assert unique_root_of("a", "bc") != unique_root_of("ab", "c")


def test_while_it_lives_one_stands_for_all() -> None:
    desk = Desk(rule(UniqueScope.LIVE))
    assert desk.submit() == (Outcome.ACCEPTED, f"{ROOT}.1")
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.1")
    desk.stage.start(f"{ROOT}.1")
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.1")
    desk.stage.succeed(f"{ROOT}.1")
    assert desk.submit() == (Outcome.ACCEPTED, f"{ROOT}.4")
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.4")


def test_while_it_waits_one_stands_for_all_and_one_more_waits_while_it_runs() -> None:
    desk = Desk(rule(UniqueScope.WAITING))
    desk.submit()
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.1")
    desk.stage.start(f"{ROOT}.1")
    assert desk.submit() == (Outcome.ACCEPTED, f"{ROOT}.3")
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.3")


def test_in_a_window_there_is_one_whether_it_has_ended_or_not() -> None:
    desk = Desk(rule(UniqueScope.WINDOW, 3_600))
    desk.submit()
    desk.stage.start(f"{ROOT}.1")
    desk.stage.succeed(f"{ROOT}.1")
    desk.passes(3_599)
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.1")
    desk.passes(1)
    assert desk.submit() == (Outcome.ACCEPTED, f"{ROOT}.3")
    assert desk.stage.shard.memory()["uniques"] == 1


def test_a_debounced_task_waits_for_a_rest_and_takes_what_came_last() -> None:
    desk = Desk(rule(UniqueScope.DEBOUNCE, 5))
    assert desk.submit(b"first") == (Outcome.ACCEPTED, f"{ROOT}.1")
    begun = desk.stage.now
    for number in range(3):
        desk.passes(4)
        assert desk.submit(b"%d" % number) == (Outcome.DUPLICATE, f"{ROOT}.1")
    task = desk.task(1)
    assert task is not None
    assert (task.status, task.spec.payload, task.next_run_at) == (Status.SCHEDULED, b"2", begun + 17 * SECOND)
    desk.passes(5)
    task = desk.task(1)
    assert task is not None
    assert task.status is Status.PENDING
    assert desk.submit(b"next") == (Outcome.ACCEPTED, f"{ROOT}.5"), "the one that may run any moment is left alone"


def test_a_debounce_with_a_bound_does_not_wait_for_ever() -> None:
    desk = Desk(rule(UniqueScope.DEBOUNCE, 5, max_seconds=12))
    desk.submit()
    begun = desk.stage.now
    for _ in range(2):
        desk.passes(4)
        desk.submit()
    task = desk.task(1)
    assert task is not None
    assert task.next_run_at == begun + 12 * SECOND


def test_what_stands_is_known_after_a_load() -> None:
    desk = Desk(rule(UniqueScope.LIVE))
    desk.submit(scheduled_at=desk.stage.now + 40 * 86_400 * SECOND)
    assert desk.stage.shard.to_park(10) == [], "one that stands for others stays in memory"
    loaded = a_shard()
    for task in desk.stage.shard.state.tasks.values():
        loaded.restore(task)
    desk.stage = ShardStage(loaded, desk.stage.now)
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.1")


def test_a_cancelled_one_stands_for_nobody() -> None:
    desk = Desk(rule(UniqueScope.LIVE))
    desk.submit()
    desk.stage.cancel(f"{ROOT}.1")
    assert desk.submit() == (Outcome.ACCEPTED, f"{ROOT}.2")


def test_a_debounced_submission_that_cannot_be_taken_changes_nothing() -> None:
    desk = Desk(rule(UniqueScope.DEBOUNCE, 5))
    desk.submit(b"good")
    assert desk.submit(b"bad", queue="no queue") == (Outcome.INVALID, f"{ROOT}.1")
    task = desk.task(1)
    assert task is not None
    assert task.spec.payload == b"good"
    assert not any(isinstance(event.body, TaskUpdated) for event in desk.stage.events)


@pytest.mark.parametrize(
    ("unique", "task_id", "said"),
    [
        (Uniqueness(key="", scope=UniqueScope.LIVE), f"{ROOT}.1", "unique.key"),
        (Uniqueness(key="x" * 256, scope=UniqueScope.LIVE), f"{ROOT}.1", "unique.key"),
        (Uniqueness(key="report", scope=UniqueScope.UNKNOWN), f"{ROOT}.1", "unique.scope"),
        (Uniqueness(key="report", scope=UniqueScope.LIVE), "another", "task_id"),
        (Uniqueness(key="report", scope=UniqueScope.LIVE), ROOT, "task_id"),
        (Uniqueness(key="other", scope=UniqueScope.LIVE), f"{ROOT}.1", "task_id"),
        (Uniqueness(key="report", scope=UniqueScope.WINDOW), f"{ROOT}.1", "unique.window_ms"),
        (Uniqueness(key="report", scope=UniqueScope.DEBOUNCE, window_ms=5, max_ms=4), f"{ROOT}.1", "unique.max_ms"),
    ],
)
def test_what_a_producer_may_not_write_is_refused_with_the_field(unique: Uniqueness, task_id: str, said: str) -> None:
    effects = ShardStage(a_shard()).submit(task_id, unique=unique)
    ((_, reply),) = effects.replies
    assert reply.outcome is Outcome.INVALID
    assert (reply.detail or "").startswith(said)


def test_a_debounced_task_whose_bound_has_come_is_released_in_the_same_turn() -> None:
    desk = Desk(rule(UniqueScope.DEBOUNCE, 1, max_seconds=3))
    desk.submit()
    for _ in range(200):
        desk.stage.now += SECOND // 50
        desk.submit()
        desk.stage.let_time_work()
    task = desk.task(1)
    assert task is not None
    assert task.status is Status.PENDING


def test_a_task_that_is_run_again_stands_for_others_again() -> None:
    desk = Desk(rule(UniqueScope.LIVE))
    desk.submit(retry=RetryPolicy(max_attempts=1))
    desk.stage.start(f"{ROOT}.1")
    desk.stage.fail(f"{ROOT}.1")
    ended = desk.stage.shard.state.ended[f"{ROOT}.1"]
    shown = Task(
        task_id=f"{ROOT}.1",
        spec=TaskSpec(task_type="t", unique=desk.unique),
        status=Status.DEAD,
        version=ended.version,
        attempt=ended.attempt,
        created_at=ended.created_at,
        updated_at=ended.ended_at,
    )
    desk.passes(60)
    assert desk.stage.shard.known(f"{ROOT}.1") is None
    desk.stage.request(RedriveTask(request_id="r", task=shown, view_offset=10**6, reply_to=0))
    assert desk.submit() == (Outcome.DUPLICATE, f"{ROOT}.1")


def test_what_is_remembered_for_a_window_has_a_bound() -> None:
    unique = rule(UniqueScope.WINDOW, 3_600)
    desk = Desk(unique)
    desk.stage = ShardStage(Shard(0, ShardSettings(ended_max=3), Random(1), START))
    for number in range(3):
        task_id = f"{unique_root_of('default', str(number))}.1"
        desk.stage.submit(task_id, unique=replace(unique, key=str(number)))
        desk.stage.start(task_id)
        desk.stage.succeed(task_id)
    outcome, _ = desk.submit()
    assert outcome is Outcome.OVERLOADED
