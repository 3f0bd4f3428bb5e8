"""What operators said is known before anything is let go, and nothing else that stands in the topic disturbs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.core import policies as core
from scheduler.core.policies import WEIGHT_MAX, Policies
from scheduler.policy_topic import AGAIN_US, PolicyFollower, policy_entry
from scheduler.ports import Entry
from schemas.codec import Codec
from schemas.errors import Retriable
from schemas.messages import CancelTask, LimitPolicy, Message, Policy, QueuePolicy, TenantPolicy
from schemas.topics import POLICIES
from tests.harness import eventually

CODEC = Codec.builtin()


@pytest.fixture
def log() -> Iterator[LocalLog]:
    with closing(LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(1))) as broker:
        yield broker.connect(commits=True)


def say(log: LocalLog, *values: Policy | bytes | None) -> None:
    entries = [
        Entry(POLICIES, 0, b"k", one) if one is None or isinstance(one, bytes) else policy_entry(one, CODEC)
        for one in values
    ]
    landed: list[object] = []
    log.append(entries, landed.append)

    def has_landed() -> bool:
        log.poll(0)
        return bool(landed)

    eventually(has_landed)


def paused(queue: str, *, is_paused: bool = True) -> QueuePolicy:
    return QueuePolicy(queue=queue, set_at=1, is_paused=is_paused)


def caught_up(log: LocalLog, codec: Codec = CODEC) -> PolicyFollower:
    follower = PolicyFollower(log, codec)

    def is_current() -> bool:
        log.poll(0)
        follower.follow(0)
        return follower.is_current

    eventually(is_current)
    return follower


def test_without_a_word_everything_goes_on_at_once(log: LocalLog) -> None:
    follower = PolicyFollower(log, CODEC)
    assert follower.is_current
    assert not follower.policies.is_paused("mail")
    assert follower.policies.weight_of("acme") == 1


def test_nothing_counts_as_known_before_all_that_was_said_is_read(log: LocalLog) -> None:
    say(log, paused("mail"), TenantPolicy(tenant_id="acme", set_at=1, weight=5))
    assert not PolicyFollower(log, CODEC).is_current
    policies = caught_up(log).policies
    assert policies.is_paused("mail")
    assert policies.weight_of("acme") == 5


def test_the_last_word_holds(log: LocalLog) -> None:
    say(log, paused("mail"), paused("other"), paused("mail", is_paused=False))
    policies = caught_up(log).policies
    assert (policies.is_paused("mail"), policies.is_paused("other")) == (False, True)


def test_what_is_no_policy_is_passed_over(log: LocalLog) -> None:
    request = CODEC.encode(CancelTask(request_id="r", task_id="t"))
    say(log, paused("mail"), b"junk", None, request, paused("other"))
    policies = caught_up(log).policies
    assert policies.is_paused("mail")
    assert policies.is_paused("other")


class Forgetful(Codec):
    """Cannot reach its registry for a while."""

    failures = 0

    def decode(self, value: bytes | None) -> Message:
        if self.failures:
            self.failures -= 1
            raise Retriable("the registry does not answer")
        return super().decode(value)


def test_a_registry_that_does_not_answer_is_asked_again_and_nothing_is_left_out(log: LocalLog) -> None:
    codec = Forgetful()
    follower = PolicyFollower(log, codec)
    say(log, paused("mail"), paused("other"))
    codec.failures = 1
    eventually(lambda: follower.follow(0))
    assert follower.policies.queues() == []
    assert not follower.follow(AGAIN_US - 1)

    def is_known() -> bool:
        log.poll(0)
        follower.follow(AGAIN_US)
        return len(follower.policies.queues()) == 2

    eventually(is_known)


@pytest.mark.parametrize(("written", "holds"), [(0, 1), (-5, 1), (7, 7), (10**9, WEIGHT_MAX)])
def test_a_weight_that_nobody_may_set_counts_as_the_nearest_that_is_allowed(written: int, holds: int) -> None:
    policies = Policies()
    policies.put(TenantPolicy(tenant_id="t", set_at=0, weight=written))
    assert policies.weight_of("t") == holds


def test_there_are_only_so_many_but_those_that_are_there_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "POLICIES_MAX", 2)
    policies = Policies()
    assert policies.put(paused("a")) is None
    assert policies.put(TenantPolicy(tenant_id="a", set_at=0)) is None
    assert policies.put(paused("b")) == "there are 2 policies already"
    assert policies.put(LimitPolicy(name="b", set_at=0, count=1)) == "there are 2 policies already"
    assert not policies.is_paused("b")
    assert policies.limits() == []
    assert policies.put(paused("a", is_paused=False)) is None
    assert not policies.is_paused("a")
