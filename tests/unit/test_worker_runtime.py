"""The worker over a real log: what it reports, when it commits, how it stops."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from infra.local import LocalLog
from scheduler.ports import Entry, OnAck, TopicPartition
from schemas.catalog import newest
from schemas.codec import Codec
from schemas.errors import Fatal, Retriable
from schemas.ids import shard_of
from schemas.messages import (
    AttemptCancelled,
    AttemptCheckpointed,
    AttemptCrashed,
    AttemptFailed,
    AttemptReturned,
    AttemptSnoozed,
    AttemptStarted,
    AttemptSucceeded,
    ErrorKind,
    Priority,
    ReadyTask,
    RunningAttempt,
    SignalKind,
    Verdict,
    WorkerHeartbeat,
    WorkerSignal,
)
from schemas.topics import TASK_REPORTS, WORKER_SIGNALS, ready_topic
from tests import pool_app
from tests.samples import minimal
from tests.worker_stage import SHARDS, WAIT_S, ManualClock, Stage
from workers.context import Context
from workers.errors import Snooze
from workers.outbox import BATCH_MAX, IfLost, Outbox, Outgoing
from workers.registry import Handler
from workers.runtime import _Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Gate:
    """Handlers that say that they began, and wait until the test lets them go on."""

    def __init__(self) -> None:
        self.begun: queue.Queue[str] = queue.Queue()
        self._release = threading.Event()

    def hold(self, context: Context) -> str:
        self.begun.put(context.task_id)
        self._release.wait(WAIT_S)
        return context.task_id

    async def hold_async(self, context: Context) -> str:
        self.begun.put(context.task_id)
        await asyncio.to_thread(self._release.wait, WAIT_S)
        return context.task_id

    def await_begun(self) -> str:
        return self.begun.get(timeout=WAIT_S)

    def open(self) -> None:
        self._release.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


async def echo(value: Any) -> Any:
    return value


def echo_in_thread(value: Any) -> Any:
    return value


# --- the life of an attempt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, {"n": 9007199254740993}])
def test_a_result_is_reported_after_the_start(stage: Stage, value: Any) -> None:
    """C43."""
    stage.worker(echo)
    ready = stage.offer("echo", {"value": value}, shard=1)
    report = stage.outcome(ready)
    assert isinstance(report, AttemptSucceeded)
    assert msgspec.json.decode(report.result) == value
    assert (report.worker_id, report.attempt, report.content_type) == ("w0", 1, "application/json")


def test_every_executor_works_in_one_worker(stage: Stage) -> None:
    pooled = pool_app.registry.get("double")
    assert pooled is not None
    stage.worker(echo, echo_in_thread, pooled, app="tests.pool_app:registry", processes=1)
    offered = [stage.offer("echo", 1), stage.offer("echo_in_thread", 2), stage.offer("double", 3)]
    assert [stage.outcome(ready).result for ready in offered] == [b"1", b"2", b"6"]


def test_processes_need_the_name_of_the_application(stage: Stage) -> None:
    pooled = pool_app.registry.get("double")
    assert pooled is not None
    with pytest.raises(ValueError, match=r"app: needed by .*double"):
        stage.worker(pooled)


def test_what_a_handler_raises_is_reported(stage: Stage) -> None:
    def failing() -> None:
        raise ConnectionError("refused")

    async def snoozing() -> None:
        raise Snooze(2.5, "not yet")

    async def nan() -> float:
        return float("nan")

    stage.worker(failing, snoozing, nan)
    failed = stage.outcome(stage.offer("failing"))
    snoozed = stage.outcome(stage.offer("snoozing"))
    unstorable = stage.outcome(stage.offer("nan"))
    unknown = stage.outcome(stage.offer("no-such-type"))
    wrong = stage.outcome(stage.offer("failing", {"n": 1}))
    assert isinstance(failed, AttemptFailed) and failed.error.verdict is Verdict.LIKELY_RETRYABLE
    assert isinstance(snoozed, AttemptSnoozed) and snoozed.delay_ms == 2500
    assert isinstance(unstorable, AttemptFailed) and unstorable.error.kind is ErrorKind.RESULT
    assert isinstance(unknown, AttemptFailed) and unknown.error.kind is ErrorKind.UNKNOWN_TYPE
    assert "failing, nan, snoozing" in unknown.error.message
    assert unknown.error.verdict is Verdict.RETRYABLE  # another worker may know it
    assert isinstance(wrong, AttemptFailed) and wrong.error.verdict is Verdict.PERMANENT


def test_a_process_that_dies_is_reported_as_a_crash_and_others_go_on(stage: Stage) -> None:
    """C16."""
    deadly, fine = pool_app.registry.get("kill_itself"), pool_app.registry.get("double")
    assert deadly is not None and fine is not None
    stage.worker(deadly, fine, echo, app="tests.pool_app:registry", processes=1)
    crashed = stage.offer("kill_itself")
    others = [stage.offer("echo", n) for n in range(50)]
    report = stage.outcome(crashed)
    assert isinstance(report, AttemptCrashed) and "SIGKILL" in report.detail
    assert [stage.outcome(ready).result for ready in others] == [b"%d" % n for n in range(50)]


def test_checkpoints_come_before_the_end_and_are_given_to_the_next_attempt(stage: Stage) -> None:
    async def stepping(context: Context) -> Any:
        for step in range(100):
            await context.checkpoint({"step": step})
        return context.last_checkpoint

    stage.worker(stepping)
    ready = stage.offer("stepping", checkpoint=b'{"step": 7}')
    stage.expect(lambda: stage.of(AttemptSucceeded))
    _, *checkpoints, end = stage.about(ready)
    assert end.result == b'{"step":7}'
    assert all(isinstance(report, AttemptCheckpointed) for report in checkpoints)
    assert checkpoints[-1].checkpoint == b'{"step":99}'


# --- ready records ----------------------------------------------------------------------------------------------------


def test_a_doubled_ready_record_runs_once(stage: Stage) -> None:
    runs = []

    async def counting() -> None:
        runs.append(1)

    stage.worker(counting)
    ready = stage.offer("counting", task_id="t")
    stage.outcome(ready)
    stage.offer("counting", task_id="t")
    stage.offer("counting", task_id="t", partition=1)
    stage.outcome(stage.offer("counting", task_id="u", partition=1))
    stage.outcome(stage.offer("counting", task_id="v"))
    assert len(runs) == 3
    assert len(stage.about(ready)) == 2


def test_an_id_that_is_used_anew_is_no_duplicate(stage: Stage) -> None:
    """C22, after the retention: attempts and versions of the new task begin again from 1."""
    worker = stage.worker(echo)
    stage.outcome(stage.offer("echo", 1, task_id="key-1", created_at=5))
    stage.offer("echo", 2, task_id="key-1", created_at=5)
    stage.offer("echo", 3, task_id="key-1", created_at=9)
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 2)
    assert [report.result for report in stage.of(AttemptSucceeded)] == [b"1", b"3"]
    assert worker.runtime.stats.duplicates == 1


@pytest.mark.parametrize("is_revoked_late", [False, True])
def test_an_updated_task_is_begun_again_though_its_older_version_was(
    stage: Stage, gate: Gate, is_revoked_late: bool
) -> None:
    worker = stage.worker(Handler(gate.hold_async, name="hold"))
    old = stage.offer("hold", task_id="t", task_version=1)
    gate.await_begun()

    def revoke() -> None:  # the shard's answer to the start of the old version
        stage.signal(worker, old, SignalKind.REVOKE, task_version=1)
        stage.outcome(stage.offer("no-such-type"))

    if not is_revoked_late:
        revoke()
    stage.offer("hold", task_id="t", task_version=2)
    gate.await_begun()
    if is_revoked_late:
        revoke()
    stage.offer("hold", task_id="t", task_version=1)  # doubled, and void
    gate.open()
    stage.expect(lambda: stage.of(AttemptSucceeded))
    assert [report.task_version for report in stage.of(AttemptStarted, task_id="t")] == [1, 2]
    assert len(stage.of(AttemptSucceeded)) == 1


def test_a_broken_record_is_skipped_and_counted(stage: Stage) -> None:
    """C32."""
    worker = stage.worker(echo)
    topic = ready_topic("default", Priority.MEDIUM)
    for value in (b"", b"{}", b"\x00\x00\x00\x01\x00junk", stage.codec.encode(stage.offer("echo", 1, shard=99))):
        stage.put(topic, 0, value)
    last = stage.offer("echo", 2)
    assert stage.outcome(last).result == b"2"
    assert worker.runtime.stats.undecodable == 5
    stage.expect(lambda: stage.committed().get(TopicPartition(topic, 0)) == 6)


FOREIGN_ID = 7


class Registry:
    """A schema registry in memory, which may be out of reach; another writer's ReadyTask is among its schemas."""

    def __init__(self) -> None:
        self.is_down = True
        self._ids: dict[str, int] = {}

    def register(self, name: str, text: str) -> int:
        return self._ids.setdefault(name, 100 + len(self._ids))

    def schema(self, schema_id: int) -> str:
        if self.is_down:
            raise Retriable("the registry does not answer")
        assert schema_id == FOREIGN_ID
        return newest()["ReadyTask"].text

    def as_foreign(self, value: bytes) -> bytes:
        """The same record under the number of the other writer."""
        return b"\0" + FOREIGN_ID.to_bytes(4, "big") + value[5:]


@pytest.fixture
def registry(stage: Stage) -> Registry:
    """All of the stage speak the registry's numbers."""
    registry = Registry()
    stage.codec = Codec(registry)
    return registry


def offer_foreign(stage: Stage, registry: Registry, payload: int) -> ReadyTask:
    """Send an attempt out under a schema that must be looked up."""
    ready = minimal(
        ReadyTask, task_id=f"foreign-{payload}", task_version=1, attempt=1, task_type="echo", queue="default",
        priority=Priority.MEDIUM, payload=b"%d" % payload, lease_ms=300_000, content_type="application/json",
    )  # fmt: skip
    stage.put(MEDIUM, 0, registry.as_foreign(stage.codec.encode(ready)))
    assert isinstance(ready, ReadyTask)
    return ready


MEDIUM = ready_topic("default", Priority.MEDIUM)


def test_what_cannot_be_read_while_the_registry_is_away_waits_and_the_rest_goes_on(
    stage: Stage, registry: Registry, clock: ManualClock
) -> None:
    """C32."""
    worker = stage.worker(echo, clock=clock)
    held = [offer_foreign(stage, registry, 1), offer_foreign(stage, registry, 2)]
    assert stage.outcome(stage.offer("echo", 3)).result == b"3"
    worker.advance(100)
    assert stage.outcome(stage.offer("echo", 4)).result == b"4"
    assert not any(map(stage.about, held))
    assert MEDIUM not in {partition.topic for partition in stage.committed()}
    registry.is_down = False
    worker.advance(100)
    assert [stage.outcome(ready).result for ready in held] == [b"1", b"2"]
    stage.expect(lambda: stage.committed().get(TopicPartition(MEDIUM, 0)) == 4)
    assert (worker.runtime.stats.undecodable, worker.runtime.stats.started) == (0, 4)


def test_no_more_is_taken_than_may_be_held(
    stage: Stage, registry: Registry, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.runtime.HELD_MAX", 2)
    worker = stage.worker(echo, clock=clock)
    held = [offer_foreign(stage, registry, number) for number in range(5)]
    last = stage.offer("echo", 9)
    stage.expect(lambda: len(worker.runtime._held) == 2)
    worker.advance(100)
    other = stage.worker(echo, clock=clock, queues=("other",))
    assert stage.outcome(stage.offer("echo", 8, queue="other")).result == b"8"  # the log is alive
    assert len(worker.runtime._held) == 2
    assert not stage.about(last)
    registry.is_down = False
    worker.advance(100)
    assert [stage.outcome(ready).result for ready in (*held, last)] == [b"%d" % n for n in (0, 1, 2, 3, 4, 9)]
    assert other.runtime.stats.started == 1


def test_a_worker_that_stops_leaves_what_it_could_not_read_to_others(
    stage: Stage, registry: Registry, clock: ManualClock
) -> None:
    worker = stage.worker(echo, clock=clock)
    held = offer_foreign(stage, registry, 1)
    stage.expect(lambda: worker.runtime._held)
    worker.runtime.stop()
    stage.expect(lambda: worker.runtime._stage is not _Stage.RUNNING)
    worker.advance(5_000)  # so long it waits for what it took to be settled
    assert worker.ended()
    assert not stage.committed()
    registry.is_down = False
    stage.worker(echo)
    stage.expect(lambda: stage.of(AttemptReturned, task_id=held.task_id))


def test_a_signal_that_cannot_be_read_takes_no_other_with_it(
    stage: Stage, registry: Registry, gate: Gate, clock: ManualClock
) -> None:
    worker = stage.worker(Handler(gate.hold_async, name="hold"), clock=clock)
    ready = stage.offer("hold")
    gate.await_begun()
    revoke = minimal(WorkerSignal, worker_id="w0", task_id=ready.task_id, attempt=1, kind=SignalKind.REVOKE)
    value = stage.codec.encode(revoke)
    stage.log.append([Entry(WORKER_SIGNALS, 0, None, one) for one in (registry.as_foreign(value), value)])
    stage.expect(lambda: worker.runtime.stats.revoked == 1)


def test_only_what_is_settled_in_the_log_is_committed(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    """C31: the second record waits for a slot, so that nothing behind the first is committed."""
    worker = stage.worker(gate.hold, clock=clock, slots=1)
    stage.offer("hold", task_id="a")
    gate.await_begun()
    stage.offer("hold", task_id="b")
    stage.outcome(stage.offer("no-such-type"))
    partition = TopicPartition(ready_topic("default", Priority.MEDIUM), 0)
    stage.expect(lambda: stage.committed().get(partition) == 1)
    worker.advance(100)
    stage.expect(lambda: stage.committed().get(partition) == 3)
    (returned,) = stage.of(AttemptReturned)
    assert (returned.task_id, returned.is_started, returned.reason) == ("b", False, "no free slot")


def test_a_record_that_was_given_back_may_come_again(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(gate.hold, clock=clock, slots=1)
    stage.offer("hold", task_id="a")
    gate.await_begun()
    stage.offer("hold", task_id="b", shard=1)
    stage.expect(lambda: worker.runtime.stats.waiting == 1)
    worker.advance(100)
    stage.expect(lambda: stage.of(AttemptReturned, task_id="b"))
    heartbeats = len(stage.of(WorkerHeartbeat))
    gate.open()
    stage.expect(lambda: len(stage.of(WorkerHeartbeat)) > heartbeats)
    (notice,) = stage.of(WorkerHeartbeat)[heartbeats:]
    assert notice.free_slots == 1
    stage.offer("hold", task_id="b", shard=1)
    stage.expect(lambda: stage.of(AttemptSucceeded, task_id="b"))


def test_what_was_there_before_the_worker_came_is_given_back_unstarted(stage: Stage) -> None:
    """C18: it may have been called void when nobody listened. What its shard sends again is run."""
    ready = stage.offer("echo", 1, task_id="t")
    worker = stage.worker(echo)
    stage.expect(lambda: stage.about(ready))
    (returned,) = stage.of(AttemptReturned)
    assert (returned.task_id, returned.is_started, returned.reason) == ("t", False, "not fresh")
    stage.offer("echo", 2, task_id="t")
    stage.expect(lambda: stage.of(AttemptSucceeded))
    assert [report.result for report in stage.of(AttemptSucceeded)] == [b"2"]
    assert worker.runtime.stats.started == 1
    stage.expect(lambda: stage.committed().get(TopicPartition(ready_topic("default", Priority.MEDIUM), 0)) == 2)


def test_a_slot_that_is_free_goes_to_the_more_urgent(stage: Stage, gate: Gate) -> None:
    """C27."""
    stage.worker(gate.hold, slots=1)
    stage.offer("hold", task_id="first", priority=Priority.LOW)
    gate.await_begun()
    for n in range(5):
        stage.offer("hold", task_id=f"low{n}", priority=Priority.LOW)
    stage.offer("hold", task_id="urgent", priority=Priority.HIGH)
    stage.outcome(stage.offer("no-such-type"))
    gate.open()
    assert gate.await_begun() == "urgent"
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 7)


def test_workers_share_queues_and_each_its_own(stage: Stage) -> None:
    stage.worker(echo, queues=("a", "b"))
    stage.worker(echo, queues=("b",))
    offered = [
        stage.offer("echo", n, queue=queue, partition=n % 4, priority=priority)
        for n in range(8)
        for queue in ("a", "b")
        for priority in Priority
    ]
    ends = [stage.outcome(ready) for ready in offered]
    assert {end.worker_id for end, ready in zip(ends, offered, strict=True) if ready.queue == "a"} == {"w0"}
    assert {end.worker_id for end, ready in zip(ends, offered, strict=True) if ready.queue == "b"} == {"w0", "w1"}


# --- time, signals ----------------------------------------------------------------------------------------------------


def test_an_attempt_is_stopped_at_its_timeout_and_has_one_outcome(stage: Stage, clock: ManualClock) -> None:
    """C20, of a coroutine."""
    begun = threading.Event()

    async def hanging() -> None:
        begun.set()
        await asyncio.sleep(WAIT_S)

    worker = stage.worker(hanging, clock=clock)
    ready = stage.offer("hanging", timeout_ms=2000, deadline_at=clock.now + 60_000_000)
    assert begun.wait(WAIT_S)
    worker.advance(1999)
    stage.outcome(stage.offer("no-such-type"))
    assert len(stage.about(ready)) == 1
    worker.advance(1)
    report = stage.outcome(ready)
    assert isinstance(report, AttemptFailed)
    assert (report.error.kind, report.error.verdict) == (ErrorKind.TIMEOUT, Verdict.LIKELY_RETRYABLE)
    assert "2000 ms" in report.error.message


@pytest.mark.parametrize("limit", ["ready", "handler", "deadline"])
def test_a_thread_that_overruns_is_reported_replaced_and_its_late_result_ignored(
    stage: Stage, gate: Gate, clock: ManualClock, limit: str
) -> None:
    """C20: the slot is free again while the old thread still hangs."""
    handler = Handler(gate.hold, name="hold", timeout_ms=2000 if limit == "handler" else None)
    worker = stage.worker(handler, echo_in_thread, clock=clock, slots=1, threads=1)
    late = stage.offer(
        "hold",
        timeout_ms=2000 if limit == "ready" else None,
        deadline_at=clock.now + 2_000_000 if limit == "deadline" else None,
    )
    gate.await_begun()
    worker.advance(2000)
    stage.outcome(stage.offer("no-such-type"))
    worker.advance(500)
    report = stage.outcome(late)
    assert report.error.kind is (ErrorKind.DEADLINE if limit == "deadline" else ErrorKind.TIMEOUT)
    assert stage.outcome(stage.offer("echo_in_thread", 1)).result == b"1"
    stage.expect(lambda: worker.runtime.stats.abandoned == 1)
    gate.open()
    stage.expect(lambda: not worker.runtime._executors[handler.executor].abandoned)
    stage.outcome(stage.offer("echo_in_thread", 1))
    assert len(stage.about(late)) == 2


def test_a_worker_with_too_many_lost_threads_takes_no_more(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(gate.hold, echo, clock=clock, threads=2, abandoned_max=0)
    late = stage.offer("hold", timeout_ms=10)
    gate.await_begun()
    worker.advance(10)
    stage.outcome(stage.offer("no-such-type"))
    worker.advance(500)
    stage.outcome(late)
    stage.expect(lambda: not worker.runtime.stats.is_healthy)
    refused = stage.offer("echo", 1)
    stage.expect(lambda: worker.runtime.stats.waiting == 1)
    worker.advance(100)
    stage.expect(lambda: stage.about(refused))
    assert isinstance(stage.about(refused)[0], AttemptReturned)
    gate.open()
    stage.expect(lambda: not any(executor.abandoned for executor in worker.runtime._executors.values()))
    worker.advance(100)
    stage.expect(lambda: worker.runtime.stats.is_healthy)
    assert stage.outcome(stage.offer("echo", 1)).result == b"1"


def test_a_process_is_killed_at_its_timeout(stage: Stage, clock: ManualClock) -> None:
    """C20: a handler that swallows everything; a normal task is queued behind it."""
    bad, fine = pool_app.registry.get("swallowing"), pool_app.registry.get("double")
    assert bad is not None and fine is not None
    worker = stage.worker(bad, fine, clock=clock, app="tests.pool_app:registry", slots=1, processes=1)
    ready = stage.offer("swallowing", timeout_ms=2000)
    stage.expect(lambda: stage.of(AttemptCheckpointed))
    worker.advance(2000)
    stage.outcome(stage.offer("no-such-type"))
    worker.advance(500)
    stage.expect(lambda: stage.of(AttemptFailed, task_id=ready.task_id))
    assert stage.outcome(stage.offer("double", 4)).result == b"8"
    assert len(stage.about(ready)) == 3


def test_cancel_stops_a_handler_and_its_result_stands_if_it_was_first(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    def cooperative(context: Context) -> None:
        gate.begun.put(context.task_id)
        while True:
            context.check_cancelled()

    worker = stage.worker(cooperative, gate.hold, clock=clock)
    stopping = stage.offer("cooperative", task_id="a")
    finishing = stage.offer("hold", task_id="b")
    assert {gate.await_begun(), gate.await_begun()} == {"a", "b"}
    stage.signal(worker, stopping, SignalKind.CANCEL)
    stage.signal(worker, finishing, SignalKind.CANCEL)
    assert isinstance(stage.outcome(stopping), AttemptCancelled)
    gate.open()
    assert isinstance(stage.outcome(finishing), AttemptSucceeded)


def test_a_repeated_cancel_does_not_cut_the_clean_up_short(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    """C18: the shard says it again with each heartbeat, until the attempt ended."""
    cleaned = []

    async def cleaning(context: Context) -> None:
        try:
            gate.begun.put(context.task_id)
            await asyncio.sleep(WAIT_S)
        finally:
            await gate.hold_async(context)
            cleaned.append(context.task_id)

    worker = stage.worker(cleaning, clock=clock)
    ready = stage.offer("cleaning")
    for _ in range(2):  # it begins, then it cleans up
        gate.await_begun()
        stage.signal(worker, ready, SignalKind.CANCEL)
    stage.outcome(stage.offer("no-such-type"))
    gate.open()
    assert isinstance(stage.outcome(ready), AttemptCancelled)
    assert cleaned == [ready.task_id]


def test_what_ignores_a_cancel_is_stopped_after_the_grace(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    worker = stage.worker(gate.hold, clock=clock)
    ready = stage.offer("hold")
    gate.await_begun()
    stage.signal(worker, ready, SignalKind.CANCEL, grace_ms=3000)
    stage.outcome(stage.offer("no-such-type"))
    worker.advance(2999)
    stage.outcome(stage.offer("no-such-type"))
    assert len(stage.about(ready)) == 1
    worker.advance(1)
    stage.outcome(stage.offer("no-such-type"))
    worker.advance(500)
    assert isinstance(stage.outcome(ready), AttemptCancelled)


def test_a_revoked_attempt_is_stopped_and_nothing_is_reported(stage: Stage, clock: ManualClock) -> None:
    stopped = threading.Event()
    begun = threading.Event()

    async def hanging() -> None:
        begun.set()
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            stopped.set()

    worker = stage.worker(hanging, clock=clock)
    ready = stage.offer("hanging")
    assert begun.wait(WAIT_S)
    stage.signal(worker, ready, SignalKind.REVOKE)
    assert stopped.wait(WAIT_S)
    stage.outcome(stage.offer("no-such-type"))
    assert len(stage.about(ready)) == 1
    worker.advance(2000)
    stage.outcome(stage.offer("no-such-type"))
    assert not any(heartbeat.running for heartbeat in stage.of(WorkerHeartbeat))


@pytest.mark.parametrize("is_for_all", [False, True])
def test_a_ready_record_that_is_called_void_before_it_comes_is_not_begun(stage: Stage, is_for_all: bool) -> None:
    worker = stage.worker(echo, clock=ManualClock())
    to = None if is_for_all else worker
    void = stage.offer("echo", 1, queue="elsewhere", task_id="t")
    stage.signal(to, void, SignalKind.REVOKE, task_version=1)
    stage.outcome(stage.offer("no-such-type"))
    stage.offer("echo", 1, task_id="t")
    stage.outcome(stage.offer("echo", 2))
    assert stage.about(void) == []
    stage.offer("echo", 3, task_id="t", task_version=2)
    stage.expect(lambda: len(stage.about(void)) == 2)
    later = stage.offer("echo", 4, queue="elsewhere", task_id="u")
    stage.signal(to, later, SignalKind.REVOKE, task_version=1)
    stage.outcome(stage.offer("no-such-type"))
    stage.offer("echo", 4, task_id="u", created_at=ManualClock().now + 1)  # another task under this id
    stage.expect(lambda: len(stage.about(later)) == 2)
    assert worker.runtime.stats.revoked == 1


def test_a_ready_record_that_waits_for_a_slot_is_dropped_if_it_is_void(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    worker = stage.worker(gate.hold, clock=clock, slots=1)
    stage.offer("hold", task_id="first")
    gate.await_begun()
    void = stage.offer("hold", task_id="t", task_version=4)
    stage.expect(lambda: worker.runtime.stats.waiting == 1)
    stage.signal(None, void, SignalKind.REVOKE, task_version=3)
    stage.outcome(stage.offer("no-such-type"))
    assert worker.runtime.stats.waiting == 1
    stage.signal(None, void, SignalKind.REVOKE, task_version=4)
    stage.expect(lambda: worker.runtime.stats.waiting == 0)
    gate.open()
    stage.outcome(stage.offer("hold", task_id="last"))
    assert stage.about(void) == []
    stage.expect(lambda: stage.committed().get(TopicPartition(ready_topic("default", Priority.MEDIUM), 0)) == 4)


@pytest.mark.parametrize("kind", [SignalKind.CANCEL, SignalKind.REVOKE])
def test_a_signal_about_an_attempt_is_not_remembered(stage: Stage, kind: SignalKind) -> None:
    """It is about what runs now: an attempt whose start was refused keeps its number and may be given out again."""
    worker = stage.worker(echo)
    ready = stage.offer("echo", 1, queue="elsewhere", task_id="t")
    stage.signal(worker, ready, kind)
    stage.outcome(stage.offer("no-such-type"))
    stage.offer("echo", 1, task_id="t")
    assert stage.outcome(ready).result == b"1"


def test_a_signal_of_an_owner_that_another_one_followed_is_ignored(stage: Stage, gate: Gate) -> None:
    """C17: an owner that was paused may speak for a moment before it learns that its shard went to another."""
    worker = stage.worker(Handler(gate.hold_async, name="hold"))
    ready = stage.offer("hold", task_id="t", shard=shard_of("t", SHARDS), epoch=3)
    gate.await_begun()
    for kind in (SignalKind.REVOKE, SignalKind.CANCEL):
        stage.signal(worker, ready, kind, epoch=2)
    stage.expect(lambda: worker.runtime.stats.superseded == 2)
    assert worker.runtime.stats.revoked == 0
    gate.open()
    assert isinstance(stage.outcome(ready), AttemptSucceeded)


@pytest.mark.parametrize("epoch", [0, 3, 4])
def test_a_signal_of_the_owner_of_now_or_of_an_older_version_is_obeyed(stage: Stage, gate: Gate, epoch: int) -> None:
    worker = stage.worker(Handler(gate.hold_async, name="hold"))
    ready = stage.offer("hold", task_id="t", shard=shard_of("t", SHARDS), epoch=3)
    gate.await_begun()
    stage.signal(worker, ready, SignalKind.REVOKE, epoch=epoch)
    stage.expect(lambda: worker.runtime.stats.revoked == 1)


def test_an_epoch_is_known_by_signals_to_others_and_is_one_shard_s(stage: Stage, gate: Gate) -> None:
    worker = stage.worker(Handler(gate.hold_async, name="hold"))
    ids = ("t", next(f"u{n}" for n in range(100) if shard_of(f"u{n}", SHARDS) != shard_of("t", SHARDS)))
    mine, elsewhere = (stage.offer("hold", task_id=one, shard=shard_of(one, SHARDS), epoch=1) for one in ids)
    gate.await_begun()
    gate.await_begun()
    # It is about an attempt that runs nowhere here; but whoever sends it owns the shard of `mine`.
    stage.signal(None, msgspec.structs.replace(mine, attempt=9), SignalKind.REVOKE, epoch=5)
    stage.signal(worker, mine, SignalKind.REVOKE, epoch=4)
    stage.signal(worker, elsewhere, SignalKind.REVOKE, epoch=4)
    stage.expect(lambda: worker.runtime.stats.revoked == 1)
    assert worker.runtime.stats.superseded == 1
    gate.open()
    assert isinstance(stage.outcome(mine), AttemptSucceeded)


def test_heartbeats_vouch_for_what_runs_to_the_shard_that_it_is_of(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    worker = stage.worker(gate.hold, clock=clock, threads=3)
    assert [heartbeat.free_slots for heartbeat in stage.of(WorkerHeartbeat)] == [3] * SHARDS
    stage.offer("hold", task_id="a", shard=1)
    gate.await_begun()
    worker.advance(2000)
    stage.expect(lambda: len(stage.of(WorkerHeartbeat)) == SHARDS + 1)
    heartbeat = stage.of(WorkerHeartbeat)[-1]
    assert heartbeat.running == (RunningAttempt(task_id="a", attempt=1),)
    assert (heartbeat.free_slots, heartbeat.is_last) == (2, False)


# --- the log fails ----------------------------------------------------------------------------------------------------


class FaultyLog(LocalLog):
    """Refuses or loses the next appends, as told."""

    refused = 0
    lost = 0

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        if self.refused:
            self.refused -= 1
            raise Retriable("full")
        if self.lost and on_ack is not None:
            self.lost -= 1
            super().append([], lambda _: on_ack(Retriable("not delivered")))
            self.wake()
            return
        super().append(entries, on_ack)


def faulty(stage: Stage) -> FaultyLog:
    log = FaultyLog(stage.broker, commits=False)
    stage.broker._connections.append(log)
    return log


def test_a_log_that_is_full_for_a_moment_loses_nothing(stage: Stage, clock: ManualClock) -> None:
    log = faulty(stage)
    worker = stage.worker(echo, clock=clock, log=log)
    log.refused = 1
    ready = stage.offer("echo", 1)
    stage.expect(lambda: not log.refused)
    assert not stage.about(ready)
    worker.advance(100)
    assert stage.outcome(ready).result == b"1"


def test_a_start_that_may_be_lost_ends_the_attempt_and_it_can_be_handed_out_again(stage: Stage, gate: Gate) -> None:
    log = faulty(stage)
    worker = stage.worker(Handler(gate.hold_async, name="hold"), log=log)
    log.lost = 1
    ready = stage.offer("hold", task_id="t")
    gate.await_begun()
    stage.expect(lambda: worker.runtime.stats.revoked == 1 and not worker.runtime.stats.running)
    assert not stage.about(ready)
    stage.offer("hold", task_id="t")
    gate.await_begun()
    gate.open()
    assert isinstance(stage.outcome(ready), AttemptSucceeded)


def test_an_outcome_that_may_be_lost_is_sent_again(stage: Stage, gate: Gate, clock: ManualClock) -> None:
    log = faulty(stage)
    stage.worker(gate.hold, clock=clock, log=log)
    ready = stage.offer("hold")
    gate.await_begun()
    stage.expect(lambda: stage.about(ready))
    log.lost = 1
    gate.open()
    assert isinstance(stage.outcome(ready), AttemptSucceeded)
    assert log.lost == 0


def test_lost_reports_are_sent_again_in_their_order(stage: Stage) -> None:
    log = faulty(stage)
    log.lost = 3
    outbox = Outbox(log, on_stored=print, on_lost=print, linger_ms=0)
    keys = [b"%d" % n for n in range(2 * BATCH_MAX + 1)]
    for key in keys:
        outbox.add(Outgoing(Entry(TASK_REPORTS, 0, key, b""), IfLost.REPEAT), is_urgent=True)
    outbox.flush(0)
    assert outbox.unacknowledged == len(keys)
    outbox.add(Outgoing(Entry(TASK_REPORTS, 0, b"last", b""), IfLost.REPEAT), is_urgent=True)
    while outbox.unacknowledged:
        log.poll(WAIT_S)
    outbox.flush(0)
    reader = stage.log.reader()
    reader.seek(TopicPartition(TASK_REPORTS, 0), 0)
    assert [record.key for record in reader.take(len(keys) + 2)] == [*keys, b"last"]


def test_a_worker_without_its_log_ends_with_the_reason(stage: Stage) -> None:
    worker = stage.worker(echo)
    stage.broker.failure = Fatal("the disk is gone")
    worker._log.wake()
    assert worker.ended()
    assert isinstance(worker.failure, Fatal)
    stage.broker.failure = None
    worker.failure = None


# --- the end ----------------------------------------------------------------------------------------------------------


def test_within_the_grace_running_attempts_finish_and_the_rest_goes_to_another_worker(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    """C19, grace long enough."""
    ending = stage.worker(gate.hold, clock=clock, slots=2)
    running = [stage.offer("hold", task_id=f"r{n}") for n in range(2)]
    assert {gate.await_begun(), gate.await_begun()} == {"r0", "r1"}
    fetched = [stage.offer("hold", task_id=f"f{n}") for n in range(8)]
    stage.expect(lambda: ending.runtime.stats.waiting == 8)
    ending.runtime.stop()
    stage.expect(lambda: len(stage.of(AttemptReturned)) == 8)
    assert {(report.is_started, report.reason) for report in stage.of(AttemptReturned)} == {(False, "shutdown")}
    stage.expect(lambda: not stage.members())
    other = stage.worker(gate.hold, worker_id="other")
    again = [stage.offer("hold", task_id=ready.task_id) for ready in fetched]
    begun = {gate.await_begun() for _ in again}
    assert begun == {ready.task_id for ready in fetched}
    gate.open()
    stage.expect(lambda: len(stage.of(AttemptSucceeded)) == 10)
    ended_by = {report.task_id: report.worker_id for report in stage.of(AttemptSucceeded)}
    assert ended_by == {r.task_id: "w0" for r in running} | {r.task_id: "other" for r in fetched}
    assert ending.ended() and ending.failure is None
    stage.expect(lambda: len(stage.of(WorkerHeartbeat, worker_id="w0", is_last=True)) == SHARDS)
    assert other.runtime.stats.succeeded == 8
    assert not stage.of(AttemptFailed)


@pytest.mark.parametrize("is_second_call", [False, True])
def test_after_the_grace_running_attempts_are_stopped_and_given_back(
    stage: Stage, clock: ManualClock, is_second_call: bool
) -> None:
    """C19, grace too short; or a second signal."""
    begun = threading.Event()

    async def hanging() -> None:
        begun.set()
        await asyncio.sleep(WAIT_S)

    worker = stage.worker(hanging, clock=clock, grace_ms=3000)
    ready = stage.offer("hanging")
    assert begun.wait(WAIT_S)
    worker.runtime.stop()
    if is_second_call:
        worker.runtime.stop()
    else:
        stage.expect(lambda: worker.runtime._stop_at)
        worker.advance(3000)
    report = stage.outcome(ready)
    assert isinstance(report, AttemptReturned)
    assert (report.is_started, report.reason) == (True, "shutdown")
    assert worker.ended() and worker.failure is None
    stage.expect(lambda: len(stage.of(WorkerHeartbeat, is_last=True)) == SHARDS)
    assert stage.reports.index(report) < stage.reports.index(stage.of(WorkerHeartbeat, is_last=True)[0])
    assert stage.committed() == {TopicPartition(ready_topic("default", Priority.MEDIUM), 0): 1}


def test_a_worker_with_nothing_to_do_stops_at_once(stage: Stage) -> None:
    worker = stage.worker(echo)
    worker.runtime.stop()
    assert worker.ended() and worker.failure is None


def test_a_thread_that_hangs_does_not_keep_the_worker_from_stopping(
    stage: Stage, gate: Gate, clock: ManualClock
) -> None:
    worker = stage.worker(gate.hold, clock=clock)
    ready = stage.offer("hold")
    gate.await_begun()
    worker.runtime.stop()
    worker.runtime.stop()
    stage.expect(lambda: worker.runtime._attempts.next_at() is not None)
    worker.advance(500)
    assert isinstance(stage.outcome(ready), AttemptReturned)
    gate.open()
    assert worker.ended() and worker.failure is None
