"""The view is the fold of the events: whatever is lost, doubled, stale, broken or applied again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import msgspec
import pytest
import structlog

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage, SqliteView
from infra.topics import embedded_catalog
from scheduler.core.task import evolve
from scheduler.ports import AttemptOutcome, Batch, Entry, Position, TaskRow, TopicPartition, View
from scheduler.projector import BATCH_MAX, KNOWN_MAX, Known, Projector, _remember, changes_of
from schemas.codec import Codec
from schemas.errors import Fatal, Retriable
from schemas.messages import (
    ErrorKind,
    Event,
    EventBody,
    NextStep,
    Outcome,
    ShardOpened,
    Status,
    Task,
    TaskAttemptFailed,
    TaskAttemptLost,
    TaskCancelled,
    TaskCancelRequested,
    TaskDiscarded,
    TaskError,
    TaskRedriven,
    TaskRejected,
    TaskSpec,
    TaskStarted,
    TaskSubmitted,
    TaskSucceeded,
)
from schemas.topics import TASK_EVENTS
from tests.histories import START, history
from tests.samples import minimal

CODEC = Codec.builtin()
PARTITIONS = 2
ERROR = TaskError(kind=ErrorKind.RAISED, type="OSError", message="no")


class Bench:
    """A log of events, a view, and the projector between them."""

    def __init__(self) -> None:
        self.broker = LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(PARTITIONS))
        self.writer = self.broker.connect(commits=True)
        self.reader: LocalLog = self.broker.connect()
        self.view: Any = SqliteView(":memory:")
        self.projector = self.begin()

    def begin(self) -> Projector:
        """A projector that resumes where the view stands, as after a restart."""
        self.projector = Projector(self.reader, self.view, CODEC, PARTITIONS)
        return self.projector

    def append(self, *events: Event | bytes | None, partition: int = 0) -> None:
        values = [CODEC.encode(event) if isinstance(event, Event) else event for event in events]
        self.writer.append([Entry(TASK_EVENTS, partition, None, value) for value in values])
        self.writer.poll(0)

    def catch_up(self) -> None:
        while self.projector.lag():
            self.projector.step(0)

    def row(self, task_id: str) -> TaskRow:
        row: TaskRow | None = self.view.task(task_id)
        assert row is not None
        return row

    def close(self) -> None:
        self.projector.close()
        self.view.close()
        self.writer.close()
        self.reader.close()
        self.broker.close()


@contextmanager
def opened() -> Iterator[Bench]:
    bench = Bench()
    try:
        yield bench
    finally:
        bench.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with opened() as made, structlog.testing.capture_logs():
        yield made


def event(body: EventBody, version: int, *, at: int = 0, epoch: int = 1, task_id: str = "t") -> Event:
    return Event(entity_id=task_id, tenant_id="default", version=version, epoch=epoch, at=START + at, body=body)


SUBMITTED = TaskSubmitted(spec=TaskSpec(task_type="mail"), status=Status.PENDING, next_run_at=START)
STARTED = TaskStarted(attempt=1, worker_id="w", started_at=START + 5)
SUCCEEDED = TaskSucceeded(attempt=1, worker_id="w", finished_at=START + 9, result=b"7", content_type="application/json")
OPENED = ShardOpened(owner="p")


def dump(view: Any, tasks: Sequence[str]) -> list[bytes]:
    return [msgspec.msgpack.encode(view.task(task_id)) for task_id in sorted(tasks)]


# --- the fold ---------------------------------------------------------------------------------------------------------


def assert_is_fold(row: TaskRow, task: Task) -> None:
    for name in set(Task.__struct_fields__) & set(TaskRow.__struct_fields__) - {"worker_id"}:
        if name == "next_run_at" and row.completed_at is not None:
            assert row.next_run_at is None
        else:
            assert getattr(row, name) == getattr(task, name), name
    assert task.worker_id in (None, row.worker_id)
    assert (row.completed_at is not None) == (task.status in ("SUCCEEDED", "FAILED", "DEAD", "CANCELLED"))
    assert not row.is_dead_letter or task.status is Status.DEAD
    running = [attempt.attempt for attempt in row.attempts if attempt.outcome is None]
    assert running == ([task.attempt] if task.status is Status.RUNNING else [])
    assert [attempt.attempt for attempt in row.attempts] == list(range(1, task.attempt + 1))


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_what_evolve_says_however_the_events_are_cut(seed: int, bench: Bench) -> None:
    rng = Random(seed)
    events, tasks = history(rng, 300)
    at = 0
    while at < len(events):
        size = rng.choice([1, 2, 7, 50])
        bench.append(*events[at : at + size])
        at += size
        bench.catch_up()
        if rng.random() < 0.1:
            bench.projector.close()
            bench.begin()
    for task_id, task in tasks.items():
        assert_is_fold(bench.row(task_id), task)
    assert bench.projector.skipped == {}
    with opened() as again:
        again.append(*events)
        again.catch_up()
        assert dump(again.view, list(tasks)) == dump(bench.view, list(tasks))


@pytest.mark.parametrize("seed", range(20))
def test_doubled_events_change_nothing(seed: int, bench: Bench) -> None:
    rng = Random(seed)
    events, tasks = history(rng, 200)
    at = 0
    while at < len(events):
        size = rng.choice([1, 5, 30])
        bench.append(*events[at : at + size])
        if rng.random() < 0.5:  # a producer that lost its id sends a part again
            bench.catch_up()
            bench.projector.close()
            bench.begin()
            bench.append(*events[max(0, at - rng.randrange(20)) : at + rng.randrange(size + 1)])
        at += size
        bench.catch_up()
    for task_id, task in tasks.items():
        assert_is_fold(bench.row(task_id), task)


class Shaky:
    """A view that fails before or after the write, as one behind a network does."""

    def __init__(self, view: SqliteView, rng: Random) -> None:
        self._view = view
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def apply(self, batches: Sequence[Batch]) -> None:
        if self._rng.random() < 0.3:
            raise Retriable("no answer")
        self._view.apply(batches)
        if self._rng.random() < 0.3:
            raise Retriable("the answer was lost")


@pytest.mark.parametrize("seed", range(10))
def test_a_view_that_fails_now_and_then_comes_out_the_same(seed: int, bench: Bench) -> None:
    rng = Random(seed)
    bench.view = Shaky(bench.view, rng)
    bench.begin()
    histories = [history(rng, 150, prefix=f"p{partition}-") for partition in range(PARTITIONS)]
    for at in range(0, 150, 10):
        for partition, (events, _) in enumerate(histories):
            bench.append(*events[at : at + 10], partition=partition)
        while bench.projector.lag():
            try:
                bench.projector.step(0)
            except Retriable:
                if rng.random() < 0.3:
                    bench.begin()
    for _, tasks in histories:
        for task_id, task in tasks.items():
            assert_is_fold(bench.row(task_id), task)


def test_events_of_one_batch_are_one_change_a_task() -> None:
    events = [event(SUBMITTED, 1), event(SUBMITTED, 1, task_id="u"), event(STARTED, 2), event(SUCCEEDED, 3, at=9)]
    known: dict[str, Known] = {}
    fold = changes_of(events, known)
    assert [(change.task_id, change.is_new, change.columns["version"]) for change in fold.changes] == [
        ("t", True, 3),
        ("u", True, 1),
    ]
    assert fold.changes[0].attempts == {
        1: {
            "worker_id": "w",
            "started_at": START + 5,
            "finished_at": START + 9,
            "outcome": AttemptOutcome.SUCCEEDED,
        }
    }
    assert {task_id: one.version for task_id, one in known.items()} == {"t": 3, "u": 1}


# --- what readers see beyond the fold ---------------------------------------------------------------------------------


def test_a_finished_task_shows_its_result_and_who_had_it(bench: Bench) -> None:
    bench.append(event(SUBMITTED, 1), event(STARTED, 2, at=6), event(SUCCEEDED, 3, at=10))
    bench.catch_up()
    row = bench.row("t")
    assert (row.status, row.result, row.result_content_type) == (Status.SUCCEEDED, b"7", "application/json")
    assert (row.started_at, row.completed_at, row.worker_id) == (START + 5, START + 9, "w")


def test_a_dead_task_is_in_the_dead_letter_queue_until_it_is_redriven_or_discarded(bench: Bench) -> None:
    dead = TaskAttemptFailed(
        attempt=1, worker_id="w", finished_at=START + 9, error=ERROR, failure_count=1, next_step=NextStep.DEAD
    )
    bodies: tuple[EventBody, ...] = (SUBMITTED, STARTED, dead)
    for task_id in ("t", "u"):
        for number, body in enumerate(bodies, start=1):
            bench.append(event(body, number, at=number, task_id=task_id))
    bench.catch_up()
    assert bench.row("t").is_dead_letter and bench.row("t").completed_at == START + 9

    task = evolve(evolve(evolve(None, event(SUBMITTED, 1)), event(STARTED, 2)), event(dead, 3))
    bench.append(event(TaskRedriven(task=task), 4, at=20), event(TaskDiscarded(), 4, at=20, task_id="u"))
    bench.catch_up()
    redriven, discarded = bench.row("t"), bench.row("u")
    assert (redriven.status, redriven.is_dead_letter, redriven.completed_at) == (Status.PENDING, False, None)
    assert (discarded.status, discarded.is_dead_letter, discarded.completed_at) == (Status.DEAD, False, START + 9)
    assert [one.outcome for one in redriven.attempts] == [AttemptOutcome.FAILED]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_attempt_that_ends_without_a_word_of_its_handler_says_how(bench: Bench, restarts: bool) -> None:
    lost = TaskAttemptLost(attempt=1, worker_id="w", error=ERROR, crash_count=1, next_step=NextStep.RETRY)
    returned = TaskAttemptLost(attempt=2, worker_id="w", error=ERROR, crash_count=1, next_step=NextStep.RETRY)
    bodies: list[EventBody] = [SUBMITTED, STARTED, lost, TaskStarted(attempt=2, worker_id="w", started_at=START)]
    bodies += [
        returned,
        TaskStarted(attempt=3, worker_id="w", started_at=START),
        TaskCancelRequested(),
        TaskCancelled(),
    ]
    for version, body in enumerate(bodies, start=1):
        bench.append(event(body, version, at=version))
        bench.catch_up()
        if restarts:
            bench.begin()
    outcomes = [attempt.outcome for attempt in bench.row("t").attempts]
    assert outcomes == [AttemptOutcome.LOST, AttemptOutcome.RETURNED, AttemptOutcome.CANCELLED]
    assert bench.row("t").attempts[2].finished_at == START + 8


def test_an_id_that_is_used_again_begins_anew(bench: Bench) -> None:
    bench.append(event(SUBMITTED, 1), event(STARTED, 2), event(SUCCEEDED, 3, at=9))
    bench.catch_up()
    again = msgspec.structs.replace(SUBMITTED, spec=TaskSpec(task_type="resize"))
    bench.append(event(again, 1, at=100))
    bench.catch_up()
    row = bench.row("t")
    assert (row.status, row.version, row.spec.task_type, row.result) == (Status.PENDING, 1, "resize", None)
    assert (row.completed_at, row.attempts) == (None, ())


# --- epochs, junk and bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_stale_owner_writes_is_void(bench: Bench, restarts: bool) -> None:
    def then(*events: Event) -> None:
        bench.append(*events)
        bench.catch_up()
        if restarts:
            bench.begin()

    then(event(OPENED, 0, task_id="shard-0"), event(SUBMITTED, 1))
    then(event(OPENED, 0, epoch=2, task_id="shard-0"))
    then(event(TaskCancelled(), 2), event(SUBMITTED, 1, task_id="u"))  # epoch 1: its owner slept
    then(event(OPENED, 0, epoch=2, task_id="shard-0"), event(OPENED, 0, epoch=1, task_id="shard-0"))
    then(event(STARTED, 2, epoch=2))
    assert bench.row("t").status is Status.RUNNING
    assert bench.view.task("u") is None
    assert bench.view.positions()[0] == Position(bench.projector.applied(0), epoch=2)
    assert restarts or bench.projector.skipped == {"void": 4}


def test_the_epoch_of_one_partition_says_nothing_of_another(bench: Bench) -> None:
    bench.append(event(OPENED, 0, epoch=9, task_id="shard-0"))
    bench.append(event(SUBMITTED, 1, epoch=1), partition=1)
    bench.catch_up()
    assert bench.row("t").version == 1


def test_records_that_are_no_events_are_counted_and_passed_over(bench: Bench) -> None:
    newer = msgspec.structs.replace(SUBMITTED, status=Status.UNKNOWN)
    unknown_step = TaskAttemptFailed(
        attempt=1, worker_id="w", finished_at=START, error=ERROR, failure_count=1, next_step=NextStep.UNKNOWN
    )
    junk = [
        b"\0\0\0\1\0junk!!",
        b"",
        b'{"a": 1}',
        CODEC.encode(event(STARTED, 2))[:-3],
        None,
        CODEC.encode(minimal(Task)),
    ]
    rejected = event(TaskRejected(request="CancelTask", outcome=Outcome.NOT_FOUND), 0, task_id="nobody")
    bench.append(event(SUBMITTED, 1), *junk, rejected, event(newer, 1, task_id="n"), event(STARTED, 2))
    bench.append(event(unknown_step, 3), event(SUCCEEDED, 4))
    with structlog.testing.capture_logs() as logs:
        bench.catch_up()
    assert bench.row("t").status is Status.SUCCEEDED
    assert bench.view.task("n") is None and bench.view.task("nobody") is None
    assert bench.projector.skipped == {"unknown_schema": 1, "undecodable": 4, "not_an_event": 1, "illegal": 2}
    assert {entry["event"] for entry in logs} == {"events_skipped"}


def test_only_so_many_tasks_are_remembered(bench: Bench) -> None:
    _remember(bench.projector._known, {f"t{i}": one for i, one in enumerate(_many(KNOWN_MAX + 10))}, KNOWN_MAX)
    assert len(bench.projector._known) == KNOWN_MAX
    bench.append(event(SUBMITTED, 1, task_id="t0"), event(STARTED, 2, task_id="t0"))
    bench.catch_up()
    assert len(bench.projector._known) == KNOWN_MAX and bench.row("t0").version == 2


def _many(count: int) -> list[Any]:
    known: dict[str, Any] = {}
    changes_of([event(SUBMITTED, 1)], known)
    return [known["t"]] * count


def test_a_view_that_is_ahead_of_the_log_is_another_logs(bench: Bench) -> None:
    end = bench.reader.end_offset(TopicPartition(TASK_EVENTS, 1))
    bench.view.apply([Batch(1, [], Position(end + 1, 1))])
    with pytest.raises(Fatal, match="another log"):
        bench.begin()


class Stuck:
    """A view that takes nothing."""

    def __init__(self, view: View) -> None:
        self.positions, self.task = view.positions, view.task

    def apply(self, *_: object) -> None:
        raise Retriable("no answer")


def test_a_projector_that_gets_nowhere_is_told_from_one_without_work(bench: Bench) -> None:
    now, view = [0.0], bench.view
    projector = Projector(bench.reader, view, CODEC, PARTITIONS, monotonic=lambda: now[0])
    now[0] = 100.0
    projector.step(0)
    assert projector.stalled_s() == 0  # there is nothing to do
    bench.append(event(SUBMITTED, 1))
    projector._view = Stuck(view)  # type: ignore[assignment]
    for _ in range(3):
        now[0] += 3
        with pytest.raises(Retriable):
            projector.step(0)
    assert projector.stalled_s() == 9
    projector._view = view
    projector.step(0)
    assert (projector.stalled_s(), projector.lag()) == (0, 0)
    projector.close()


def test_a_running_projector_applies_what_comes_and_stops_when_told(bench: Bench) -> None:
    stop, applied = threading.Event(), threading.Event()
    thread = threading.Thread(target=bench.projector.run, args=(stop, applied.set))
    thread.start()
    try:
        bench.append(event(SUBMITTED, 1))
        assert applied.wait(20)
    finally:
        stop.set()
        bench.reader.wake()
        thread.join(20)
    assert not thread.is_alive()
    assert bench.row("t").version == 1


def test_batches_that_follow_each_other_come_out_right_when_the_view_fails_in_between(bench: Bench) -> None:
    rng = Random(7)
    histories = [history(rng, BATCH_MAX, prefix=f"p{partition}-") for partition in range(PARTITIONS)]
    for partition, (events, _) in enumerate(histories):
        bench.append(*events, partition=partition)
    bench.view = Shaky(bench.view, rng)
    bench.begin()
    while bench.projector.lag():  # without waiting for the write, as a projector that is behind does
        with suppress(Retriable):
            bench.projector._advance(0)
    for _, tasks in histories:
        for task_id, task in tasks.items():
            assert_is_fold(bench.row(task_id), task)


# --- several projectors -----------------------------------------------------------------------------------------------


def test_projectors_of_a_group_share_the_partitions_and_inherit_them(bench: Bench) -> None:
    logs = [bench.broker.connect(), bench.broker.connect()]
    first, second = (Projector(log, bench.view, CODEC) for log in logs)
    for _ in range(3):
        first.step(0)
        second.step(0)
    assert (first.partitions(), second.partitions()) == (1, 1)
    for partition in range(PARTITIONS):
        bench.append(event(SUBMITTED, 1, task_id=f"t{partition}"), partition=partition)
    assert first.step(0) + second.step(0) == PARTITIONS
    first.close()
    for partition in range(PARTITIONS):
        bench.append(event(STARTED, 2, task_id=f"t{partition}"), partition=partition)
    for _ in range(3):
        second.step(0)
    assert second.partitions() == PARTITIONS
    assert [bench.row(f"t{partition}").status for partition in range(PARTITIONS)] == [Status.RUNNING] * PARTITIONS
    second.close()
    for log in logs:
        log.close()


def test_records_of_a_partition_that_left_while_the_view_was_away_are_the_new_owners(bench: Bench) -> None:
    class Away(SqliteView):
        is_away = True

        def apply(self, batches: Sequence[Batch]) -> None:
            if self.is_away:
                raise Retriable("the view is away")
            super().apply(batches)

    view = Away(":memory:")
    logs = [bench.broker.connect(), bench.broker.connect()]
    first = Projector(logs[0], view, CODEC)
    for partition in range(PARTITIONS):
        bench.append(event(SUBMITTED, 1, task_id=f"t{partition}"), partition=partition)
    with pytest.raises(Retriable):
        for _ in range(3):
            first.step(0)
    second = Projector(logs[1], view, CODEC)
    first._stay()
    view.is_away = False
    first.step(0)
    for _ in range(3):
        second.step(0)
    assert (first.partitions(), second.partitions()) == (1, 1)
    assert all(view.task(f"t{partition}") for partition in range(PARTITIONS))
    for projector in (first, second):
        projector.close()
    for log in logs:
        log.close()
    view.close()
