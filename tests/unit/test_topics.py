"""The topics as data, and what follows from a comparison with those on the brokers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from infra.kafka.topics import Change, Difference, FoundTopic, Plan, compare, wanted_topics
from infra.topics import ClusterSizes, TopicCatalog, cluster_catalog, embedded_catalog
from schemas.topics import (
    INPUT_TOPICS,
    POLICIES,
    REPLIES,
    SHARD_MESSAGES,
    SHARD_STATE,
    SHARD_STATS,
    TASK_EVENTS,
    TASK_REQUESTS,
    TASK_REQUESTS_INVALID,
    WORKER_SIGNALS,
    delay_topic,
)
from schemas.wheel import WheelShape

PREFIX = "p."
SIZES = ClusterSizes(shards=6, ready_partitions=3, reply_partitions=5, replication=3, event_retention_ms=1_000_000)
CATALOG = cluster_catalog(SIZES)
PER_SHARD = (*INPUT_TOPICS, TASK_EVENTS, SHARD_STATE, SHARD_MESSAGES)


def found(catalog: TopicCatalog = CATALOG, queues: Iterable[str] = ()) -> dict[str, FoundTopic]:
    """The brokers as they are once `catalog` was applied, and queues were used."""
    return {
        topic.name: FoundTopic(
            name=topic.name,
            partitions=topic.spec.partitions,
            replication=topic.spec.replication,
            settings={**topic.spec.settings, "compression.type": "producer"},
        )
        for topic in wanted_topics(catalog, PREFIX, [f"{PREFIX}ready.{queue}.high" for queue in queues])
    }


def compared(there: dict[str, FoundTopic], catalog: TopicCatalog = CATALOG) -> Plan:
    return compare(wanted_topics(catalog, PREFIX, there), there)


def only_difference(there: dict[str, FoundTopic]) -> Difference:
    (difference,) = compared(there).differences
    return difference


# --- the catalog ------------------------------------------------------------------------------------------------------


def test_what_belongs_to_shards_has_a_partition_for_each() -> None:
    assert {CATALOG.spec(topic).partitions for topic in PER_SHARD} == {6}
    assert CATALOG.spec("ready.mail.high").partitions == 3
    assert CATALOG.spec(REPLIES).partitions == 5
    assert CATALOG.spec(WORKER_SIGNALS).partitions == CATALOG.spec(TASK_REQUESTS_INVALID).partitions == 1


def test_an_event_has_room_for_all_of_its_request() -> None:
    request, event = (int(CATALOG.spec(topic).settings["max.message.bytes"]) for topic in (TASK_REQUESTS, TASK_EVENTS))
    assert event - request == 64 * 1024


def test_what_holds_until_it_is_replaced_is_compacted_and_nothing_is_removed_by_size() -> None:
    compacted = {spec.name for spec in CATALOG if spec.settings["cleanup.policy"] == "compact"}
    assert compacted == {SHARD_STATE, SHARD_STATS, POLICIES}
    assert all(spec.settings["retention.bytes"] == "-1" for spec in CATALOG if spec.name not in compacted)


def test_all_topics_are_kept_in_copies_of_which_one_may_be_missing() -> None:
    assert {spec.replication for spec in CATALOG} == {3}
    assert {spec.settings["min.insync.replicas"] for spec in CATALOG} == {"2"}
    alone = cluster_catalog(ClusterSizes())
    assert {spec.settings["min.insync.replicas"] for spec in alone} == {"1"}
    chosen = cluster_catalog(replace(SIZES, min_insync=3))
    assert {spec.settings["min.insync.replicas"] for spec in chosen} == {"3"}


def test_both_engines_have_the_same_topics_but_for_the_state() -> None:
    assert {spec.name for spec in CATALOG} - {spec.name for spec in embedded_catalog(4)} == {SHARD_STATE}
    levels = {delay_topic(level) for level in WheelShape().levels}
    assert {spec.name for spec in embedded_catalog(4).durable} == {*INPUT_TOPICS, TASK_EVENTS, POLICIES, *levels}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"shards": 0}, "shards: 0"), ({"replication": 0}, "replication: 0"), ({"min_insync": 2}, "min_insync: 2")],
)
def test_sizes_that_cannot_be_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterSizes(**wrong)


# --- the comparison ---------------------------------------------------------------------------------------------------


def test_what_was_applied_is_as_wanted() -> None:
    plan = compared(found(queues=["mail"]))
    assert plan.is_done
    assert f"{PREFIX}ready.mail.high" in plan.equal
    assert len(plan.equal) == 15


def test_on_empty_brokers_all_is_to_be_created_but_topics_of_queues() -> None:
    plan = compared({})
    assert not plan.is_done
    assert {topic.name for topic in plan.to_create} == {
        f"{PREFIX}{spec.name}" for spec in CATALOG if not spec.is_prefix
    }
    assert not plan.differences


def test_topics_of_others_are_left_out() -> None:
    there = found() | {"other": FoundTopic(name="other", partitions=1, replication=1, settings={})}
    assert "other" not in compared(there).equal
    assert compared(there).is_done


@pytest.mark.parametrize("topic", PER_SHARD)
def test_another_number_of_shards_can_be_brought_about_by_nothing(topic: str) -> None:
    there = found()
    name = f"{PREFIX}{topic}"
    there[name] = replace(there[name], partitions=7)
    difference = only_difference(there)
    assert (difference.topic, difference.wanted, difference.found) == (name, "6", "7")
    assert "fixed for the life of a cluster" in difference.meaning
    assert "shards=7" in difference.remedy
    assert not compared(there).allowed(change_settings=True, allow_data_loss=[name])


def test_slots_of_the_wheel_are_as_many_as_the_shards_have() -> None:
    there, name = found(), f"{PREFIX}{delay_topic(1)}"
    there[name] = replace(there[name], partitions=7)
    difference = only_difference(there)
    assert (difference.wanted, difference.found) == (str(6 * 16), "7")
    assert "task-requests" in difference.remedy
    assert not compared(there).allowed(change_settings=True, allow_data_loss=[name])


@pytest.mark.parametrize(("topic", "setting"), [("ready.mail.high", "ready_partitions"), (REPLIES, "reply_partitions")])
def test_partitions_of_other_topics_can_be_followed(topic: str, setting: str) -> None:
    there = found(queues=["mail"])
    name = f"{PREFIX}{topic}"
    there[name] = replace(there[name], partitions=9)
    difference = only_difference(there)
    assert difference.change is Change.FIXED
    assert setting in difference.remedy
    assert "9" in difference.remedy


def test_copies_are_not_moved_by_us() -> None:
    there = found()
    name = f"{PREFIX}{TASK_EVENTS}"
    there[name] = replace(there[name], replication=2)
    difference = only_difference(there)
    assert difference.change is Change.FIXED
    assert "kafka-reassign-partitions" in difference.remedy


@pytest.mark.parametrize(
    ("topic", "setting", "value", "change"),
    [
        (TASK_EVENTS, "retention.ms", "1000001", Change.LOSES_DATA),  # more is kept than is wanted
        (TASK_EVENTS, "retention.ms", "-1", Change.LOSES_DATA),
        (TASK_EVENTS, "retention.ms", "999999", Change.SETTING),
        (TASK_EVENTS, "retention.bytes", "1000", Change.SETTING),  # wanted: no bound
        (TASK_EVENTS, "cleanup.policy", "compact", Change.LOSES_DATA),
        (SHARD_STATE, "cleanup.policy", "delete", Change.LOSES_DATA),
        (TASK_EVENTS, "max.message.bytes", "9000000", Change.SETTING),
        (TASK_EVENTS, "min.insync.replicas", "1", Change.SETTING),
        (SHARD_STATE, "segment.ms", "1", Change.SETTING),
    ],
)
def test_what_would_remove_records_is_told_from_what_would_not(
    topic: str, setting: str, value: str, change: Change
) -> None:
    there = found()
    name = f"{PREFIX}{topic}"
    there[name] = replace(there[name], settings={**there[name].settings, setting: value})
    difference = only_difference(there)
    assert (difference.topic, difference.name, difference.found) == (name, setting, value)
    assert difference.change is change
    flag = "--change-settings" if change is Change.SETTING else f"--allow-data-loss {name}"
    assert flag in difference.remedy


def test_only_the_permission_for_it_allows_a_change() -> None:
    there = found()
    for topic, setting in ((TASK_EVENTS, "retention.ms"), (TASK_REQUESTS, "retention.ms"), (REPLIES, "segment.ms")):
        name = f"{PREFIX}{topic}"
        there[name] = replace(there[name], settings={**there[name].settings, setting: "99999999999"})
    plan = compared(there)

    def allowed(*, change_settings: bool = False, losing: Iterable[str] = ()) -> set[str]:
        ended = plan.allowed(change_settings=change_settings, allow_data_loss=list(losing))
        return {one.topic.removeprefix(PREFIX) for one in ended}

    assert allowed() == set()
    assert allowed(change_settings=True) == {REPLIES}
    assert allowed(losing=[f"{PREFIX}{TASK_EVENTS}"]) == {TASK_EVENTS}
    assert allowed(change_settings=True, losing=[f"{PREFIX}{TASK_EVENTS}"]) == {REPLIES, TASK_EVENTS}


def test_every_setting_that_may_differ_is_explained() -> None:
    bare = {name: replace(topic, settings={}) for name, topic in found().items()}
    differences = compared(bare).differences
    assert {one.name for one in differences} == {name for spec in CATALOG for name in spec.settings}
    assert all(one.meaning and one.remedy and one.found == "not set" for one in differences)
