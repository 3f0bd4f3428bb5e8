"""What the shards tell of themselves adds up, is forgotten when they fall silent, and never counts twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.core import shard as core
from scheduler.core.shard import Shard, ShardSettings
from scheduler.ports import Entry
from scheduler.queue_stats import STALE_S, StatsFollower
from schemas.codec import Codec
from schemas.messages import Priority, QueueStats, ShardStats
from schemas.topics import SHARD_STATS
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
    monkeypatch.setattr(core, "STATS_MAX", 2)
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
