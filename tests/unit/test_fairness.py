"""Which waiting task is the next: by priority, tenant and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest

from scheduler.core.fairness import FairQueue, equal_weights
from schemas.messages import Priority
from schemas.priorities import PRIORITIES

ALL = list(PRIORITIES)
LOW, HIGH = Priority.LOW, Priority.HIGH


def filled(counts: Mapping[str, int], priority: Priority = LOW) -> FairQueue[str]:
    queue = FairQueue("q", {})
    for tenant_id, count in counts.items():
        for number in range(count):
            queue.put(f"{tenant_id}{number}", priority, tenant_id)
    return queue


def popped(queue: FairQueue[str], count: int, weights: Mapping[str, int] | None = None) -> list[str]:
    """Ids, in order."""
    found = []
    for _ in range(count):
        taken = queue.pop(ALL, (weights or {}).__getitem__ if weights else equal_weights)
        assert taken is not None
        found.append(taken.task_id)
    return found


def by_tenant(task_ids: list[str]) -> Counter[str]:
    return Counter(task_id[0] for task_id in task_ids)


def test_a_tenant_that_comes_late_is_served_at_once_and_each_in_its_order() -> None:
    queue = filled({"a": 1_000})
    assert popped(queue, 3) == ["a0", "a1", "a2"]
    queue.put("b0", LOW, "b")
    queue.put("b1", LOW, "b")
    assert popped(queue, 6) == ["b0", "a3", "b1", "a4", "a5", "a6"]


@pytest.mark.parametrize(("weights", "shares"), [({"a": 1, "b": 1}, (50, 50)), ({"a": 3, "b": 1}, (75, 25))])
def test_any_hundred_choices_have_the_weights(weights: dict[str, int], shares: tuple[int, int]) -> None:
    chosen = popped(filled({"a": 1_000, "b": 1_000}), 1_000, weights)
    for begin in range(900):
        counts = by_tenant(chosen[begin : begin + 100])
        assert abs(counts["a"] - shares[0]) <= 1, (begin, counts)


def test_weights_that_change_hold_for_what_waits_already() -> None:
    queue = filled({"a": 1_000, "b": 1_000})
    assert by_tenant(popped(queue, 100)) == {"a": 50, "b": 50}
    counts = by_tenant(popped(queue, 100, {"a": 9, "b": 1}))
    assert abs(counts["a"] - 90) <= 1


def test_who_was_idle_has_earned_nothing() -> None:
    queue = filled({"a": 1_000, "b": 1})
    popped(queue, 500)
    for number in range(500):
        queue.put(f"b-{number}", LOW, "b")
    assert abs(by_tenant(popped(queue, 100))["b"] - 50) <= 1


def test_to_come_again_each_time_when_served_earns_no_more_than_to_wait() -> None:
    """A tenant that never has two tasks at a time, beside two with a backlog."""
    queue, chosen = filled({"a": 1_000, "c": 1_000, "b": 1}), []
    for number in range(300):
        (task_id,) = popped(queue, 1)
        chosen.append(task_id)
        if task_id.startswith("b"):
            queue.put(f"b-{number}", LOW, "b")
    assert by_tenant(chosen) == {"a": 100, "b": 100, "c": 100}


def test_what_is_put_first_goes_before_its_tenants_others_alone() -> None:
    queue = filled({"a": 2, "b": 2})
    queue.put("a9", LOW, "a", is_first=True)
    assert [task_id for task_id in popped(queue, 5) if task_id.startswith("a")] == ["a9", "a0", "a1"]


def test_only_priorities_that_are_allowed() -> None:
    queue = filled({"a": 1}, LOW)
    assert queue.pop([HIGH], equal_weights) is None
    queue.put("h0", HIGH, "a")
    assert queue.priorities() == [HIGH, LOW]
    assert queue.pop([HIGH], equal_weights) == ("h0", HIGH, "a")


def test_it_holds_what_was_put_and_not_taken_or_removed() -> None:
    """Against a set, over random steps; the queue forgets who has no work."""
    seed = Random().getrandbits(32)
    print("seed", seed)  # noqa: T201
    rng, queue, waiting = Random(seed), FairQueue("q", {}), {}
    for number in range(20_000):
        step = rng.random()
        if step < 0.5:
            place = rng.choice(ALL), rng.choice("abcdefgh")
            queue.put(str(number), *place)
            waiting[str(number)] = place
        elif step < 0.75 and waiting:
            task_id = rng.choice(list(waiting)[:50])
            queue.remove(task_id)
            del waiting[task_id]
        else:
            taken = queue.pop(ALL, equal_weights)
            assert (taken is None) == (not waiting)
            if taken is not None:
                assert (taken.priority, taken.tenant_id) == waiting.pop(taken.task_id)
        assert len(queue) == len(waiting)
    depth = Counter(waiting.values())
    assert {(line.priority, line.tenant_id): line.count for line in queue.lines()} == depth
    while queue.pop(ALL, equal_weights) is not None:
        pass
    assert all(not tenants._turn and not tenants._passes for tenants in queue._by_priority.values())
