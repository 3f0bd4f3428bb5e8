"""`KafkaLog` against a real broker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from infra.kafka.log import KafkaLog
from infra.kafka.settings import KafkaSettings
from infra.topics import embedded_catalog
from tests.contract.log import LogContract

PARTITIONS = 4
_admins: dict[str, AdminClient] = {}


class KafkaWorld:
    """Connections to one broker, with a prefix of their own."""

    def __init__(self, bootstrap: str) -> None:
        self.settings = KafkaSettings(bootstrap=bootstrap, prefix=f"test-{uuid4().hex[:12]}.")
        self.logs: list[KafkaLog] = []
        self._numbers = itertools.count()

    def connect(self) -> KafkaLog:
        """A new connection."""
        log = KafkaLog(self.settings, embedded_catalog(2), client_id=f"test-{len(self.logs)}")
        self.logs.append(log)
        return log

    def topic(self) -> str:
        """A new topic."""
        name = f"ready.queue{next(self._numbers)}.medium"
        admin = _admins.setdefault(self.settings.bootstrap, AdminClient({"bootstrap.servers": self.settings.bootstrap}))
        for future in admin.create_topics([NewTopic(self.settings.prefix + name, PARTITIONS, 1)]).values():
            future.result(10)
        return name

    def group(self) -> str:
        """A new group."""
        return f"group-{next(self._numbers)}"


@pytest.fixture
def world() -> Iterator[KafkaWorld]:
    made = KafkaWorld(os.environ["TIDEWHEEL_TEST_KAFKA"])
    yield made
    for log in made.logs:
        log.close()


class TestKafkaLog(LogContract):
    """The contract."""

    members_agree = True
