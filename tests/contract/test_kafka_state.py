"""`KafkaStateStore` against a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from infra.kafka.settings import KafkaSettings
from infra.kafka.state import KafkaStateStore
from infra.kafka.topics import TopicAdmin, apply, plan
from infra.topics import ClusterSizes, cluster_catalog
from schemas.errors import Fenced, Retriable
from tests.contract.state_store import StateStoreContract, commit, fenced, loaded
from tests.harness import eventually
from tests.services import kafka_bootstrap, own_cluster

SHARDS = 3


pytestmark = pytest.mark.service("kafka")


@pytest.fixture
def settings() -> KafkaSettings:
    """A broker with a topic for the state of some shards."""
    return with_topics(kafka_bootstrap())


def with_topics(bootstrap: str) -> KafkaSettings:
    """Topics of a name of their own."""
    made = KafkaSettings(bootstrap=bootstrap, prefix=f"test-{uuid4().hex[:12]}.")
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
        assert loaded(other, 1) == {b"a": b"1"}
        assert isinstance(commit(store, 1, old, [(b"a", b"2")]), Fenced)
        assert commit(other, 1, new, [(b"b", b"2")]) is None
        assert isinstance(commit(store, 1, old, [(b"a", b"3")]), Fenced)  # still: it must fence and load first
        assert loaded(other, 1) == {b"a": b"1", b"b": b"2"}
        other.close()

    def test_a_new_fence_does_not_show_what_an_older_load_read(
        self, settings: KafkaSettings, store: KafkaStateStore
    ) -> None:
        fenced(store, 1)
        assert store.load(1) is None  # begun, and given up: whoever asked lost the shard
        other = KafkaStateStore(settings)
        assert commit(other, 1, fenced(other, 1), [(b"a", b"1")]) is None
        other.close()
        fenced(store, 1)
        assert loaded(store, 1) == {b"a": b"1"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_load_keeps_nobody_waiting_while_the_broker_is_away() -> None:
    with own_cluster(kafka=1) as services:
        store = KafkaStateStore(with_topics(services.kafka.bootstrap))
        assert commit(store, 0, fenced(store, 0), [(b"a", b"1")]) is None
        (broker,) = services.nodes
        broker.pause()
        assert store.load(0) is None
        with pytest.raises(Retriable, match=r"shard 0|shard-state"):
            eventually(lambda: store.load(0) is not None, "the load gives up")
        broker.resume()
        eventually(lambda: can_load(store), "the broker is back")
        assert loaded(store, 0) == {b"a": b"1"}
        store.close()


def can_load(store: KafkaStateStore) -> bool:
    """Whether the state of shard 0 is read by now."""
    try:
        return store.load(0) is not None
    except Retriable:
        return False
