"""`KafkaStateStore` against a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from infra.kafka.settings import KafkaSettings
from infra.kafka.state import KafkaStateStore
from infra.kafka.topics import TopicAdmin, apply, plan
from infra.topics import ClusterSizes, cluster_catalog
from schemas.errors import Fenced
from tests.contract.state_store import StateStoreContract, commit, fenced
from tests.services import kafka_bootstrap

SHARDS = 3


pytestmark = pytest.mark.service("kafka")


@pytest.fixture
def settings() -> KafkaSettings:
    """A broker with a topic for the state of some shards."""
    made = KafkaSettings(bootstrap=kafka_bootstrap(), prefix=f"test-{uuid4().hex[:12]}.")
    admin = TopicAdmin(made)
    apply(admin, plan(admin, cluster_catalog(ClusterSizes(shards=SHARDS))))
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
