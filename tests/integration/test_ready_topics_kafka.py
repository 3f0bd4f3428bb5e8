"""Ready topics that brokers refuse, that are removed, or that have other partitions: one queue's trouble alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import structlog
from confluent_kafka import admin as _admin

from infra.kafka.log import KafkaLog
from infra.kafka.settings import KafkaSettings
from infra.kafka.state import KafkaStateStore
from infra.kafka.topics import TopicAdmin, apply, plan
from infra.topics import ClusterSizes, TopicCatalog, cluster_catalog
from scheduler.host import Phase, RuntimeSettings
from scheduler.ports import Entry, Reader, TopicPartition
from scheduler.runtime import SchedulerRuntime
from schemas.codec import Codec
from schemas.errors import Fatal
from schemas.ids import routing_key, shard_of
from schemas.messages import Priority, ReadyTask, SubmitTask, TaskSpec
from schemas.topics import TASK_REQUESTS, ready_topic
from tests.kafka_stage import own_topics
from tidewheel.clock import SteadyClock

pytestmark = pytest.mark.service("kafka")

client: Any = _admin  # its types do not say what it exports

SIZES = ClusterSizes(shards=2, reply_partitions=1, ready_partitions=3)
CATALOG = cluster_catalog(SIZES)
CODEC = Codec.builtin()
TURNS_MAX = 6_000
GOOD, BAD = ready_topic("good", Priority.MEDIUM), ready_topic("bad", Priority.MEDIUM)


class Stage:
    """A scheduler on real brokers, whose loop the test turns, and a reader of what it sends out."""

    def __init__(self, settings: KafkaSettings, catalog: TopicCatalog = CATALOG) -> None:
        apply(TopicAdmin(settings), plan(TopicAdmin(settings), CATALOG))
        properties: Any = settings.client()
        self.settings = settings
        self.client = client.AdminClient(properties)
        self.log = KafkaLog(settings, catalog, client_id="test")
        self.states = KafkaStateStore(settings)
        own = RuntimeSettings(owner="test")
        self.runtime = SchedulerRuntime(self.log, self.states, CODEC, SteadyClock(), Random(1), own)
        self.reading = KafkaLog(settings, CATALOG, client_id="reader")
        self.logs = [self.log, self.reading]
        self._count = 0

    def close(self) -> None:
        self.states.close()
        for log in self.logs:
            log.close()

    def until(self, condition: Callable[[], bool]) -> None:
        """Turn the loop until it is so."""
        for _ in range(TURNS_MAX):
            if condition():
                return
            self.runtime.step(0.01)
            for log in self.logs[1:]:
                log.poll(0)
        raise AssertionError(f"still not after {TURNS_MAX} turns; held: {self.log.held_topics()}")

    def is_loaded(self) -> bool:
        hosts = self.runtime.hosts.values()
        return len(hosts) == SIZES.shards and all(host.phase is Phase.ACTIVE for host in hosts)

    def submit(self, queue: str, count: int, by: KafkaLog | None = None) -> set[str]:
        """Write requests; the ids."""
        ids = {f"{queue}-{self._count + number}" for number in range(count)}
        self._count += count
        entries = []
        for task_id in sorted(ids):
            request = SubmitTask(
                request_id="", task_id=task_id, submitted_at=1, spec=TaskSpec(task_type="t", queue=queue)
            )
            shard = shard_of(task_id, SIZES.shards)
            entries.append(Entry(TASK_REQUESTS, shard, routing_key(task_id).encode(), CODEC.encode(request)))
        (by or self.reading).append(entries)
        return ids

    @contextmanager
    def sent(self, topic: str) -> Iterator[Sent]:
        """What comes into a ready topic, which is there."""
        with closing(self.reading.reader()) as reader:
            for number in range(self.reading.partitions(topic)):
                reader.seek(TopicPartition(topic, number), 0)
            yield Sent(reader)

    def create(self, topic: str, partitions: int) -> None:
        (done,) = self.client.create_topics([client.NewTopic(self.log.names.physical(topic), partitions, 1)]).values()
        done.result(10)

    def delete(self, *topics: str) -> None:
        for done in self.client.delete_topics([self.log.names.physical(topic) for topic in topics]).values():
            done.result(10)

    def reloads(self) -> int:
        return sum(host.reloads for host in self.runtime.hosts.values())


class Sent:
    """The ready records of a topic."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.partitions: set[int] = set()
        self.ids: set[str] = set()

    def has(self, ids: set[str]) -> bool:
        for record in self._reader.take(1_000):
            task = CODEC.decode(record.value or b"")
            assert isinstance(task, ReadyTask)
            self.ids.add(task.task_id)
            self.partitions.add(record.partition)
        return ids <= self.ids


@pytest.fixture
def settings() -> Iterator[KafkaSettings]:
    with own_topics() as made, structlog.testing.capture_logs():
        yield made


@pytest.fixture
def stage(settings: KafkaSettings) -> Iterator[Stage]:
    made = Stage(settings)
    made.until(made.is_loaded)
    yield made
    made.close()


def test_a_topic_that_brokers_refuse_holds_up_its_own_tasks_until_it_is_there(settings: KafkaSettings) -> None:
    stage = Stage(settings, cluster_catalog(replace(SIZES, replication=30)))  # which no topic can be created with
    try:
        stage.until(stage.is_loaded)
        stage.create(GOOD, 3)
        held = stage.submit("bad", 40)
        stage.until(lambda: BAD in stage.log.held_topics())
        assert "set kafka.replication" in stage.log.held_topics()[BAD]
        good = stage.submit("good", 10)
        with stage.sent(GOOD) as sent:
            stage.until(lambda: sent.has(good))
        assert {host.phase for host in stage.runtime.hosts.values()} == {Phase.ACTIVE}
        stage.create(BAD, 3)  # by the operator
        with stage.sent(BAD) as sent:
            stage.until(lambda: len(held & sent.ids) >= 16 or sent.has(held))
        assert stage.log.held_topics() == {}
        assert stage.reloads() == 0
    finally:
        stage.close()


def test_a_topic_that_is_removed_while_tasks_wait_is_made_anew_and_gets_them(stage: Stage) -> None:
    first = stage.submit("bad", 5)
    stage.until(lambda: stage.log.ready_partitions(BAD) > 0)
    with stage.sent(BAD) as sent:
        stage.until(lambda: sent.has(first))
    stage.delete(BAD)
    second, good = stage.submit("bad", 5), stage.submit("good", 5)
    stage.until(lambda: stage.log.ready_partitions(GOOD) > 0)
    with stage.sent(GOOD) as sent:
        stage.until(lambda: sent.has(good))
    stage.until(lambda: stage.client.list_topics(timeout=10).topics.get(stage.log.names.physical(BAD)) is not None)
    with stage.sent(BAD) as sent:
        stage.until(lambda: sent.has(second))
    assert stage.reloads() == 0


@pytest.mark.parametrize("partitions", [1, 5])
def test_the_partitions_that_a_topic_really_has_are_used(stage: Stage, partitions: int) -> None:
    stage.create(BAD, partitions)
    ids = stage.submit("bad", 30)
    with stage.sent(BAD) as sent:  # partitions are read one after the other: enough records may be of some of them
        stage.until(lambda: sent.has(ids) or (len(ids & sent.ids) >= 16 and len(sent.partitions) >= partitions))
    assert sent.partitions == set(range(partitions))
    assert stage.reloads() == 0


def made_anew(stage: Stage, topic: str) -> None:
    """As an operator does who believes that nothing of it is needed."""
    ids = stage.submit("good", 10)
    stage.until(lambda: stage.log.ready_partitions(GOOD) > 0)
    with stage.sent(GOOD) as sent:
        stage.until(lambda: sent.has(ids))
    stage.delete(topic)
    apply(TopicAdmin(stage.settings), plan(TopicAdmin(stage.settings), CATALOG))


NOTICED = r"has decided task-requests\[\d\] up to offset \d+, but the topic ends at \d.*Bring back the topic"


def test_inputs_that_were_made_anew_beside_a_kept_state_are_noticed_at_the_load(stage: Stage) -> None:
    made_anew(stage, TASK_REQUESTS)
    stage.close()
    again = Stage(stage.settings)
    try:
        with pytest.raises(Fatal, match=NOTICED):
            again.until(again.is_loaded)
    finally:
        again.close()


def test_inputs_that_are_made_anew_under_a_running_scheduler_are_noticed_with_the_next_one(stage: Stage) -> None:
    made_anew(stage, TASK_REQUESTS)
    another = KafkaLog(stage.settings, CATALOG, client_id="another")
    stage.logs.append(another)
    stage.submit("good", 1, by=another)
    with pytest.raises(Fatal, match=NOTICED):
        stage.until(lambda: False)
