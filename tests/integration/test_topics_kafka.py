"""Topics on real brokers: what is created, what is changed and what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import structlog

from infra.kafka.names import Names
from infra.kafka.settings import KafkaSettings
from infra.kafka.topics import Change, TopicAdmin, apply, ensure_topic, plan
from infra.topics import ClusterSizes, cluster_catalog
from schemas.errors import Fatal, Retriable
from schemas.topics import REPLIES, SHARD_STATE, TASK_EVENTS, TASK_REQUESTS
from schemas.wheel import MINUTE_US, WheelShape
from tests.harness import eventually
from tests.kafka_stage import own_topics
from tests.services import kafka_bootstrap, own_cluster
from tidewheel.brokers import check_topics

pytestmark = pytest.mark.service("kafka")

SIZES = ClusterSizes(shards=3, reply_partitions=2, ready_partitions=2)
SMALL = WheelShape(widths_us=(MINUTE_US,), leads_us=(MINUTE_US,), slots=2)
CATALOG = cluster_catalog(SIZES)
ROUNDS, LOOKS = 6, 9  # of brokers that a client chooses at random; without the wait the first rounds fail
OTHER_RETENTION = cluster_catalog(replace(SIZES, event_retention_ms=3_600_000))


@pytest.fixture
def settings() -> Iterator[KafkaSettings]:
    with own_topics() as made:
        yield made


@pytest.fixture
def admin(settings: KafkaSettings) -> TopicAdmin:
    return TopicAdmin(settings)


def test_what_is_missing_is_created_as_it_is_described_and_only_once(admin: TopicAdmin) -> None:
    before = plan(admin, CATALOG)
    assert {topic.name for topic in before.to_create} == {
        f"{admin.prefix}{spec.name}" for spec in CATALOG if not spec.is_prefix
    }
    assert apply(admin, before) == ()
    found = admin.found()
    for spec in CATALOG:
        if not spec.is_prefix:
            topic = found[f"{admin.prefix}{spec.name}"]
            assert (topic.partitions, topic.replication) == (spec.partitions, 1)
            assert topic.settings.items() >= spec.settings.items()
    after = plan(admin, CATALOG)
    assert after.is_done
    assert apply(admin, after) == ()
    assert apply(admin, before) == ()  # by a second process that compared before the first one applied
    assert plan(admin, CATALOG).is_done


def test_settings_of_a_topic_that_is_there_are_changed_with_permission_alone(admin: TopicAdmin) -> None:
    apply(admin, plan(admin, OTHER_RETENTION))
    name = f"{admin.prefix}{TASK_EVENTS}"
    admin.change(name, {"compression.type": "lz4"})  # the operator's own, of which the catalog says nothing
    longer = plan(admin, CATALOG)
    (difference,) = longer.differences
    assert (difference.topic, difference.name, difference.change) == (name, "retention.ms", Change.SETTING)
    assert apply(admin, longer) == ()
    assert admin.found()[name].settings["retention.ms"] == "3600000"
    assert apply(admin, longer, change_settings=True) == (difference,)
    assert eventually(lambda: plan(admin, CATALOG).is_done, "the change")
    assert admin.found()[name].settings["compression.type"] == "lz4"


def test_what_removes_records_is_done_for_the_named_topic_alone(admin: TopicAdmin) -> None:
    apply(admin, plan(admin, CATALOG))
    events, requests = f"{admin.prefix}{TASK_EVENTS}", f"{admin.prefix}{TASK_REQUESTS}"
    admin.change(requests, {"retention.ms": "-1"})
    found = eventually(lambda: p if len((p := plan(admin, OTHER_RETENTION)).differences) == 2 else None, "both")
    assert {one.change for one in found.differences} == {Change.LOSES_DATA}
    assert apply(admin, found, change_settings=True) == ()
    ended = apply(admin, found, allow_data_loss=[events])
    assert [one.topic for one in ended] == [events]
    left = eventually(lambda: p if len((p := plan(admin, OTHER_RETENTION)).differences) == 1 else None, "one is done")
    assert left.differences[0].topic == requests
    assert admin.found()[requests].settings["retention.ms"] == "-1"


def test_partitions_are_never_changed(admin: TopicAdmin) -> None:
    apply(admin, plan(admin, CATALOG))
    more = cluster_catalog(replace(SIZES, shards=4, reply_partitions=5))
    found = plan(admin, more)
    names = [one.topic for one in found.differences]
    assert apply(admin, found, change_settings=True, allow_data_loss=names) == ()
    assert admin.found()[f"{admin.prefix}{REPLIES}"].partitions == 2
    assert admin.found()[f"{admin.prefix}{SHARD_STATE}"].partitions == 3


def test_a_topic_of_a_queue_is_created_once_by_many_at_once(settings: KafkaSettings) -> None:
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ensure_topic, settings, CATALOG, "ready.mail.high") for _ in range(8)]
    assert [one.result() for one in asked] == [2] * 8
    assert ensure_topic(settings, CATALOG, "ready.mail.high") == 2
    # One that others made otherwise is taken as it is.
    assert ensure_topic(settings, cluster_catalog(replace(SIZES, ready_partitions=5)), "ready.mail.high") == 2


def test_topics_of_queues_that_are_there_are_compared_too(settings: KafkaSettings, admin: TopicAdmin) -> None:
    apply(admin, plan(admin, CATALOG))
    ensure_topic(settings, CATALOG, "ready.mail.low")
    assert f"{admin.prefix}ready.mail.low" in plan(admin, CATALOG).equal
    (difference,) = plan(admin, cluster_catalog(replace(SIZES, ready_partitions=3))).differences
    assert difference.change is Change.FIXED


def test_topics_of_queues_with_other_partitions_are_used_and_named_at_the_start(
    settings: KafkaSettings, admin: TopicAdmin
) -> None:
    apply(admin, plan(admin, CATALOG))
    ensure_topic(settings, CATALOG, "ready.mail.low")
    with structlog.testing.capture_logs() as said:
        check_topics(admin, CATALOG)
        assert said == []
        check_topics(admin, cluster_catalog(replace(SIZES, ready_partitions=3)))
    (line,) = said
    assert (line["topic"], line["partitions"], line["configured"]) == (f"{admin.prefix}ready.mail.low", 2, 3)


def test_more_copies_than_brokers_are_refused_with_what_to_set(admin: TopicAdmin) -> None:
    with pytest.raises(Fatal, match=r"set kafka\.replication"):
        apply(admin, plan(admin, cluster_catalog(replace(SIZES, replication=30))))


def test_a_queue_may_have_a_name_that_brokers_do_not_take(settings: KafkaSettings) -> None:
    names = Names(settings.prefix)
    queues = ("a:b", "a-b", "a_.b", "q" * 300, "q" * 301)
    assert len({names.physical(f"ready.{queue}.high") for queue in queues}) == len(queues)
    for queue in queues:
        assert ensure_topic(settings, CATALOG, f"ready.{queue}.high") == CATALOG.spec("ready.x.high").partitions
        assert names.logical(names.physical(f"ready.{queue}.high")) == f"ready.{queue}.high"


@pytest.mark.parametrize("ask", [TopicAdmin.partition_counts, TopicAdmin.ping])
def test_brokers_that_are_not_there_are_named(ask: Callable[[TopicAdmin, float], object]) -> None:
    nobody = TopicAdmin(KafkaSettings(bootstrap="127.0.0.1:1"))
    with pytest.raises(Retriable, match=r"no broker of 127\.0\.0\.1:1 answers: .*Connection refused"):
        ask(nobody, 1.0)


def test_whoever_asks_whether_brokers_answer_creates_nothing(admin: TopicAdmin) -> None:
    """A client that asks for a topic by its name may create it, where brokers allow that."""
    admin.ping(5.0)
    assert admin.found() == {}


def test_credentials_that_the_brokers_do_not_take_are_final() -> None:
    secret = "not-to-be-told"
    security = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "u"}
    given = KafkaSettings(bootstrap=kafka_bootstrap(), security={**security, "sasl.password": secret})
    with pytest.raises(Fatal, match="does not accept the credentials") as caught:
        TopicAdmin(given).partition_counts(1.0)
    assert secret not in str(caught.value)


@pytest.mark.slow
def test_what_was_just_created_is_there_whichever_broker_answers() -> None:
    """Three brokers hear of a new topic one after the other."""
    with own_cluster(kafka=3) as services:
        for number in range(ROUNDS):
            made = TopicAdmin(KafkaSettings(bootstrap=services.kafka.bootstrap, prefix=f"{number}."))
            catalog = cluster_catalog(replace(SIZES, shards=16, replication=3, wheel=SMALL))
            apply(made, plan(made, catalog))
            assert plan(made, catalog).is_done
            for _ in range(LOOKS):
                check_topics(
                    TopicAdmin(KafkaSettings(bootstrap=services.kafka.bootstrap, prefix=f"{number}.")), catalog
                )
