"""`KafkaLog` against a real broker: the contract, and what it does when brokers are away or refuse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import structlog

import infra.kafka.log
from infra.kafka.log import KafkaLog
from infra.kafka.settings import KafkaSettings
from infra.services import Cluster
from infra.topics import RECORD_BYTES_MAX, TopicCatalog, TopicSpec, embedded_catalog
from scheduler.ports import TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError
from tests.contract.log import LogContract, append_and_wait, numbered, poll_until, take_count, values_of
from tests.harness import eventually
from tests.kafka_stage import own_topics
from tests.services import own_cluster

pytestmark = pytest.mark.service("kafka")

AWAY_S = 60.0  # until a dead broker's partitions have other leaders, on a busy machine: it is missed after 9 s


class KafkaWorld:
    """Connections to one broker, with a prefix of their own."""

    def __init__(self, bootstrap: str, catalog: TopicCatalog | None = None, *, prefix: str = "test.") -> None:
        self.settings = KafkaSettings(bootstrap=bootstrap, prefix=prefix)
        self.catalog = catalog or embedded_catalog(2)
        self.logs: list[KafkaLog] = []
        self._numbers = itertools.count()

    def connect(self) -> KafkaLog:
        """A new connection."""
        log = KafkaLog(self.settings, self.catalog, client_id=f"test-{len(self.logs)}")
        self.logs.append(log)
        return log

    def topic(self) -> str:
        """A new topic, which is created by whoever uses it first."""
        return f"ready.queue{next(self._numbers)}.medium"

    def group(self) -> str:
        """A new group."""
        return f"group-{next(self._numbers)}"

    def close(self) -> None:
        """Close all connections."""
        for log in self.logs:
            log.close()


@pytest.fixture
def world() -> Iterator[KafkaWorld]:
    """The broker that the tests share."""
    with own_topics() as settings:
        made = KafkaWorld(settings.bootstrap, prefix=settings.prefix)
        yield made
        made.close()


class TestKafkaLog(LogContract):
    """The contract."""

    members_agree = True


# --- what the broker refuses ------------------------------------------------------------------------------------------


def test_where_nobody_listens_it_says_so_soon() -> None:
    with structlog.testing.capture_logs(), pytest.raises(Retriable, match="cannot connect"):
        KafkaWorld("127.0.0.1:1").connect()


def test_a_topic_that_apply_should_have_made_is_named(world: KafkaWorld) -> None:
    with pytest.raises(Fatal, match=r"task-events.*tidewheel topics apply"):
        world.connect().partitions("task-events")
    with pytest.raises(Fatal, match="there is no topic 'tsak-events'"):
        world.connect().partitions("tsak-events")


def test_a_record_that_is_too_large_fails_what_is_with_it_and_nothing_later(world: KafkaWorld) -> None:
    log, topic = world.connect(), world.topic()
    acks: list[object] = []
    large = numbered(topic, 0, [1])[0]._replace(value=bytes(4 * RECORD_BYTES_MAX))
    with structlog.testing.capture_logs():
        log.append([*numbered(topic, 0, [0]), large], acks.append)
        poll_until(lambda: bool(acks), log)
    assert isinstance(acks[0], Fatal)
    assert "max.message.bytes" in str(acks[0])
    append_and_wait(log, numbered(topic, 0, [2]))


# --- brokers that are away --------------------------------------------------------------------------------------------


@pytest.fixture
def lonely() -> Iterator[tuple[KafkaWorld, Cluster]]:
    """A broker of one's own, which may be stopped and killed."""
    with own_cluster(kafka=1) as cluster:
        catalog = TopicCatalog([TopicSpec("ready.", 2, is_durable=True, is_prefix=True)])
        made = KafkaWorld(cluster.kafka.bootstrap, catalog)
        yield made, cluster
        made.close()


def test_while_the_broker_stands_still_nothing_hangs_and_what_fails_fails_together(
    lonely: tuple[KafkaWorld, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, cluster = lonely
    monkeypatch.setattr(infra.kafka.log, "DELIVERY_S", 2.0)
    log, topic = world.connect(), world.topic()
    append_and_wait(log, numbered(topic, 0, [0]))
    (broker,) = cluster.nodes
    acks: list[list[int] | TidewheelIOError] = []
    with structlog.testing.capture_logs():
        broker.pause()
        for number in range(1, 6):
            log.append(numbered(topic, number % 2, [number]), acks.append)  # type: ignore[arg-type]
        poll_until(lambda: bool(acks), log)
        assert len(acks) == 5
        assert all(isinstance(ack, Retriable) for ack in acks)
        with pytest.raises(Retriable):
            log.end_offset(TopicPartition(topic, 0))
        broker.resume()
        append_and_wait(log, numbered(topic, 0, [9]))
    reader = log.reader()
    reader.seek(TopicPartition(topic, 0), 0)
    values = values_of(take_count(log, reader, log.end_offset(TopicPartition(topic, 0))))
    late = [value for value in values if value in (b"v2", b"v4")]  # sent or not, but none without those before it
    assert late == [b"v2", b"v4"][: len(late)]
    assert (values[0], b"v9" in values) == (b"v0", True)


def test_it_goes_on_when_a_killed_broker_is_back(lonely: tuple[KafkaWorld, Cluster]) -> None:
    world, cluster = lonely
    log, topic = world.connect(), world.topic()
    partition = TopicPartition(topic, 0)
    append_and_wait(log, numbered(topic, 0, [0]))
    reader = log.reader()
    reader.seek(partition, 0)
    assert values_of(take_count(log, reader, 1)) == [b"v0"]
    (broker,) = cluster.nodes
    with structlog.testing.capture_logs():
        broker.kill()
        acks: list[object] = []
        log.append(numbered(topic, 0, [1]), acks.append)
        log.poll(0.1)
        assert not acks
        cluster.up()
        poll_until(lambda: bool(acks), log)
    assert not isinstance(acks[0], TidewheelIOError)
    assert values_of(take_count(log, reader, 1)) == [b"v1"]


@pytest.mark.slow
def test_where_a_partition_ends_is_known_again_though_its_leader_stays_away() -> None:
    """Others lead what a broker led that is gone; the client would ask the dead one for minutes."""
    with own_cluster(kafka=3) as cluster, structlog.testing.capture_logs():
        spec = TopicSpec("ready.", 3, is_durable=True, is_prefix=True, replication=3)
        world = KafkaWorld(cluster.kafka.bootstrap, TopicCatalog([spec]))
        log, topic = world.connect(), world.topic()
        append_and_wait(log, [*numbered(topic, 0, [0]), *numbered(topic, 1, [1]), *numbered(topic, 2, [2])])
        places = [TopicPartition(topic, number) for number in range(3)]
        assert [log.end_offset(place) for place in places] == [1, 1, 1]
        cluster.node("kafka-2").kill()  # which led one of them

        def are_known() -> bool:
            log.poll(0)
            try:
                return [log.end_offset(place) for place in places] == [1, 1, 1]
            except Retriable:
                return False

        eventually(are_known, "all three answer", AWAY_S)
        world.close()


@pytest.mark.slow
def test_silence_has_an_excuse_until_what_a_dead_broker_led_can_be_read_again() -> None:
    """Brokers miss one of them after 9 s: whoever writes to its partitions is not heard of before."""
    with own_cluster(kafka=3) as cluster, structlog.testing.capture_logs():
        spec = TopicSpec("ready.", 3, is_durable=True, is_prefix=True, replication=3)
        world = KafkaWorld(cluster.kafka.bootstrap, TopicCatalog([spec]))
        hearing, speaking, topic = world.connect(), world.connect(), world.topic()
        entries = [entry for number in range(3) for entry in numbered(topic, number, [number])]
        append_and_wait(speaking, entries)
        reader = hearing.reader()
        for number in range(3):
            reader.seek(TopicPartition(topic, number), 0)
        take_count(hearing, reader, 3)
        cluster.node("kafka-2").kill()  # which led one of them
        poll_until(hearing.is_disturbed, hearing)
        speaking.append(entries)
        heard = 0

        def is_all_heard() -> bool:
            nonlocal heard
            hearing.poll(0.01)
            speaking.poll(0)
            heard += len(reader.take(10))
            assert heard == 3 or hearing.is_disturbed()
            return heard == 3

        eventually(is_all_heard, "all three are read", AWAY_S)
        world.close()


@pytest.mark.timeout(60)
def test_closing_ends_though_the_broker_stands_still(lonely: tuple[KafkaWorld, Cluster]) -> None:
    world, cluster = lonely
    log, topic = world.connect(), world.topic()
    member = log.member(world.group(), [topic])
    poll_until(lambda: bool(member.assigned()), log)
    (broker,) = cluster.nodes
    with structlog.testing.capture_logs():
        broker.pause()
        log.append(numbered(topic, 0, [1]))
        log.close()  # or the test runs into its limit
        broker.resume()
    assert not member.assigned()
    with pytest.raises(Fatal, match="closed"):
        log.append(numbered(topic, 0, [2]))
