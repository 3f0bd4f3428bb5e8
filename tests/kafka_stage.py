"""Topics of one test, on the broker that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from infra.kafka.settings import KafkaSettings
from infra.kafka.topics import TopicAdmin
from tests.services import kafka_bootstrap


@contextmanager
def own_topics(bootstrap: str | None = None) -> Iterator[KafkaSettings]:
    """A prefix of its own; what the test made is removed at the end, since each partition costs the broker memory."""
    settings = KafkaSettings(bootstrap=bootstrap or kafka_bootstrap(), prefix=f"test-{uuid4().hex[:12]}.")
    yield settings
    TopicAdmin(settings).remove_all()
