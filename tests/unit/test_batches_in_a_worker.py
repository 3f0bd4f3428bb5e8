"""Batches in a worker over a real log: when they are called, and that each attempt stays an attempt of its own."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.ports import TopicPartition
from schemas.messages import (
    AttemptCancelled,
    AttemptCheckpointed,
    AttemptFailed,
    AttemptReturned,
    AttemptSnoozed,
    AttemptStarted,
    AttemptSucceeded,
    ErrorKind,
    Priority,
    ReadyTask,
    SignalKind,
    WorkerHeartbeat,
)
from schemas.topics import ready_topic
from tests.unit.test_worker_runtime import faulty
from tests.worker_stage import SHARDS, WAIT_S, ManualClock, Stage
from workers.batches import Batch
from workers.context import Context
from workers.errors import PermanentError, RetryableError, Snooze, TaskCancelled
from workers.registry import Handler

BATCH = Batch(size=3, wait=0.05)
WAIT_MS = 50
MEDIUM = TopicPartition(ready_topic("default", Priority.MEDIUM), 0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Gate:
    """Handlers that say with what they were called, and return when the test lets them."""

    def __init__(self) -> None:
        self.begun: queue.Queue[list[str]] = queue.Queue()
        self.is_interrupted = False
        self._release = threading.Event()

    def hold(self, numbers: list[int], contexts: list[Context]) -> list[Any]:
        self.begun.put([context.task_id for context in contexts])
        try:
            self._release.wait(WAIT_S)
        except TaskCancelled:
            self.is_interrupted = True
            raise
        return self._said(numbers, contexts)

    async def hold_async(self, numbers: list[int], contexts: list[Context]) -> list[Any]:
        self.begun.put([context.task_id for context in contexts])
        try:
            await asyncio.to_thread(self._release.wait, WAIT_S)
        except asyncio.CancelledError:
            self.is_interrupted = True
            raise
        return self._said(numbers, contexts)

    def _said(self, numbers: list[int], contexts: list[Context]) -> list[Any]:
        return [
            TaskCancelled() if context.is_cancelled else number
            for number, context in zip(numbers, contexts, strict=True)
        ]

    def hold_one(self, context: Context) -> None:
        self.begun.put([context.task_id])
        self._release.wait(WAIT_S)

    def await_begun(self) -> list[str]:
        return self.begun.get(timeout=WAIT_S)

    def open(self) -> None:
        self._release.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


both = pytest.mark.parametrize("is_async", [False, True])


def holding(gate: Gate, is_async: bool = False, batch: Batch = BATCH, **options: Any) -> Handler:
    return Handler(gate.hold_async if is_async else gate.hold, name="hold", batch=batch, **options)


def offered(stage: Stage, *ids: str, **fields: Any) -> list[ReadyTask]:
    """Attempts of the handler `hold` whose payloads are their places."""
    return [stage.offer("hold", place, task_id=task_id, **fields) for place, task_id in enumerate(ids)]


def turn(stage: Stage) -> None:
    """What was sent to the worker before has been read, and followed."""
    stage.outcome(stage.offer("no-such-type"))


# --- when they are called ---------------------------------------------------------------------------------------------


@both
def test_a_full_batch_is_one_call_with_a_start_and_a_result_of_each(
    stage: Stage, gate: Gate, clock: ManualClock, is_async: bool
) -> None:
    stage.worker(holding(gate, is_async), clock=clock)
    ready = offered(stage, "a", "b", "c")
    assert gate.await_begun() == ["a", "b", "c"]
    gate.open()
    ends = [stage.outcome(one) for one in ready]
    assert [(type(end), end.result) for end in ends] == [(AttemptSucceeded, b"%d" % n) for n in range(3)]
    assert gate.begun.empty()


@both
def test_what_came_is_called_when_the_first_waited_long_enough_and_is_not_begun_before(
    stage: Stage, gate: Gate, clock: ManualClock, is_async: bool
) -> None:
    worker = stage.worker(holding(gate, is_async), clock=clock)
    (first,) = offered(stage, "a")
    turn(stage)
    worker.advance(WAIT_MS - 1)
    (second,) = offered(stage, "b")
    turn(stage)
    assert gate.begun.empty()
    assert stage.about(first) == stage.about(second) == []
    assert not stage.committed()  # whoever had the partition next would read both again
    worker.advance(1)
    assert gate.await_begun() == ["a", "b"]
    stage.expect(lambda: len(stage.of(AttemptStarted, task_id="b")) == 1)
    assert {start.started_at for start in stage.of(AttemptStarted) if start.task_id in "ab"} == {clock.now}
    gate.open()
    assert [stage.outcome(one).result for one in (first, second)] == [b"0", b"0"]


def test_while_a_batch_collects_nobody_vouches_for_it_and_then_for_each_of_it(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    worker = stage.worker(holding(gate, batch=Batch(size=3, wait=5)), clock=clock, slots=9)
    running = stage.offer("hold", 0, task_id="s", is_suspect=True, crash_count=1, shard=0)
    gate.await_begun()
    stage.offer("hold", 1, task_id="a", shard=0)
    stage.offer("hold", 2, task_id="b", shard=0)
    turn(stage)
    worker.advance(2000)
    stage.expect(lambda: len(stage.of(WorkerHeartbeat)) == SHARDS + 1)
    assert [one.task_id for one in stage.of(WorkerHeartbeat)[-1].running] == [running.task_id]
    assert stage.of(WorkerHeartbeat)[-1].free_slots == 9 - 1 - 2
    stage.offer("hold", 3, task_id="c", shard=0)
    gate.await_begun()
    worker.advance(2000)
    stage.expect(lambda: len(stage.of(WorkerHeartbeat)) == SHARDS + 2)
    assert [one.task_id for one in stage.of(WorkerHeartbeat)[-1].running] == ["s", "a", "b", "c"]
    assert stage.of(WorkerHeartbeat)[-1].free_slots == 9 - 4


def test_what_was_lost_before_is_called_alone(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    """C16: a batch that took its worker down is not put together again, so that only one item of it does so twice."""
    stage.worker(holding(gate), clock=clock)
    ready = offered(stage, "a", "b", is_suspect=True, crash_count=1)
    gate.open()
    assert [gate.await_begun(), gate.await_begun()] == [["a"], ["b"]]
    assert [stage.outcome(one).result for one in ready] == [b"0", b"1"]


def test_the_others_are_called_without_a_suspect_that_was_stopped_before(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    log = faulty(stage)
    worker = stage.worker(holding(gate), clock=clock, log=log)
    offered(stage, "a", "b", is_suspect=True)
    stage.expect(lambda: worker.runtime.stats.waiting == 2)
    log.refused = 1_000_000
    late = stage.offer("hold", 2, task_id="c", timeout_ms=50, is_suspect=True)
    stage.expect(lambda: worker.runtime.stats.running == 3)
    worker.advance(50)  # its time is over,
    stage.expect(lambda: worker.runtime._attempts.next_at() == clock.now + 500_000)
    worker.advance(500)  # and it is given up, still without a start in the log
    stage.expect(lambda: worker.runtime.stats.running == 2)
    log.refused = 0
    worker.advance(100)
    assert gate.await_begun() == ["a", "b"]
    assert stage.outcome(late).error.kind is ErrorKind.TIMEOUT
    gate.open()
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 2)


@pytest.mark.parametrize("suspects", ["a", "c", "abc"])
def test_a_batch_with_a_suspect_is_not_called_before_its_starts_are_in_the_log(
    stage: Stage, gate: Gate, clock: ManualClock, suspects: str
) -> None:
    """C16: if it is the end of the worker, each of it counts as lost, and is called alone after that."""
    log = faulty(stage)
    worker = stage.worker(holding(gate), clock=clock, log=log)
    log.lost = 1
    for name in "abc":
        stage.offer("hold", 7, task_id=name, is_suspect=name in suspects)
    stage.expect(lambda: worker.runtime.stats.revoked == 3 and not worker.runtime.stats.running)
    assert gate.begun.empty()
    for name in "abc":  # by the shard, which has not heard of their starts
        stage.offer("hold", 7, task_id=name, is_suspect=name in suspects)
    assert gate.await_begun() == ["a", "b", "c"]
    gate.open()
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 3)
    assert gate.begun.empty()
    assert len(stage.of(AttemptStarted)) == 3


def test_a_worker_wakes_up_when_a_batch_is_due(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), clock=clock)
    offered(stage, "a")
    turn(stage)
    assert worker.runtime._pause_s() == WAIT_MS / 1000


# --- slots ------------------------------------------------------------------------------------------------------------


def test_a_batch_is_one_thread_and_a_slot_for_each_item(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), clock=clock, slots=5, threads=1)
    offered(stage, "a", "b", "c")
    assert gate.await_begun() == ["a", "b", "c"]
    stage.expect(lambda: worker.runtime.stats.running == 3)
    assert worker.runtime.stats.slots == 5 - 2  # one thread can hold a batch, and not more
    waiting = offered(stage, "d", "e", "f")
    turn(stage)
    worker.advance(WAIT_MS + 100)
    stage.expect(lambda: len(stage.of(AttemptReturned)) == 3)
    assert {(one.task_id, one.is_started) for one in stage.of(AttemptReturned)} == {
        (one.task_id, False) for one in waiting
    }
    gate.open()
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 3)
    again = offered(stage, "d", "e", "f")
    stage.expect(lambda: all(stage.of(AttemptSucceeded, task_id=one.task_id) for one in again))


def test_a_thread_is_occupied_until_the_last_item_left_it(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), clock=clock, slots=9, threads=1)
    offered(stage, "a", "b")
    late = stage.offer("hold", 2, task_id="c", timeout_ms=1000)
    gate.await_begun()
    worker.advance(1000)
    turn(stage)
    worker.advance(500)
    stage.outcome(late)
    offered(stage, "d", "e", "f")
    turn(stage)
    worker.advance(WAIT_MS + 100)
    stage.expect(lambda: len(stage.of(AttemptReturned)) == 3)
    gate.open()
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 2)


def test_a_batch_that_finds_no_thread_waits_for_one_and_then_goes_back(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    worker = stage.worker(holding(gate), Handler(gate.hold_one, name="one"), clock=clock, slots=9, threads=1)
    stage.offer("one", task_id="x")
    gate.await_begun()
    (ready,) = offered(stage, "a")
    turn(stage)
    worker.advance(WAIT_MS + 99)
    turn(stage)
    assert stage.about(ready) == []
    assert worker.runtime._pause_s() == 0.001  # it is due, but that is no reason to look again and again
    worker.advance(1)
    stage.expect(lambda: stage.about(ready))
    (returned,) = stage.about(ready)
    assert (returned.is_started, returned.reason) == (False, "no free slot")


def test_a_worker_with_fewer_slots_than_the_size_says_so_and_calls_what_fits(
    stage: Stage, gate: Gate, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        stage.worker(holding(gate), clock=clock, slots=2)
    assert "task 'hold': a batch of 3 does not fit into 2 slots, and so many are called at most" in caplog.text
    offered(stage, "a", "b")
    assert gate.await_begun() == ["a", "b"]


def test_what_others_occupy_is_missing_to_a_batch(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), Handler(gate.hold_one, name="one"), clock=clock, slots=3, threads=3)
    stage.offer("one", task_id="x")
    gate.await_begun()
    offered(stage, "a", "b", "c")
    assert gate.await_begun() == ["a", "b"]
    worker.advance(WAIT_MS + 100)
    stage.expect(lambda: stage.of(AttemptReturned, task_id="c"))


def test_what_collects_keeps_its_slots(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), Handler(gate.hold_one, name="one"), clock=clock, slots=3, threads=3)
    offered(stage, "a", "b")
    turn(stage)
    stage.offer("one", task_id="x")
    stage.offer("one", task_id="y")
    assert gate.await_begun() == ["x"]
    turn(stage)
    worker.advance(WAIT_MS)
    assert gate.await_begun() == ["a", "b"]


# --- outcomes ---------------------------------------------------------------------------------------------------------


@both
def test_every_item_has_an_outcome_of_its_own(stage: Stage, clock: ManualClock, is_async: bool) -> None:
    def mixed(numbers: list[int], contexts: list[Context]) -> list[Any]:
        contexts[3].checkpoint({"n": numbers[3]})
        return [0, PermanentError("no"), Snooze(2.5, "not yet"), RetryableError("later", after=1)]

    async def mixed_async(numbers: list[int], contexts: list[Context]) -> list[Any]:
        return mixed(numbers, contexts)

    handler = Handler(mixed_async if is_async else mixed, name="hold", batch=Batch(size=4, wait=1))
    worker = stage.worker(handler, clock=clock)
    offered(stage, "a", "b", "c", "d")
    stage.expect(lambda: len(stage.of(AttemptStarted)) == 4 and len(stage.reports) >= SHARDS + 9)
    assert [one.result for one in stage.of(AttemptSucceeded, task_id="a")] == [b"0"]
    assert [one.error.message for one in stage.of(AttemptFailed, task_id="b")] == ["no"]
    assert [one.delay_ms for one in stage.of(AttemptSnoozed, task_id="c")] == [2500]
    assert [one.retry_after_ms for one in stage.of(AttemptFailed, task_id="d")] == [1000]
    assert [one.checkpoint for one in stage.of(AttemptCheckpointed)] == [b'{"n":3}']
    assert stage.of(AttemptCheckpointed, task_id="d")
    stats = worker.runtime.stats
    assert (stats.started, stats.succeeded, stats.failed, stats.snoozed) == (4, 1, 2, 1)


def test_a_list_of_another_length_fails_each_item_for_good(stage: Stage, clock: ManualClock) -> None:
    def short(numbers: list[int]) -> list[int]:
        return numbers[1:]

    stage.worker(Handler(short, name="hold", batch=BATCH), clock=clock)
    for end in [stage.outcome(one) for one in offered(stage, "a", "b", "c")]:
        assert end.error.kind is ErrorKind.RESULT
        assert end.error.message == "a batch handler returned 2 results for 3 items"


# --- to stop one, to stop all -----------------------------------------------------------------------------------------


@both
def test_cancelling_one_item_leaves_the_others_alone(
    stage: Stage, gate: Gate, clock: ManualClock, is_async: bool
) -> None:
    worker = stage.worker(holding(gate, is_async), clock=clock)
    first, second, third = offered(stage, "a", "b", "c")
    gate.await_begun()
    stage.signal(worker, second, SignalKind.CANCEL)
    turn(stage)
    assert stage.about(second)[1:] == []
    gate.open()
    assert isinstance(stage.outcome(second), AttemptCancelled)
    assert [stage.outcome(one).result for one in (first, third)] == [b"0", b"2"]
    assert not gate.is_interrupted


@both
def test_a_cancelled_item_that_is_not_given_up_by_its_handler_is_by_its_worker(
    stage: Stage, gate: Gate, clock: ManualClock, is_async: bool
) -> None:
    worker = stage.worker(holding(gate, is_async), clock=clock)
    first, second, third = offered(stage, "a", "b", "c")
    gate.await_begun()
    stage.signal(worker, second, SignalKind.CANCEL, grace_ms=3000)
    turn(stage)
    worker.advance(3000)
    turn(stage)
    worker.advance(499)
    turn(stage)
    assert len(stage.about(second)) == 1
    worker.advance(1)
    assert isinstance(stage.outcome(second), AttemptCancelled)
    stage.expect(lambda: worker.runtime.stats.running == 2)
    assert worker.runtime.stats.abandoned == 0
    gate.open()
    assert [stage.outcome(one).result for one in (first, third)] == [b"0", b"2"]
    turn(stage)
    assert len(stage.about(second)) == 2
    assert not gate.is_interrupted


@both
def test_a_timeout_of_one_item_leaves_the_others_alone(
    stage: Stage, gate: Gate, clock: ManualClock, is_async: bool
) -> None:
    worker = stage.worker(holding(gate, is_async), clock=clock)
    first, third = offered(stage, "a", "c")
    second = stage.offer("hold", 1, task_id="b", timeout_ms=1000)
    gate.await_begun()
    worker.advance(1000)
    turn(stage)
    worker.advance(500)
    end = stage.outcome(second)
    assert (end.error.kind, end.error.message) == (
        ErrorKind.TIMEOUT,
        "the attempt was stopped after its timeout of 1000 ms",
    )
    gate.open()
    assert [stage.outcome(one).result for one in (first, third)] == [b"0", b"1"]
    assert not gate.is_interrupted


def test_a_coroutine_is_cancelled_when_all_its_items_are(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate, is_async=True), clock=clock)
    ready = offered(stage, "a", "b", "c")
    gate.await_begun()
    for one in ready:
        stage.signal(worker, one, SignalKind.CANCEL)
    assert [type(stage.outcome(one)) for one in ready] == [AttemptCancelled] * 3
    assert gate.is_interrupted


@pytest.mark.parametrize("kind", [SignalKind.CANCEL, SignalKind.REVOKE])
def test_a_coroutine_may_take_its_time_for_one_that_was_only_asked(
    stage: Stage, clock: ManualClock, kind: SignalKind
) -> None:
    """One is cancelled and has its grace; another is made to stop, which must not cut that grace short."""
    begun, cleaning, cleaned = threading.Event(), asyncio.Event(), threading.Event()
    interrupted: list[str] = []

    async def tidy(numbers: list[int]) -> list[int]:
        begun.set()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            interrupted.append("once")
            try:
                cleaned.set()
                await cleaning.wait()
            except asyncio.CancelledError:
                interrupted.append("again")
                raise
            raise
        return numbers

    worker = stage.worker(Handler(tidy, name="hold", batch=Batch(size=2, wait=1)), clock=clock)
    first, second = offered(stage, "a", "b")
    assert begun.wait(WAIT_S)
    stage.signal(worker, first, SignalKind.CANCEL, grace_ms=3000)
    turn(stage)
    assert not interrupted
    stage.signal(worker, second, kind)
    assert cleaned.wait(WAIT_S)
    turn(stage)
    assert interrupted == ["once"]
    worker.advance(3000)
    assert isinstance(stage.outcome(first), AttemptCancelled)
    if kind is SignalKind.CANCEL:
        assert isinstance(stage.outcome(second), AttemptCancelled)
    assert interrupted == ["once", "again"]


@both
def test_the_timeout_of_a_batch_counts_from_its_call_and_stops_it(
    stage: Stage, gate: Gate, clock: ManualClock, is_async: bool
) -> None:
    worker = stage.worker(holding(gate, is_async, timeout_ms=2000), clock=clock, threads=1)
    ready = offered(stage, "a", "b")
    turn(stage)
    worker.advance(WAIT_MS)
    gate.await_begun()
    worker.advance(1999)
    turn(stage)
    assert [len(stage.about(one)) for one in ready] == [1, 1]
    worker.advance(1)
    turn(stage)
    worker.advance(500)
    ends = [stage.outcome(one) for one in ready]
    assert [end.error.kind for end in ends] == [ErrorKind.TIMEOUT] * 2
    stage.expect(lambda: worker.runtime.stats.running == 0)


def test_a_thread_that_overruns_with_a_batch_is_replaced(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), clock=clock, threads=1)
    late = offered(stage, "a", "b", "c", timeout_ms=2000)
    gate.await_begun()
    worker.advance(2000)
    turn(stage)
    worker.advance(500)
    assert {stage.outcome(one).error.kind for one in late} == {ErrorKind.TIMEOUT}
    stage.expect(lambda: worker.runtime.stats.abandoned == 1)
    offered(stage, "d", "e", "f")
    assert gate.await_begun() == ["d", "e", "f"]


def test_what_is_called_void_while_it_collects_is_left_out(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), clock=clock)
    first, second = offered(stage, "a", "b")
    turn(stage)
    stage.signal(worker, second, SignalKind.REVOKE, task_version=1)
    turn(stage)
    worker.advance(WAIT_MS)
    assert gate.await_begun() == ["a"]
    gate.open()
    assert stage.outcome(first).result == b"0"
    assert stage.about(second) == []
    stage.expect(lambda: stage.committed().get(MEDIUM) == 4)


def test_what_is_revoked_before_its_start_could_be_sent_is_not_called(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    log = faulty(stage)
    worker = stage.worker(holding(gate), clock=clock, log=log)
    offered(stage, "a", "b")
    stage.expect(lambda: worker.runtime.stats.waiting == 2)
    log.refused = 1_000_000
    (third,) = offered(stage, "c")
    stage.expect(lambda: worker.runtime.stats.running == 3)
    stage.signal(worker, third, SignalKind.REVOKE)
    stage.expect(lambda: worker.runtime.stats.revoked == 1)
    assert gate.begun.empty()
    log.refused = 0
    worker.advance(100)
    assert gate.await_begun() == ["a", "b"]
    gate.open()
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 2)
    stage.expect(lambda: worker.runtime.stats.running == 0)


def test_one_that_is_called_alone_is_not_called_if_it_is_revoked_before(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    log = faulty(stage)
    worker = stage.worker(Handler(gate.hold_one, name="one"), clock=clock, log=log)
    log.refused = 1_000_000
    ready = stage.offer("one", task_id="x")
    stage.expect(lambda: worker.runtime.stats.running == 1)
    stage.signal(worker, ready, SignalKind.REVOKE)
    stage.expect(lambda: worker.runtime.stats.revoked == 1)
    log.refused = 0
    worker.advance(100)
    stage.expect(lambda: worker.runtime.stats.running == 0)
    stage.offer("one", task_id="y")
    assert gate.await_begun() == ["y"]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_stops_gives_back_what_collects_and_waits_for_no_deadline(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    """C19. The clock stands still."""
    worker = stage.worker(holding(gate), clock=clock)
    ready = offered(stage, "a", "b")
    stage.expect(lambda: worker.runtime.stats.waiting == 2)
    worker.runtime.stop()
    assert worker.ended() and worker.failure is None
    stage.expect(lambda: len(stage.of(AttemptReturned)) == 2)
    for one in ready:
        (returned,) = stage.about(one)
        assert (returned.is_started, returned.reason) == (False, "shutdown")
    assert gate.begun.empty()
    assert stage.committed().get(MEDIUM) == 2


def test_within_the_grace_a_running_batch_finishes(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(holding(gate), clock=clock)
    ready = offered(stage, "a", "b", "c")
    gate.await_begun()
    worker.runtime.stop()
    stage.expect(lambda: not stage.members())
    gate.open()
    assert [stage.outcome(one).result for one in ready] == [b"0", b"1", b"2"]
    assert worker.ended() and worker.failure is None


def test_after_the_grace_a_running_batch_is_stopped_and_given_back(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    worker = stage.worker(holding(gate, is_async=True), clock=clock, grace_ms=3000)
    ready = offered(stage, "a", "b", "c")
    gate.await_begun()
    worker.runtime.stop()
    stage.expect(lambda: worker.runtime._stop_at)
    worker.advance(3000)
    ends = [stage.outcome(one) for one in ready]
    assert {(type(end), end.is_started, end.reason) for end in ends} == {(AttemptReturned, True, "shutdown")}
    assert gate.is_interrupted
    assert worker.ended() and worker.failure is None
