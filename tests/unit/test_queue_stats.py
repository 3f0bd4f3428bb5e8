"""What the shards tell of themselves adds up, is forgotten when they fall silent, and never counts twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest
from msgspec.structs import replace

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.core import tally
from scheduler.core.desk import Source
from scheduler.core.policies import Policies
from scheduler.core.shard import Shard, ShardSettings
from scheduler.ports import Entry
from scheduler.queue_stats import STALE_S, StatsFollower
from schemas.codec import Codec
from schemas.messages import LimitPolicy, LimitStats, Priority, QueueStats, ShardStats
from schemas.topics import SHARD_MESSAGES, SHARD_STATS
from tests.cases.shard_stage import START, ShardStage
from tests.harness import eventually

CODEC = Codec.builtin()
S = 1_000_000


@pytest.fixture
def log() -> Iterator[LocalLog]:
    with closing(LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(2))) as broker:
        yield broker.connect()


def told(shard: int, at_s: int, pending: int, started: int = 0, epoch: int = 1) -> ShardStats:
    one = QueueStats(
        queue="mail", priority=Priority.HIGH, tenant_id="t", pending=pending, running=1, started=started, oldest_at=5
    )
    return ShardStats(shard=shard, epoch=epoch, at=at_s * S, queues=(one,))


def hear(log: LocalLog, follower: StatsFollower, *stats: ShardStats | bytes, now_s: float = 0.0) -> None:
    values = [one if isinstance(one, bytes) else CODEC.encode(one) for one in stats]
    last = told(99, 0, 0)
    log.append([Entry(SHARD_STATS, 0, b"k", value) for value in (*values, CODEC.encode(last))])

    def is_heard() -> bool:
        log.poll(0)
        follower.follow(now_s)
        return 99 in follower._heard

    eventually(is_heard)
    del follower._heard[99]


def test_shards_add_up_and_each_counts_once(log: LocalLog) -> None:
    follower = StatsFollower(log, CODEC)
    hear(log, follower, told(0, 1, pending=3), told(1, 1, pending=4), told(0, 2, pending=5))
    assert sum(one.pending for one in follower.amounts(0)) == 9
    assert follower.shards(0) == 2


def test_a_shard_that_is_silent_counts_no_more(log: LocalLog) -> None:
    follower = StatsFollower(log, CODEC)
    hear(log, follower, told(0, 1, pending=3))
    assert follower.shards(STALE_S) == 1
    assert follower.shards(STALE_S + 1) == 0
    assert not list(follower.amounts(STALE_S + 1))


def test_an_owner_that_was_followed_is_not_believed(log: LocalLog) -> None:
    follower = StatsFollower(log, CODEC)
    hear(log, follower, told(0, 5, pending=3, epoch=2), told(0, 9, pending=70, epoch=1))
    assert [one.pending for one in follower.amounts(0)] == [3]


def test_the_rate_is_of_one_owner(log: LocalLog) -> None:
    follower = StatsFollower(log, CODEC)
    hear(log, follower, told(0, 1, pending=0, started=10), told(0, 3, pending=0, started=30))
    assert [one.started_per_s for one in follower.amounts(0)] == [10.0]
    hear(log, follower, told(0, 4, pending=0, started=5, epoch=2))
    assert [one.started_per_s for one in follower.amounts(0)] == [0.0]
    hear(log, follower, told(0, 5, pending=0, started=1, epoch=2))
    assert [one.started_per_s for one in follower.amounts(0)] == [0.0], "it has forgotten what it counted"


def test_bytes_that_mean_nothing_are_passed_over(log: LocalLog) -> None:
    follower = StatsFollower(log, CODEC)
    hear(log, follower, b"junk", told(0, 1, pending=3))
    assert [one.pending for one in follower.amounts(0)] == [3]


# --- what a shard tells -----------------------------------------------------------------------------------------------


def stage() -> ShardStage:
    return ShardStage(Shard(0, ShardSettings(), Random(1), START), START)


def test_a_shard_tells_what_waits_runs_and_has_started() -> None:
    at = stage()
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "y")):
        at.submit(name, queue="mail", tenant_id=tenant)
    at.advance(5_000)
    at.start("a")
    stats = at.shard.stats(at.now)
    found = {(one.queue, one.priority, one.tenant_id): one for one in stats.queues}
    x, y = found["mail", Priority.MEDIUM, "x"], found["mail", Priority.MEDIUM, "y"]
    assert (x.pending, x.running, x.started) == (1, 1, 1)
    assert (y.pending, y.running, y.started) == (1, 0, 0)
    assert y.oldest_at == START
    at.succeed("a")
    after = {one.tenant_id: one for one in at.shard.stats(at.now).queues}
    assert (after["x"].running, after["x"].started) == (0, 1)


def test_those_of_many_tenants_that_have_least_are_told_of_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "STATS_MAX", 2)
    at = stage()
    for tenant, count in (("a", 3), ("b", 2), ("c", 1), ("d", 1)):
        for number in range(count):
            at.submit(f"{tenant}{number}", tenant_id=tenant)
    assert [(one.tenant_id, one.pending) for one in at.shard.stats(at.now).queues] == [("a", 3), ("b", 2), ("", 2)]


def test_the_stats_of_a_shard_fit_into_a_record_whatever_names_there_are() -> None:
    stage = ShardStage(Shard(0, ShardSettings(), Random(1), START))
    for number in range(3_000):
        stage.submit(f"t{number}", queue=f"{'q' * 120}{number}", tenant_id=f"{'x' * 120}{number}")
    stats = stage.shard.stats(START)
    assert len(CODEC.encode(stats)) < 500_000
    assert sum(one.pending for one in stats.queues) == 3_000


def test_what_is_due_soon_is_counted_until_it_goes_out_is_parked_or_cancelled() -> None:
    at = stage()
    for task_id, seconds in (("now", 0), ("soon", 50), ("gone", 50), ("far", 3_600)):
        at.submit(task_id, scheduled_at=at.now + seconds * S)
    assert due_soon(at) == 2
    at.cancel("gone")
    assert due_soon(at) == 1
    (record,) = at.shard.to_park(10)
    at.shard.parked(record, at.now)
    assert due_soon(at) == 1 and at.shard.memory()["due"] == 1
    at.advance(51_000)
    at.let_time_work()
    assert due_soon(at) == 0 and at.shard.memory()["due"] == 0


def due_soon(at: ShardStage) -> int:
    return sum(one.due_soon for one in at.shard.stats(at.now).queues)


def test_how_long_tasks_waited_for_their_start_is_counted_from_when_they_might_have() -> None:
    at = stage()
    at.submit("a")
    at.submit("b", scheduled_at=at.now + 2 * S)
    at.advance(3_000)
    at.let_time_work()
    at.start("a")
    at.start("b")
    (one,) = at.shard.stats(at.now).queues
    assert (one.started, one.waited_us) == (2, 3 * S + 1 * S)


def test_the_mean_wait_is_that_of_the_last_second(log: LocalLog) -> None:
    follower = StatsFollower(log, CODEC)
    first, second = told(0, 1, pending=0, started=10), told(0, 2, pending=0, started=30)
    queues = [replace(one.queues[0], waited_us=us) for one, us in ((first, 500), (second, 500 + 20 * 7_000))]
    hear(log, follower, *(replace(one, queues=(q,)) for one, q in zip((first, second), queues, strict=True)))
    (one,) = follower.amounts(0)
    assert one.waited_us_per_s / one.started_per_s == 7_000


def test_what_waits_for_a_limit_adds_up_by_key(log: LocalLog) -> None:
    follower = StatsFollower(log, CODEC)
    a, b = LimitStats(key="one/x", waiting=3, held=0), LimitStats(key="one/x", waiting=2, held=1)
    hear(log, follower, replace(told(0, 1, pending=3), limits=(a,)), replace(told(1, 1, pending=3), limits=(b,)))
    assert follower.limits(0) == [("one/x", 5, 1)]
    assert follower.limits(STALE_S + 1) == []


def test_a_shard_tells_what_waits_for_a_limit_and_as_its_home_what_is_held() -> None:
    policies = Policies()
    policies.put(LimitPolicy(name="one", set_at=1, count=1))
    at = ShardStage(Shard(0, ShardSettings(), Random(1), START, policies), START)
    for task_id in ("a", "b", "c"):
        at.submit(task_id)
    for _ in range(3):
        effects = at.shard.decide_limits(at.now)
        at.shard.acknowledged(effects.events, 0, at.now)
        for _, message in effects.messages:
            at.shard.handle(message, Source(SHARD_MESSAGES, 0), at.now)
    assert at.shard.stats(at.now).limits == (LimitStats(key="one/", waiting=2, held=1),)
