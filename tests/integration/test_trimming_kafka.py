"""What was read of the delay wheel goes from the brokers when it may, and nothing else does."""

from __future__ import annotations

import pytest

from infra.kafka.log import KafkaLog
from infra.kafka.topics import TopicAdmin, wanted_topics
from infra.topics import ClusterSizes, cluster_catalog
from scheduler.ports import Record, TopicPartition
from schemas.topics import TASK_REQUESTS, delay_topic
from tests.contract.log import append_and_wait, numbered, poll_until, take_count, values_of
from tests.kafka_stage import own_topics

pytestmark = pytest.mark.service("kafka")


def test_slots_are_kept_until_they_were_read() -> None:
    with own_topics() as settings:
        catalog = cluster_catalog(ClusterSizes(shards=1))
        admin = TopicAdmin(settings)
        slot, requests = TopicPartition(delay_topic(0), 3), TopicPartition(TASK_REQUESTS, 0)
        names = {settings.prefix + topic for topic, _ in (slot, requests)}
        for wanted in wanted_topics(catalog, settings.prefix, ()):
            if wanted.name in names:
                assert admin.create(wanted)
        admin.await_everywhere(names)
        log = KafkaLog(settings, catalog, client_id="test")
        try:
            for topic, number in (slot, requests):
                append_and_wait(log, numbered(topic, number, range(10)))
                log.trim(TopicPartition(topic, number), 6)

            def first() -> Record:
                reader = log.reader()
                reader.seek(slot, 0)
                record = take_count(log, reader, 1, limit=1)[0]
                reader.close()
                return record

            poll_until(lambda: first().offset == 6, log)
            reader = log.reader()
            reader.seek(requests, 0)
            assert len(values_of(take_count(log, reader, 10))) == 10
            reader.close()
        finally:
            log.close()
