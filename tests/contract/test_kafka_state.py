"""`KafkaStateStore` against a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.kafka.settings import KafkaSettings
from infra.kafka.state import KafkaStateStore
from infra.kafka.topics import TopicAdmin, apply, plan
from infra.topics import ClusterSizes, TopicCatalog, cluster_catalog
from schemas.errors import Fenced, Retriable
from schemas.topics import SHARD_STATE
from tests.contract.state_store import StateStoreContract, commit, fenced, loaded
from tests.harness import eventually
from tests.kafka_stage import own_topics
from tests.services import own_cluster

SHARDS = 3


pytestmark = pytest.mark.service("kafka")


@pytest.fixture
def settings() -> Iterator[KafkaSettings]:
    """A broker with a topic for the state of some shards."""
    with own_topics() as made:
        yield with_state(made)


def with_state(settings: KafkaSettings) -> KafkaSettings:
    """The topic of the state is made."""
    admin = TopicAdmin(settings)
    (state,) = [spec for spec in cluster_catalog(ClusterSizes(shards=SHARDS)) if spec.name == SHARD_STATE]
    apply(admin, plan(admin, TopicCatalog([state])))
    return settings


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
        brokers = KafkaSettings(bootstrap=services.kafka.bootstrap)
        store = KafkaStateStore(with_state(brokers))
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
