"""What groups of consumers are trusted with: their members (C30), and how far they came (C31).

**C30**, tasks that run longer than the poll interval of the consumers that brought them, applies to the groups of
workers and of schedulers, whose members poll in a loop that never runs a handler. All of it must hold but one thing:
here the offset of a ready record is not committed once the work is done, but once the report of its start is in the
log. From then on the shard watches over the attempt, and the record is of no more use: a lost attempt is started again
by a new one. Committing at the end would only have every ready record behind a long task read again after a rebalance.

**C31**, offsets that are wrong or gone: here they are a convenience of the workers alone, what was started is known
by the events. That commits never pass an open record is tested where they are made: test_intake, test_worker_runtime.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka import admin as kafka

from schemas.messages import Status
from tests.cluster import Cluster
from tests.harness import eventually, notes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service("kafka"),
    pytest.mark.service("cassandra"),
]

APP = "tests.blocking_app:app"
POLL_INTERVAL_S = 6.0  # the least: the time after which a member without heartbeats is given up
LONG_TASKS, SHORT_TASKS = 3, 40  # fewer long ones than a worker has threads
LONG_S = 60.0  # until a test gives up
ASK_S = 10.0  # of one question to the brokers


def test_nobody_is_expelled_and_nothing_waits_for_long_tasks(tmp_path: Path) -> None:
    begun, gate, passed = tmp_path / "begun", tmp_path / "gate", tmp_path / "passed"
    interval_ms = f"{POLL_INTERVAL_S * 1000:.0f}"
    # Of clients that are in no group the first may not be shorter than the second.
    properties = f"max.poll.interval.ms={interval_ms},session.timeout.ms={interval_ms}"
    settings = {"KAFKA_PROPERTIES": properties}
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start("scheduler")
        api = cluster.api(cluster.start("api"))
        for _ in range(2):
            cluster.start("worker", APP)
        groups = Groups(cluster)
        long = [api.submit("block", {"journal": str(begun), "gate": str(gate)}) for _ in range(LONG_TASKS)]
        eventually(lambda: len(notes(begun)) == LONG_TASKS, "the long tasks run", LONG_S)
        began_at, members = time.monotonic(), groups.members()
        assert sorted(map(len, members.values())) == [1, 2], members  # of schedulers, of workers
        short = [api.submit("pass", {"journal": str(passed)}) for _ in range(SHORT_TASKS)]
        eventually(lambda: len(notes(passed)) == SHORT_TASKS, "the short ones ended meanwhile", LONG_S)
        eventually(lambda: time.monotonic() > began_at + 2 * POLL_INTERVAL_S, "it is over twice", LONG_S)
        assert groups.members() == members
        gate.touch()

        def ended() -> bool:
            return {task.status for task in cluster.history().tasks.values()} == {Status.SUCCEEDED}

        eventually(ended, "all of them succeeded", LONG_S)
        history = cluster.history()
        assert [history.starts(task_id) for task_id in (*long, *short)] == [[1]] * (LONG_TASKS + SHORT_TASKS)
        assert sorted(notes(begun) + notes(passed)) == sorted(f"{task_id} 1" for task_id in (*long, *short))
        assert groups.members() == members
        eventually(lambda: groups.lags() == {0}, "all that was done is committed", LONG_S)


def test_offsets_that_expired_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    passed = tmp_path / "passed"
    with Cluster(tmp_path) as cluster:
        scheduler, groups = cluster.start("scheduler"), Groups(cluster)
        api = cluster.api(cluster.start("api"))
        worker = cluster.start("worker", APP)
        ids = [api.submit("pass", {"journal": str(passed)}) for _ in range(SHORT_TASKS)]
        eventually(lambda: len(notes(passed)) == SHORT_TASKS, "the first ones ran", LONG_S)
        eventually(lambda: groups.lags() == {0}, "that is committed", LONG_S)
        worker.send(signal.SIGTERM)
        assert worker.ended() == 0
        ids += [api.submit("pass", {"journal": str(passed)}) for _ in range(SHORT_TASKS)]
        eventually(lambda: groups.lags() != {0}, "the next ones were sent out", LONG_S)
        scheduler.send(signal.SIGTERM)
        assert scheduler.ended() == 0
        groups.remove()
        cluster.start("scheduler")
        cluster.start("worker", APP)

        def ended() -> bool:
            tasks = cluster.history().tasks
            return len(tasks) == len(ids) and {task.status for task in tasks.values()} == {Status.SUCCEEDED}

        eventually(ended, "all of them succeeded", LONG_S)
        eventually(lambda: groups.lags() == {0}, "all old records were read again and passed over", LONG_S)
        assert sorted(notes(passed)) == sorted(f"{task_id} 1" for task_id in ids)


class Groups:
    """The groups of a cluster, as the brokers know them."""

    def __init__(self, cluster: Cluster) -> None:
        properties: Any = cluster.kafka.client()
        admin: Any = kafka
        self._admin, self._latest = admin.AdminClient(properties), admin.OffsetSpec.latest()
        self._prefix = cluster.kafka.prefix

    def members(self) -> dict[str, set[str]]:
        """The members of each group; one that left and came back is another."""
        found = {}
        for group, described in self._admin.describe_consumer_groups(self._groups(), request_timeout=ASK_S).items():
            found[group] = {member.member_id for member in described.result(ASK_S).members}
        return found

    def lags(self) -> set[int]:
        """How far the groups of workers are behind, in the partitions that have records."""
        places = [place for group in self._groups() if self._is_of_workers(group) for place in self._committed(group)]
        ends = self._admin.list_offsets(dict.fromkeys(places, self._latest), request_timeout=ASK_S)
        return {ends[place].result(ASK_S).offset - place.offset for place in places}

    def remove(self) -> None:
        """Forget the groups and their offsets, as brokers do with groups that nobody used for long."""
        for removed in self._admin.delete_consumer_groups(self._groups(), request_timeout=ASK_S).values():
            removed.result(ASK_S)

    def _committed(self, group: str) -> list[TopicPartition]:
        (answer,) = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
        return list(answer.result(ASK_S).topic_partitions)

    def _is_of_workers(self, group: str) -> bool:
        return group.startswith(f"{self._prefix}workers")

    def _groups(self) -> list[str]:
        listed = self._admin.list_consumer_groups(request_timeout=ASK_S).result(ASK_S).valid
        return [one.group_id for one in listed if one.group_id.startswith(self._prefix)]
