"""Of a queue in which very much waits, what is of low priority waits in the delay wheel, and is not forgotten there."""

from __future__ import annotations

from random import Random

from scheduler.core.admission import AdmissionSettings
from scheduler.core.decisions import DEFER_US, DEFER_US_MAX, deferred_until
from scheduler.core.desk import Source
from scheduler.core.shard import Shard, ShardSettings
from schemas.messages import Outcome, ParkedTask, Priority, Status, TaskDeferred, UpdateTask
from tests.cases.shard_stage import START, ShardStage

LOW = Priority.LOW


def crowded(count: int = 2) -> ShardStage:
    admission = AdmissionSettings(queue_overflow_at=2)
    at = ShardStage(Shard(0, ShardSettings(admission=admission), Random(1), START))
    for number in range(count):
        at.submit(f"first-{number}")
    return at


def drain(at: ShardStage, count: int = 2) -> None:
    for number in range(count):
        at.start(f"first-{number}")
        at.succeed(f"first-{number}")


def test_a_low_one_is_accepted_and_waits_in_the_wheel() -> None:
    at = crowded()
    (_, reply), *_ = at.submit("low", priority=LOW).replies
    assert (reply.outcome, reply.status) == (Outcome.ACCEPTED, Status.SCHEDULED)
    assert at.task("low").next_run_at == at.now + DEFER_US
    (record,) = at.shard.to_park(10)
    assert record.task.task_id == "low"


def test_others_and_other_queues_are_as_ever() -> None:
    at = crowded()
    at.submit("medium")
    at.submit("elsewhere", queue="other", priority=LOW)
    assert at.task("medium").status is at.task("elsewhere").status is Status.PENDING
    few = crowded(1)
    few.submit("low", priority=LOW)
    assert few.task("low").status is Status.PENDING


def test_it_starts_once_there_is_room() -> None:
    at = crowded()
    at.submit("low", priority=LOW)
    drain(at)
    at.advance(DEFER_US // 1_000)
    at.let_time_work()
    assert at.task("low").status is Status.PENDING


def test_it_is_put_off_again_while_there_is_none_for_as_long_again_as_it_has_waited() -> None:
    at = crowded()
    at.submit("low", priority=LOW)
    waits = []
    for _ in range(8):
        before = at.now
        at.now = at.task("low").next_run_at or 0
        at.let_time_work()
        waits.append(at.now - before)
    assert waits[:4] == [DEFER_US, DEFER_US, 2 * DEFER_US, 4 * DEFER_US]
    assert waits[-1] == DEFER_US_MAX == deferred_until(0, 10 * DEFER_US_MAX) - 10 * DEFER_US_MAX
    assert sum(isinstance(event.body, TaskDeferred) for event in at.events) == 8


def test_what_was_put_off_after_it_came_back_from_the_wheel_is_whole_in_the_log() -> None:
    """Found by the simulation (seed 141): a load made it of the event, without its payload."""
    at = crowded()
    at.submit("low", priority=LOW, payload=b'"all of it"')
    (record,) = at.shard.to_park(10)
    at.shard.parked(record, at.now)
    assert "low" not in at.shard.state.tasks
    at.now = record.due_at
    while (place := at.shard.next_to_open(at.now)) is not None:
        if place == record.place:
            at.shard.unpark(ParkedTask(task=record.task, due_at=record.due_at), place, Source("delay", 0), at.now)
        at.shard.parking.wheel.has_opened(place)
    at.let_time_work()
    deferred = next(event for event in at.events if isinstance(event.body, TaskDeferred))
    assert deferred.base is not None and deferred.base.spec.payload == b'"all of it"'


def test_a_scheduled_one_is_put_off_when_it_is_due_but_not_one_that_has_begun() -> None:
    at = crowded(0)
    at.submit("later", priority=LOW, scheduled_at=at.now + 1_000_000)
    at.submit("retried", priority=LOW)
    at.start("retried")
    at.fail("retried")
    for number in range(2):
        at.submit(f"first-{number}")
    at.advance(60_000)
    at.let_time_work()
    assert at.task("later").status is Status.SCHEDULED
    assert at.task("retried").status is Status.PENDING


def test_its_deadline_holds_all_the_same() -> None:
    at = crowded()
    at.submit("low", priority=LOW, total_timeout_ms=10_000)
    at.advance(10_000)
    at.let_time_work()
    assert at.shard.known("low").status in (Status.DEAD, Status.FAILED)  # type: ignore[union-attr]


def test_it_can_be_cancelled_and_made_urgent() -> None:
    at = crowded()
    for task_id in ("a", "b"):
        at.submit(task_id, priority=LOW)
    at.cancel("a")
    assert at.shard.known("a").status is Status.CANCELLED  # type: ignore[union-attr]
    at.request(UpdateTask(request_id="r", task_id="b", priority=Priority.HIGH))
    assert at.task("b").status is Status.PENDING
