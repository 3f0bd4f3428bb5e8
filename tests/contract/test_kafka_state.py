"""`KafkaStateStore` against a real broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from infra.kafka.settings import KafkaSettings
from infra.kafka.state import KafkaStateStore
from infra.topics import SHARD_STATE
from schemas.errors import Fenced
from tests.contract.state_store import StateStoreContract, commit, fenced

SHARDS = 3


@pytest.fixture
def settings() -> KafkaSettings:
    """A broker with a topic for the state of some shards."""
    made = KafkaSettings(bootstrap=os.environ["TIDEWHEEL_TEST_KAFKA"], prefix=f"test-{uuid4().hex[:12]}.")
    admin = AdminClient({"bootstrap.servers": made.bootstrap})
    topic = NewTopic(made.prefix + SHARD_STATE, SHARDS, 1, config={"cleanup.policy": "compact"})
    for future in admin.create_topics([topic]).values():
        future.result(10)
    return made


@pytest.fixture
def store(settings: KafkaSettings) -> Iterator[KafkaStateStore]:
    """A store, empty."""
    store = KafkaStateStore(settings)
    yield store
    store.close()


class TestKafkaState(StateStoreContract):
    """The contract, and who is fenced by whom."""

    def test_another_process_fences(self, settings: KafkaSettings, store: KafkaStateStore) -> None:
        other = KafkaStateStore(settings)
        old = fenced(store, 1)
        assert commit(store, 1, old, [(b"a", b"1")]) is None
        new = fenced(other, 1)
        assert dict(other.load(1)) == {b"a": b"1"}
        assert isinstance(commit(store, 1, old, [(b"a", b"2")]), Fenced)
        assert commit(other, 1, new, [(b"b", b"2")]) is None
        assert isinstance(commit(store, 1, old, [(b"a", b"3")]), Fenced)  # still: it must fence and load first
        assert dict(other.load(1)) == {b"a": b"1", b"b": b"2"}
        other.close()
