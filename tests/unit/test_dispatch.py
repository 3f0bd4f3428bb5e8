"""Which pending tasks go out: by weight, within a window that adapts, and again if nobody starts them."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from scheduler.core.dispatch import (
    HELD_US,
    IDLE_LANES_MAX,
    PROBE_US,
    RESEND_US,
    RESEND_US_MAX,
    WINDOW_BYTES_MAX,
    WINDOW_MAX,
    WINDOW_START,
    Dispatch,
    SizeOf,
)
from scheduler.core.policies import Policies
from schemas.messages import Priority, QueuePolicy, Status, Task, TaskSpec, TenantPolicy
from schemas.priorities import PRIORITIES, WeightedChoice, Weights

PARTITIONS = 3


def task(task_id: str, priority: Priority = Priority.MEDIUM, queue: str = "default", kind: str = "t") -> Task:
    spec = TaskSpec(task_type=kind, priority=priority, queue=queue)
    return Task(task_id=task_id, spec=spec, status=Status.PENDING, version=1, created_at=0, updated_at=0)


def everywhere(_queue: str, _priority: Priority) -> int:
    """All topics have as many partitions."""
    return PARTITIONS


def offered(*tasks: Task) -> Dispatch:
    dispatch = Dispatch(Policies())
    for one in tasks:
        dispatch.offer(one, 0)
    return dispatch


def empty(_task_id: str) -> int:
    """All tasks have as many bytes."""
    return 0


def sent(dispatch: Dispatch, now: int = 0, size_of: SizeOf = empty, partitions: int = PARTITIONS) -> list[str]:
    return [out.task_id for out in dispatch.pick(now, lambda *_: partitions, size_of)]


@pytest.mark.parametrize("weights", [Weights(), Weights(1, 1, 1), Weights(50, 40, 10)])
def test_choices_have_the_weights_over_every_run_and_nobody_starves(weights: Weights) -> None:
    choice, candidates = WeightedChoice(weights), list(PRIORITIES)
    chosen = [choice.choose(candidates) for _ in range(1_000)]
    for begin in range(0, 900, 50):
        counts = Counter(chosen[begin : begin + 100])
        for priority, weight in zip(PRIORITIES, weights, strict=True):
            assert abs(counts[priority] - 100 * weight / sum(weights)) <= 2, counts


def test_a_priority_goes_out_oldest_first() -> None:
    assert sent(offered(task("a"), task("b"), task("c"))) == ["a", "b", "c"]


def test_no_more_than_the_window_is_out_and_starts_widen_it() -> None:
    dispatch = offered(*(task(str(i)) for i in range(5_000)))
    first = sent(dispatch)
    assert len(first) == WINDOW_START
    assert sent(dispatch) == []
    for task_id in first:
        dispatch.started(task_id)
    assert len(sent(dispatch)) == 2 * WINDOW_START
    out = 0
    while batch := sent(dispatch):
        out = max(out, len(batch))
        for task_id in batch:
            dispatch.started(task_id)
    assert out <= WINDOW_MAX


def test_a_record_given_back_for_want_of_a_slot_halves_the_window_and_holds_the_queue_back() -> None:
    tasks = [task(str(i)) for i in range(100)]
    dispatch = offered(*tasks)
    first = sent(dispatch, partitions=1)
    dispatch.given_back(tasks[0], now=0, is_full=True)
    for task_id in first[1:]:
        dispatch.started(task_id)
    assert sent(dispatch, now=PROBE_US - 1, partitions=1) == []
    assert dispatch.next_at() == PROBE_US
    assert sent(dispatch, now=PROBE_US, partitions=1)[0] == "0"


def test_a_free_slot_ends_the_wait_at_once() -> None:
    tasks = [task("a"), task("b")]
    dispatch = offered(*tasks)
    assert sent(dispatch, partitions=1) == ["a", "b"]
    dispatch.given_back(tasks[0], now=0, is_full=True)
    assert sent(dispatch, now=1, partitions=1) == []
    dispatch.unblock()
    assert sent(dispatch, now=1, partitions=1) == ["a"]


def test_a_partition_whose_worker_is_busy_is_passed_over_for_a_second() -> None:
    """Nothing waits for who is busy as long as somebody else is there, and the window stays."""
    dispatch = offered(task("a"))
    (first,) = dispatch.pick(0, everywhere, empty)
    assert first.partition == 0
    dispatch.given_back(task("a"), now=0, is_full=True)
    (second,) = dispatch.pick(1, everywhere, empty)
    assert (second.task_id, second.partition) == ("a", 1)
    dispatch.started("a")
    for number in range(6):
        dispatch.offer(task(str(number)), 1)
    picked = dispatch.pick(PROBE_US - 1, everywhere, empty)
    assert {one.partition for one in picked} == {1, 2}
    for number in range(6, 8):
        dispatch.offer(task(str(number)), 1)
    assert {one.partition for one in dispatch.pick(PROBE_US, everywhere, empty)} == {0}


def test_a_record_of_a_queue_that_has_nothing_else_is_given_back_among_many_queues() -> None:
    """What was known of the queue is dropped in that moment, and its task must not be lost with it."""
    names = [f"q{number}" for number in range(IDLE_LANES_MAX + 5)]
    dispatch = offered(*(task(name, queue=name) for name in names))
    assert len(sent(dispatch)) == len(names)
    dispatch.given_back(task("q7", queue="q7"), now=0, is_full=True)
    assert "q7" in sent(dispatch, now=PROBE_US)


def test_when_the_workers_of_all_partitions_are_busy_the_lane_waits() -> None:
    dispatch = offered(*(task(str(number)) for number in range(3)))
    for one in dispatch.pick(0, everywhere, empty):
        dispatch.given_back(task(one.task_id), now=0, is_full=True)
    assert sent(dispatch, now=PROBE_US - 1) == []
    assert sent(dispatch, now=PROBE_US)


def test_a_queue_that_was_tried_again_does_not_ask_for_that_without_end() -> None:
    tasks = [task(str(i)) for i in range(WINDOW_START + 1)]
    dispatch = offered(*tasks)
    sent(dispatch)
    for one in tasks[:WINDOW_START]:
        dispatch.given_back(one, now=0, is_full=True)
    assert dispatch.next_at() == PROBE_US
    assert len(sent(dispatch, now=PROBE_US)) == 1, "the window has shrunk to one"
    next_at = dispatch.next_at()
    assert next_at is not None
    assert next_at > PROBE_US, "the worker has the word now, or the resend"


def test_tasks_of_a_paused_queue_wait_and_go_on_when_it_is_resumed() -> None:
    policies = Policies()
    policies.put(QueuePolicy(queue="mail", set_at=0, is_paused=True))
    dispatch = Dispatch(policies)
    for one in (task("a", queue="mail"), task("b", queue="other"), task("c", queue="mail")):
        dispatch.offer(one, 0)
    assert sent(dispatch) == ["b"]
    assert dispatch.depth()["mail", Priority.MEDIUM, "default"] == 2
    policies.put(QueuePolicy(queue="mail", set_at=1))
    assert sent(dispatch) == ["a", "c"]


def test_a_record_that_nobody_started_is_not_sent_again_while_its_queue_is_paused() -> None:
    policies = Policies()
    dispatch = Dispatch(policies)
    dispatch.offer(task("a"), 0)
    sent(dispatch)
    policies.put(QueuePolicy(queue="default", set_at=0, is_paused=True))
    assert sent(dispatch, now=RESEND_US) == []
    policies.put(QueuePolicy(queue="default", set_at=1))
    assert sent(dispatch, now=2 * RESEND_US) == ["a"]


def test_a_weight_that_is_changed_holds_for_what_waits_already() -> None:
    policies = Policies()
    dispatch = Dispatch(policies)
    for number in range(2_000):
        for tenant in ("a", "b"):
            one = task(f"{tenant}{number}")
            dispatch.offer(replace(one, spec=replace(one.spec, tenant_id=tenant)), 0)

    def shares(count: int) -> Counter[str]:
        found: list[str] = []
        while len(found) < count:
            batch = sent(dispatch)
            found += [task_id[0] for task_id in batch]
            for task_id in batch:
                dispatch.forget(task_id)
        return Counter(found)

    even = shares(160)
    assert abs(even["a"] - even["b"]) <= 1
    policies.put(TenantPolicy(tenant_id="a", set_at=0, weight=3))
    uneven = shares(160)
    assert abs(uneven["a"] - 3 * uneven["b"]) <= 4


def test_another_queue_goes_on_when_one_is_full() -> None:
    slow = task("a", queue="slow")
    dispatch = offered(slow)
    assert sent(dispatch, partitions=1) == ["a"]
    dispatch.given_back(slow, now=0, is_full=True)
    dispatch.offer(task("b", queue="fast"), 0)
    assert sent(dispatch, now=1, partitions=1) == ["b"]


def test_what_nobody_starts_is_sent_again_ever_more_seldom() -> None:
    dispatch = offered(task("a"))
    assert sent(dispatch) == ["a"]
    now, waits = 0, []
    for _ in range(8):
        at = dispatch.next_at()
        assert at is not None
        assert sent(dispatch, at - 1) == []
        assert sent(dispatch, at) == ["a"]
        waits.append(at - now)
        now = at
    assert waits[:3] == [RESEND_US, 2 * RESEND_US, 4 * RESEND_US]
    assert waits[-1] == RESEND_US_MAX


def test_a_cancelled_task_does_not_go_out_and_frees_its_place() -> None:
    dispatch = offered(*(task(str(i)) for i in range(WINDOW_START + 1)))
    sent(dispatch)
    dispatch.forget("3")
    assert sent(dispatch) == [str(WINDOW_START)]
    dispatch.forget("5")
    assert "5" not in sent(dispatch, now=RESEND_US)


def test_an_updated_task_is_offered_anew_with_its_new_priority() -> None:
    dispatch = offered(*(task(str(i)) for i in range(WINDOW_START + 5)))
    sent(dispatch)
    dispatch.offer(task("18", Priority.HIGH), 0)
    dispatch.forget("0")
    assert sent(dispatch) == ["18"], "there is room for one, and the high one is first"
    assert sum(dispatch.depth().values()) == WINDOW_START + 4


def test_a_record_goes_to_the_partition_with_the_fewest_that_wait() -> None:
    dispatch = offered(*(task(str(i)) for i in range(6)))
    out = dispatch.pick(0, everywhere, empty)
    assert [record.partition for record in out] == [0, 1, 2, 0, 1, 2]
    dispatch.started("1")
    dispatch.started("4")
    dispatch.offer(task("new"), 0)
    assert [record.partition for record in dispatch.pick(0, everywhere, empty)] == [1]


def test_a_type_whose_slots_are_full_does_not_hold_up_another_of_its_queue() -> None:
    blocking = [task(f"def-{i}", kind="blocking") for i in range(30)]
    dispatch = offered(*blocking)
    sent(dispatch)
    for one in blocking[:WINDOW_START]:
        dispatch.given_back(one, now=0, is_full=True)
    dispatch.offer(task("async", kind="coroutine"), 0)
    assert sent(dispatch, now=1) == ["async"]


def test_what_is_out_is_bounded_by_bytes_too() -> None:
    dispatch = offered(*(task(str(i)) for i in range(100)))
    for one in sent(dispatch):
        dispatch.started(one)
    out = sent(dispatch, size_of=lambda _: 256 * 1024)
    assert sent(dispatch, size_of=lambda _: 256 * 1024) == []
    assert sum(256 * 1024 for _ in out) <= WINDOW_BYTES_MAX + 256 * 1024


def test_names_that_come_and_go_leave_nothing_behind() -> None:
    dispatch = Dispatch(Policies())
    for number in range(1_000):
        dispatch.offer(task(f"a{number}", queue=f"q{number}"), 0)
        for one in sent(dispatch):
            dispatch.started(one)
    assert len(dispatch._lanes) <= IDLE_LANES_MAX + 1
    assert len(dispatch._load) <= 3 * (IDLE_LANES_MAX + 1)


# --- ready topics -----------------------------------------------------------------------------------------------------


def test_what_a_topic_cannot_take_waits_and_nothing_else_does() -> None:
    dispatch = offered(task("a"), task("b", Priority.HIGH), task("c", queue="other"))
    closed = {("default", Priority.MEDIUM)}
    picked = dispatch.pick(0, lambda queue, priority: 0 if (queue, priority) in closed else PARTITIONS, empty)
    assert {out.task_id for out in picked} == {"b", "c"}
    assert dispatch.next_at() == HELD_US
    assert sent(dispatch, HELD_US) == ["a"]
    assert dispatch.next_at() == RESEND_US


def test_what_was_not_sent_goes_out_again_in_its_order_and_the_window_stays() -> None:
    tasks = [task(str(i)) for i in range(WINDOW_START + 1)]
    dispatch = offered(*tasks)
    first = sent(dispatch)
    for one in reversed(tasks[:3]):
        dispatch.not_sent(one, 0)
    assert sent(dispatch) == first[:3]
    dispatch.started("0")
    dispatch.not_sent(tasks[0], 0)  # heard of too late: it was there, and was started
    assert sent(dispatch) == [str(WINDOW_START)]


def test_records_go_to_the_partitions_that_a_topic_has_now() -> None:
    dispatch = offered(*(task(str(i)) for i in range(9)))
    assert [out.partition for out in dispatch.pick(0, lambda *_: 4, empty)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    dispatch.offer(task("fewer"), 0)
    assert [out.partition for out in dispatch.pick(0, lambda *_: 2, empty)] == [1]
    for number in range(9):
        dispatch.started(str(number))
    dispatch.offer(task("more"), 0)
    assert [out.partition for out in dispatch.pick(0, lambda *_: 6, empty)] == [0]
    assert {out.partition for out in dispatch.pick(RESEND_US, lambda *_: 6, empty)} == {0, 1}


def test_what_nobody_starts_is_not_sent_again_while_its_topic_cannot_take_it() -> None:
    dispatch = offered(task("a"))
    sent(dispatch)
    assert dispatch.pick(RESEND_US, lambda *_: 0, empty) == []
    assert sent(dispatch, 2 * RESEND_US) == ["a"]
    assert dispatch.next_at() == 4 * RESEND_US


def test_a_paused_queue_whose_workers_were_full_does_not_wake_its_shard_again_and_again() -> None:
    policies = Policies()
    dispatch = Dispatch(policies)
    for one in (task("a"), task("b")):
        dispatch.offer(one, 0)
    sent(dispatch)
    dispatch.given_back(task("a"), 0, is_full=True)
    policies.put(QueuePolicy(queue="default", set_at=0, is_paused=True))
    assert sent(dispatch, now=2 * PROBE_US) == []
    at = dispatch.next_at()
    assert at is None or at > 2 * PROBE_US
