"""A scheduler over bare topics of either engine: the test writes records as a foreign producer does, and reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import NamedTuple

import pytest

from infra.kafka.log import KafkaLog
from infra.kafka.settings import KafkaSettings
from infra.kafka.state import KafkaStateStore
from infra.kafka.topics import TopicAdmin, wanted_topics
from infra.local import LocalBroker
from infra.sqlite import SqliteLogStorage, SqliteStateStore
from infra.topics import DEFAULT_WHEEL, ClusterSizes, cluster_catalog, embedded_catalog
from scheduler.core.shard import ShardSettings
from scheduler.host import Phase, RuntimeSettings
from scheduler.ports import Entry, Log, Record, StateStore, TopicPartition
from scheduler.runtime import SchedulerRuntime
from schemas.codec import Codec
from schemas.messages import Event, InvalidRecord, ShardOpened
from schemas.topics import TASK_EVENTS, TASK_REQUESTS_INVALID
from schemas.wheel import MINUTE_US, WheelShape
from tests.harness import eventually
from tests.kafka_stage import own_topics
from tidewheel.clock import SteadyClock

ENGINES = ("embedded", pytest.param("kafka", marks=pytest.mark.service("kafka")))
BUILTIN = Codec.builtin()

WHEEL = WheelShape(widths_us=(MINUTE_US,), leads_us=(MINUTE_US,), slots=2)  # a broker makes few partitions sooner


class Topics(NamedTuple):
    """The topics of one test. `connect` opens a connection, the first of which is a scheduler's."""

    connect: Callable[[], Log]
    states: StateStore
    prefix: str = ""
    wheel: WheelShape = DEFAULT_WHEEL


class TopicsStage:
    """The topics, and one scheduler that turns while the test waits. `codec` is the scheduler's."""

    def __init__(self, topics: Topics, codec: Codec, shards: int) -> None:
        self.topics, self.codec, self.shards = topics, codec, shards
        self.log = log = topics.connect()
        settings = RuntimeSettings(owner="test", checkpoint_us=0, shard=ShardSettings(wheel=topics.wheel))
        self.runtime = SchedulerRuntime(log, topics.states, codec, SteadyClock(), Random(1), settings)
        self.until(self._is_active)

    def _is_active(self) -> bool:
        hosts = self.runtime.hosts.values()
        return len(hosts) == self.shards and all(host.phase is Phase.ACTIVE for host in hosts)

    def until(self, fact: Callable[[], object]) -> None:
        """Turn the scheduler until the fact is there."""

        def is_there() -> bool:
            self.runtime.step(0)
            return bool(fact())

        eventually(is_there)

    def write(self, topic: str, partition: int, *records: tuple[bytes | None, bytes | None]) -> list[int]:
        """Append keys and values as they are; the offsets at which they stand."""
        results: list[object] = []
        self.log.append([Entry(topic, partition, key, value) for key, value in records], results.append)
        self.until(lambda: results)
        assert isinstance(results[0], list | tuple), results
        return list(results[0])

    def decided(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the scheduler has decided the record."""
        return self.runtime.hosts[partition].shard.state.positions.get(topic, 0) > offset

    def read(self, topic: str) -> list[Record]:
        """All records that the topic holds now."""
        records: list[Record] = []
        for partition in range(self.log.partitions(topic)):
            place = TopicPartition(topic, partition)
            reader = self.log.reader()
            reader.seek(place, 0)
            self._read_to_end(place, reader.take, records)
            reader.close()
        return records

    def _read_to_end(self, place: TopicPartition, take: Callable[[int], object], records: list[Record]) -> None:
        def is_at_end() -> bool:
            taken = take(1_000)
            assert isinstance(taken, list | tuple)
            records.extend(taken)
            next_offset = records[-1].offset + 1 if records and records[-1].partition == place.partition else 0
            return next_offset >= self.log.end_offset(place)

        self.until(is_at_end)

    def invalid(self, count: int) -> list[InvalidRecord]:
        """What stands on task-requests-invalid, once so many records are there; copies count once."""
        found: dict[tuple[str, int, int], InvalidRecord] = {}

        def are_there() -> bool:
            for record in self.read(TASK_REQUESTS_INVALID):
                message = self.codec.decode(record.value)
                assert isinstance(message, InvalidRecord)
                found[message.topic, message.partition, message.offset] = message
            return len(found) >= count

        self.until(are_there)
        assert len(found) == count, found
        return [found[place] for place in sorted(found)]

    def events(self) -> list[Event]:
        """What was decided, once all of it is in the log."""
        self.until(lambda: not any(host.has_unacknowledged() for host in self.runtime.hosts.values()))
        events = (self.codec.decode(record.value) for record in self.read(TASK_EVENTS) if record.value)
        return [event for event in events if isinstance(event, Event) and not isinstance(event.body, ShardOpened)]


@contextmanager
def staged(engine: str, *, shards: int = 1, codec: Codec = BUILTIN) -> Iterator[TopicsStage]:
    """A stage on the engine of that name."""
    with _on_kafka(shards) if engine == "kafka" else _embedded(shards) as topics:
        yield TopicsStage(topics, codec, shards)


@contextmanager
def _embedded(shards: int) -> Iterator[Topics]:
    storage, states = SqliteLogStorage(":memory:"), SqliteStateStore(":memory:")
    broker = LocalBroker(storage, embedded_catalog(shards))
    try:
        yield Topics(partial(broker.connect, commits=True), states)
    finally:
        broker.close()
        storage.close()
        states.close()


@contextmanager
def _on_kafka(shards: int) -> Iterator[Topics]:
    with own_topics() as settings:
        yield from _topics(settings, shards)


def _topics(settings: KafkaSettings, shards: int) -> Iterator[Topics]:
    catalog = cluster_catalog(ClusterSizes(shards=shards, reply_partitions=1, replication=1, wheel=WHEEL))
    admin = TopicAdmin(settings)
    wanted = wanted_topics(catalog, settings.prefix, ())
    for topic in wanted:
        admin.create(topic)
    admin.await_everywhere({topic.name for topic in wanted})
    states = KafkaStateStore(settings)
    logs: list[Log] = []

    def connect() -> Log:
        logs.append(KafkaLog(settings, catalog, client_id=f"test-{len(logs)}"))
        return logs[-1]

    try:
        yield Topics(connect, states, settings.prefix, WHEEL)
    finally:
        for log in logs:
            log.close()
        states.close()
