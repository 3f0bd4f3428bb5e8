"""What shards tell each other of limits, in every order in which messages may come, or not come."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from scheduler.core.desk import Effects, Source
from scheduler.core.gate import STALE_START_US
from scheduler.core.limit_keys import home_of
from scheduler.core.limiter import CHECK_US
from scheduler.core.policies import Policies
from scheduler.core.shard import Shard, ShardSettings
from schemas.codec import Codec
from schemas.ids import shard_of
from schemas.messages import (
    AttemptReturned,
    AttemptStarted,
    AttemptSucceeded,
    CancelTask,
    LimitHeld,
    LimitPolicy,
    LimitWordKind,
    QueuePolicy,
    ShardMessage,
    SubmitTask,
    TaskSpec,
)
from schemas.topics import SHARD_MESSAGES, TASK_REPORTS, TASK_REQUESTS

START = 1_780_315_200_000_000
SECOND = 1_000_000
KEY = next(f"{name}/" for name in map(str, range(100)) if home_of(f"{name}/", 2) == 1)
LIMIT = LimitPolicy(name=KEY[:-1], set_at=1, count=1)


class Pair:
    """Shard 0 has the tasks, shard 1 is the home of the key. Messages wait until the test lets them come."""

    def __init__(self) -> None:
        self.now = START
        self.policies = Policies()
        self.policies.put(LIMIT)
        self.shards = [self._shard(0), self._shard(1)]
        self.under_way: list[tuple[int, ShardMessage]] = []
        self.out: list[str] = []
        self._offsets = [0, 0]

    def _shard(self, number: int, epoch: int = 1) -> Shard:
        shard = Shard(number, ShardSettings(shards=2, unpacked_max=0), Random(1), self.now, self.policies)
        shard.state.epoch = epoch
        shard.on_loaded(self.now, -1)
        return shard

    def take_over(self, number: int) -> None:
        """Another owner loads a shard: what it knows is what is in the log."""
        old = self.shards[number]
        new = Shard(number, ShardSettings(shards=2, unpacked_max=0), Random(1), self.now, self.policies)
        new.state.epoch = old.state.epoch + 1
        for task in old.state.tasks.values():
            new.restore(task)
        held = old.entity(f"limit/{KEY}")
        if isinstance(held, LimitHeld):
            new.restore(held)
        new.on_loaded(self.now, -1)
        self.shards[number] = new
        self.turn(number)

    def turn(self, number: int) -> None:
        """One turn of a shard's loop."""
        shard = self.shards[number]
        self._follow(number, shard.decide_limits(self.now))
        self.out += [ready.task_id for _, ready in shard.dispatch(self.now, lambda _queue, _priority: 1)]

    def _follow(self, number: int, effects: Effects) -> None:
        self._offsets[number] += len(effects.events)
        self.shards[number].acknowledged(effects.events, self._offsets[number], self.now)
        self.under_way += effects.messages

    def come(self, number: int, message: ShardMessage) -> None:
        """A message comes to a shard, which then turns."""
        self._follow(number, self.shards[number].handle(message, Source(SHARD_MESSAGES, 0), self.now))
        self.turn(number)

    def settle(self) -> None:
        """All messages come, and those that follow from them."""
        for _ in range(20):
            for number in (0, 1):
                self.turn(number)
            coming, self.under_way = self.under_way, []
            for number, message in coming:
                self.come(number, message)

    def taken(self) -> list[tuple[int, ShardMessage]]:
        """What is under way, taken out."""
        taken, self.under_way = self.under_way, []
        return taken

    def passes(self, us: int) -> None:
        self.now += us

    def submit(self, task_id: str, **spec: Any) -> None:
        request = SubmitTask(
            request_id="r", task_id=task_id, spec=TaskSpec(task_type="t", **spec), submitted_at=self.now
        )
        self._handle(request, TASK_REQUESTS)

    def cancel(self, task_id: str) -> None:
        self._handle(CancelTask(request_id="r", task_id=task_id), TASK_REQUESTS)

    def start(self, task_id: str) -> None:
        task = self.shards[0].state.tasks[task_id]
        started = AttemptStarted(
            task_id=task_id, task_version=task.version, attempt=1, worker_id="w", started_at=self.now
        )
        self._handle(started, TASK_REPORTS)

    def end(self, task_id: str) -> None:
        self._handle(AttemptSucceeded(task_id=task_id, attempt=1, worker_id="w", finished_at=self.now), TASK_REPORTS)

    def _handle(self, message: Any, topic: str) -> None:
        self._follow(0, self.shards[0].handle(message, Source(topic, self._offsets[0]), self.now))
        self.turn(0)

    def holders(self) -> list[str]:
        held = self.shards[1].entity(f"limit/{KEY}")
        return [] if held is None else list(held.holders)  # type: ignore[union-attr]


def ids(*numbers: int) -> list[str]:
    """Ids of tasks of shard 0."""
    found = [f"t{number}" for number in range(200) if shard_of(f"t{number}", 2) == 0]
    return [found[number] for number in numbers]


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.settle()
    return pair


def test_one_goes_and_the_next_when_it_has_ended(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.settle()
    assert pair.out == [a]
    pair.start(a)
    pair.settle()
    assert pair.out == [a]
    pair.end(a)
    pair.settle()
    assert pair.out == [a, b]


def test_an_attempt_whose_start_and_end_come_together_gives_back_what_it_held(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.settle()
    shard = pair.shards[0]
    task = shard.state.tasks[a]
    started = AttemptStarted(task_id=a, task_version=task.version, attempt=1, worker_id="w", started_at=pair.now)
    ended = AttemptSucceeded(task_id=a, attempt=1, worker_id="w", finished_at=pair.now)
    both = Effects.none()
    for number, report in enumerate((started, ended)):
        both.extend(shard.handle(report, Source(TASK_REPORTS, number), pair.now))
    pair._follow(0, both)
    pair.settle()
    assert pair.out == [a, b]


def test_a_permit_is_given_back_when_the_end_is_in_the_log_and_not_before(pair: Pair) -> None:
    (a,) = ids(0)
    pair.submit(a)
    pair.settle()
    pair.start(a)
    pair.settle()
    report = AttemptSucceeded(task_id=a, attempt=1, worker_id="w", finished_at=pair.now)
    ended = pair.shards[0].handle(report, Source(TASK_REPORTS, 9), pair.now)
    pair.settle()
    assert pair.holders() == [f"{a}:1"]
    pair._follow(0, ended)
    pair.settle()
    assert pair.holders() == []


def test_two_limits_that_come_one_after_the_other_do_not_wait_for_each_other(pair: Pair) -> None:
    """One holds the later key, and would wait for the earlier one that another has, who waits for the later one."""
    a, b = ids(0, 1)
    pair.submit(a)
    pair.settle()
    pair.policies.put(QueuePolicy(queue="default", set_at=1, is_paused=True))
    pair.settle()
    earlier = LimitPolicy(name="-", set_at=2, count=1)  # before all digits
    pair.submit(b)
    pair.policies.put(earlier)
    pair.policies.put(QueuePolicy(queue="default", set_at=3))
    for _ in range(10):
        pair.settle()
        pair.passes(CHECK_US)
    assert len(set(pair.out)) == 1
    (first,) = set(pair.out)
    pair.start(first)
    pair.end(first)
    for _ in range(10):
        pair.settle()
        pair.passes(CHECK_US)
    assert set(pair.out) == {a, b}


def test_running_attempts_of_a_concurrency_that_became_a_rate_do_not_hold_it_up(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.settle()
    pair.start(a)
    pair.settle()
    pair.policies.put(LimitPolicy(name=LIMIT.name, set_at=2, count=10, period_ms=1_000, burst=1))
    for _ in range(5):
        pair.settle()
        pair.passes(SECOND)
    assert set(pair.out) == {a, b}


def test_a_record_that_comes_back_waits_at_the_gate_that_came_meanwhile(pair: Pair) -> None:
    a, b = ids(0, 1)
    for task_id in (a, b):
        pair.submit(task_id, queue="free")
    pair.policies.put(LimitPolicy(name=LIMIT.name, set_at=2, count=1, is_removed=True))
    pair.settle()
    assert pair.out == [a, b]
    pair.policies.put(LIMIT)
    pair.settle()
    for task_id in (a, b):
        returned = AttemptReturned(
            task_id=task_id, attempt=1, worker_id="w", returned_at=pair.now, is_started=False, reason="later"
        )
        pair._handle(returned, TASK_REPORTS)
    pair.settle()
    assert len(pair.out) == 3, "one of them again"


def test_wishes_that_nobody_has_any_more_are_withdrawn(pair: Pair) -> None:
    tasks = ids(*range(40))
    pair.submit(tasks[0])
    pair.settle()
    for _ in range(8):
        for task_id in tasks[1:]:
            pair.submit(task_id)
        pair.settle()
        for task_id in tasks[1:]:
            pair.cancel(task_id)
        pair.passes(60 * SECOND)
        pair.shards[0].forget_ended(pair.now)
        pair.settle()
    wished = pair.shards[1]._limits.limiter._keys[KEY].asked
    assert len(wished) <= 150


def test_a_question_that_is_lost_is_asked_again(pair: Pair) -> None:
    (a,) = ids(0)
    pair.submit(a)
    pair.taken()
    pair.settle()
    assert pair.out == []
    pair.passes(SECOND)
    pair.settle()
    assert pair.out == [a]


def test_a_grant_that_is_lost_is_told_again(pair: Pair) -> None:
    (a,) = ids(0)
    pair.submit(a)
    ((_, question),) = pair.taken()
    pair.come(1, question)
    assert pair.holders() == [f"{a}:1"]
    pair.taken()
    pair.passes(SECOND)
    pair.settle()
    assert pair.out == [a]


def test_a_return_that_is_lost_is_asked_for(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.settle()
    pair.start(a)
    pair.end(a)
    pair.taken()
    pair.settle()
    assert pair.holders() == [f"{a}:1"]
    pair.submit(b)
    pair.settle()
    assert pair.out == [a]
    pair.passes(CHECK_US)
    pair.settle()
    assert pair.out == [a, b]


def test_a_message_that_comes_twice_counts_once(pair: Pair) -> None:
    """Given back, wanted again, granted again: a late copy of the first return must not free it."""
    (a,) = ids(0)
    pair.submit(a)
    ((_, question),) = pair.taken()
    pair.policies.put(QueuePolicy(queue="default", set_at=1, is_paused=True))
    pair.turn(0)
    pair.come(1, question)
    ((_, grant),) = pair.taken()
    pair.come(0, grant)
    ((_, returned),) = pair.taken()
    pair.come(1, returned)
    assert pair.holders() == []
    pair.policies.put(QueuePolicy(queue="default", set_at=2))
    pair.settle()
    assert pair.out == [a]
    pair.come(1, returned)
    assert pair.holders() == [f"{a}:1"]


def test_a_question_of_a_home_that_crossed_with_the_answer_grants_nothing(pair: Pair) -> None:
    (a,) = ids(0)
    pair.submit(a)
    ((_, question),) = pair.taken()
    pair.policies.put(QueuePolicy(queue="default", set_at=1, is_paused=True))
    pair.turn(0)
    pair.come(1, question)
    ((_, grant),) = pair.taken()
    pair.passes(CHECK_US)
    pair.turn(1)
    ((_, check),) = pair.taken()  # said before the return is heard
    pair.come(0, grant)
    ((_, returned),) = pair.taken()
    pair.policies.put(QueuePolicy(queue="default", set_at=2))
    pair.turn(0)
    pair.come(0, check)
    assert pair.out == [], "the home will hear that it was given back"
    pair.come(1, returned)
    pair.settle()
    assert pair.out == [a]
    assert pair.holders() == [f"{a}:1"]


def test_the_next_owner_of_the_tasks_keeps_what_may_be_out(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.settle()
    assert pair.out == [a]
    pair.take_over(0)
    pair.settle()
    assert pair.holders() == [f"{a}:1"], "its record is out: nobody knows whether it has been started"
    assert pair.out == [a, a]
    pair.start(a)
    pair.end(a)
    pair.settle()
    assert pair.out == [a, a, b]


def test_the_next_owner_of_the_home_knows_who_holds_it(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.settle()
    pair.take_over(1)
    pair.settle()
    assert pair.holders() == [f"{a}:1"]
    assert pair.out == [a]
    pair.start(a)
    pair.end(a)
    pair.settle()
    assert pair.out == [a, b]


def test_a_message_of_an_owner_that_was_followed_says_nothing(pair: Pair) -> None:
    (a,) = ids(0)
    pair.submit(a)
    ((_, question),) = pair.taken()
    pair.take_over(0)
    for number, message in pair.taken():
        pair.come(number, message)
    before = pair.holders()
    pair.come(1, question)
    assert pair.holders() == before


def test_a_task_that_is_cancelled_while_its_record_is_out_keeps_its_permit_for_a_while(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.settle()
    pair.cancel(a)
    pair.settle()
    assert pair.out == [a]
    pair.passes(STALE_START_US)
    pair.settle()
    assert pair.out == [a, b]


def test_one_that_is_cancelled_while_it_waits_gives_the_grant_on(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.cancel(a)
    pair.settle()
    assert pair.out == [b]


def test_a_limit_that_is_removed_lets_go_what_waits(pair: Pair) -> None:
    a, b = ids(0, 1)
    pair.submit(a)
    pair.submit(b)
    pair.settle()
    pair.policies.put(LimitPolicy(name=LIMIT.name, set_at=2, count=1, is_removed=True))
    pair.settle()
    assert pair.out == [a, b]
    for task_id in (a, b):
        pair.start(task_id)
        pair.end(task_id)
    pair.passes(20 * STALE_START_US)
    pair.settle()
    assert pair.holders() == []


def test_nothing_is_left_when_all_has_ended(pair: Pair) -> None:
    for task_id in ids(*range(10)):
        pair.submit(task_id)
    for _ in range(10):
        pair.settle()
        task_id = pair.out[-1]
        pair.start(task_id)
        pair.end(task_id)
    pair.settle()
    assert len(set(pair.out)) == 10
    for shard in pair.shards:
        assert (shard.memory()["held"], shard.memory()["limits"], shard.memory()["pending"]) == (0, 0, 0)


def test_no_message_outgrows_a_record_however_long_names_and_keys_are(pair: Pair) -> None:
    limits = pair.shards[0]._limits
    long_key = "ж" * 200
    for number in range(3_000):
        limits._tell(1, LimitWordKind.RETURNED, f"limit/{long_key}{number}", f"{'t' * 128}:1")
    messages = [message for _, message in limits.messages(pair.now, 1)]
    assert len(messages) > 1
    assert all(len(Codec.builtin().encode(message)) < 900_000 for message in messages)
    assert sum(len(message.words) for message in messages) == 3_000
    assert [message.number for message in messages] == sorted({message.number for message in messages})
