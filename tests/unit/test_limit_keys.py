"""Which tasks a limit concerns, under which key, and what nobody may declare."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.limit_keys import (
    COUNT_MAX,
    HELD_MAX,
    KEY_MAX,
    Concurrency,
    LimitProblem,
    Rate,
    home_of,
    limit_of,
    name_of,
)
from scheduler.core.policies import LIMITS_MAX, Policies
from schemas.messages import LimitPolicy, LimitStrategy, Priority, TaskSpec


def policy(**fields: Any) -> LimitPolicy:
    given: dict[str, Any] = {"name": "mail", "set_at": 0, "count": 10, **fields}
    return LimitPolicy(**given)


def spec(**fields: Any) -> TaskSpec:
    given: dict[str, Any] = {"task_type": "send", "queue": "mail", "tenant_id": "acme", **fields}
    return TaskSpec(**given)


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("", "mail/"),
        ("{tenant_id}", "mail/acme"),
        ("{tenant_id}:{task_type}:{queue}:{priority}", "mail/acme:send:mail:high"),
        ("eu-{metadata.region}", "mail/eu-west"),
        ("{metadata.a.b}", "mail/dotted"),
        ("{{{tenant_id}}}", "mail/{acme}"),
        ("{metadata.missing}", None),
        ("{tenant_id}{metadata.missing}", None),
    ],
)
def test_each_rendering_of_the_template_is_a_key(template: str, key: str | None) -> None:
    task = spec(priority=Priority.HIGH, metadata={"region": "west", "a.b": "dotted"})
    assert limit_of(policy(key=template)).key_of(task) == key


@pytest.mark.parametrize(
    ("where", "is_concerned"),
    [
        ({}, True),
        ({"task_type": "send"}, True),
        ({"task_type": "send", "queue": "mail"}, True),
        ({"task_type": "send", "queue": "other"}, False),
        ({"metadata.region": "west"}, True),
        ({"metadata.region": ""}, False),
        ({"metadata.missing": ""}, False),
    ],
)
def test_a_limit_concerns_the_tasks_that_have_all_its_values(where: dict[str, str], is_concerned: bool) -> None:
    found = limit_of(policy(where=where)).key_of(spec(metadata={"region": "west"}))
    assert (found is not None) == is_concerned


def test_a_long_key_is_replaced_by_its_digest_and_no_two_become_the_same() -> None:
    limit = limit_of(policy(key="{metadata.x}"))
    first, second = (limit.key_of(spec(metadata={"x": "y" * KEY_MAX + end})) for end in "ab")
    assert first is not None
    assert second is not None
    assert first != second
    assert len(first) < KEY_MAX
    assert name_of(first) == "mail"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"count": 5}, Concurrency(5)),
        ({"count": 1, "strategy": LimitStrategy.CANCEL_OLDEST}, Concurrency(1, LimitStrategy.CANCEL_OLDEST)),
        ({"count": 100, "period_ms": 1_000}, Rate(100, 1_000_000, 10)),
        ({"count": 10, "period_ms": 60_000}, Rate(10, 60_000_000, 1)),
        ({"count": 10, "period_ms": 60_000, "burst": 10}, Rate(10, 60_000_000, 10)),
        ({"count": COUNT_MAX, "period_ms": 1}, Rate(COUNT_MAX, 1_000, HELD_MAX)),
    ],
)
def test_with_a_period_it_is_a_rate(fields: dict[str, Any], rule: object) -> None:
    assert limit_of(policy(**fields)).rule == rule


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "no name"}, "name is not accepted; allowed: 1 to 128 characters"),
        ({"name": "a/b"}, "name is not accepted"),
        ({"count": 0}, "count is 0; allowed: 1 to 5,000"),
        ({"count": 5_001}, "count is 5001; allowed: 1 to 5,000"),
        ({"count": 1_000_001, "period_ms": 1}, "count is 1000001; allowed: 1 to 1,000,000"),
        ({"period_ms": 0}, "period_ms is 0; allowed: 1 to"),
        ({"period_ms": 1_000, "burst": 0}, "burst is 0; allowed: 1 to 5,000"),
        ({"burst": 3}, "burst is for rates; allowed: none without period_ms"),
        ({"strategy": LimitStrategy.UNKNOWN}, "strategy is not known here; allowed: wait, cancel_oldest, reject"),
        ({"period_ms": 1, "strategy": LimitStrategy.REJECT}, "strategy is for limits of concurrency"),
        ({"key": "{payload.x}"}, "key names the field 'payload.x'; allowed: task_type, queue"),
        ({"key": "{metadata.}"}, "key names the field 'metadata.'"),
        ({"key": "{}"}, "key names the field ''"),
        ({"key": "{tenant_id!r}"}, "key has a format"),
        ({"key": "{tenant_id:>10}"}, "key has a format"),
        ({"key": "{tenant_id"}, "key cannot be read"),
        ({"key": "}"}, "key cannot be read"),
        ({"key": "x" * 257}, "key has 257 characters; allowed: at most 256"),
        ({"where": {"status": "x"}}, "where names the field 'status'"),
    ],
)
def test_what_nobody_may_declare_is_told_with_the_field_and_what_is_allowed(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(LimitProblem) as caught:
        limit_of(policy(**fields))
    assert str(caught.value).startswith(message)
    policies = Policies()
    assert policies.put(policy(**fields)) == str(caught.value), "what comes by the topic is refused just the same"
    assert policies.limits() == []


def test_permits_are_taken_before_tokens_and_in_one_order() -> None:
    policies = Policies()
    for name, period_ms in (("b", None), ("z", 1_000), ("a", None), ("c", 1_000)):
        policies.put(policy(name=name, period_ms=period_ms))
    assert policies.keys_of(spec()) == ("a/", "b/", "c/", "z/")


def test_a_limit_that_is_removed_concerns_nobody() -> None:
    policies = Policies()
    policies.put(policy())
    changes = len(policies.gate_changes)
    policies.put(policy(is_removed=True))
    assert policies.keys_of(spec()) == ()
    assert policies.rule_of("mail/") is None
    assert policies.gate_changes[changes:] == [None]


def test_there_are_only_so_many_limits_but_those_that_are_there_can_change() -> None:
    policies = Policies()
    for number in range(LIMITS_MAX):
        assert policies.put(policy(name=f"l{number}")) is None
    assert policies.put(policy(name="more")) == f"there are {LIMITS_MAX} limits already"
    assert policies.put(policy(name="l0", count=3)) is None
    assert policies.rule_of("l0/x") == Concurrency(3)


def test_homes_are_spread_and_a_dot_in_a_key_does_not_matter() -> None:
    homes = {home_of(f"mail/a.{number}", 8) for number in range(200)}
    assert homes == set(range(8))
