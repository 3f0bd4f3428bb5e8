"""C13: a delay beyond what a 32-bit timer holds is neither early nor a reason to wake up.

Chosen: a due time is accepted up to a hundred years ahead; beyond, and before 1970, it is refused (422), since it is
then one unit mistaken for another. Waiting tasks do not wake their shard: it opens the slots of its delay wheel, about
once a minute. (A scheduler process without anything to do turns twice a second for its own housekeeping.)
"""

from __future__ import annotations

from random import Random

import pytest

from scheduler.core.desk import Source
from scheduler.core.shard import Shard, ShardSettings
from schemas.messages import Status, SubmitTask, TaskSpec
from schemas.topics import TASK_REQUESTS
from tests.cases.shard_stage import open_slots
from tests.harness import TASKS, Api, running

MS, HOUR, DAY = 1_000, 3_600_000_000, 86_400_000_000
NOW = 1_780_315_200_000_000
DELAYS_MS = [2_147_483_647, 2_147_483_648, 26_430_043_528, 10 * 366 * 86_400_000]


def waiting_shard() -> Shard:
    shard = Shard(0, ShardSettings(), Random(13), NOW)
    shard.on_loaded(NOW, -1)
    for number, delay_ms in enumerate(DELAYS_MS):
        spec = TaskSpec(task_type="later", scheduled_at=NOW + delay_ms * MS)
        request = SubmitTask(request_id=str(number), task_id=f"t{number}", spec=spec, submitted_at=NOW)
        shard.handle(request, Source(TASK_REQUESTS, number), NOW)
    shard.decide_limits(NOW)  # it tells the other shards that it is there
    return shard


def released(shard: Shard, now: int) -> list[str]:
    open_slots(shard, now)
    return [event.entity_id for event in shard.fire_timers(now).events]


def test_each_is_released_when_it_is_due_and_not_before() -> None:
    shard = waiting_shard()
    for number, delay_ms in enumerate(DELAYS_MS):
        due_at = NOW + delay_ms * MS
        assert released(shard, due_at - 1) == []
        assert shard.state.tasks[f"t{number}"].status is Status.SCHEDULED
        assert released(shard, due_at) == [f"t{number}"]


def test_after_twenty_four_days_only_the_first_has_started() -> None:
    assert released(waiting_shard(), NOW + 2_147_483_647 * MS) == ["t0"]


def test_waiting_costs_a_wake_up_a_minute_however_much_waits() -> None:
    shard, now, wake_ups = waiting_shard(), NOW, 0
    while (at := shard.next_at()) is not None and at < NOW + HOUR:
        assert at > now
        now, wake_ups = at, wake_ups + 1
        assert not released(shard, now)
    assert wake_ups <= 70  # the finest slots of the wheel, once a minute; coarser ones now and then


def test_an_instant_out_of_range_is_refused() -> None:
    with running(None, port=0) as engine, Api(engine.address) as api:
        for number, at in enumerate(("9999-12-31T23:59:59Z", "10000-01-01T00:00:00Z", "1969-12-31T23:59:59Z")):
            answer = api("POST", TASKS, json={"task_type": "later", "scheduled_at": at, "task_id": f"far{number}"})
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "scheduled_at")
            assert api("GET", f"{TASKS}/far{number}").status_code == 404
        for delay_ms in DELAYS_MS:
            shown = api.task(api.submit("later", delay_seconds=delay_ms / 1000))
            assert shown["status"] == "SCHEDULED"
        for fields in ({"delay_seconds": 1e300}, {"delay_seconds": 101 * 366 * 86_400}):
            assert api("POST", TASKS, json={"task_type": "later", **fields}).status_code == 422


@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_a_shard_that_was_loaded_anew_waits_as_long(delay_ms: int) -> None:
    before = waiting_shard()
    shard = Shard(0, ShardSettings(), Random(13), NOW)
    for task in before.state.tasks.values():
        shard.restore(task)
    shard.on_loaded(NOW + DAY, 3)
    due_at = NOW + delay_ms * MS
    released(shard, due_at - 1)
    assert len(released(shard, due_at)) == 1
